"""The kind of :class:`.serving_case.ServingCase`: its rows, and how a cell is made ready."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from attnsuite.models import TextFile

from ..cell import Cell, Means, Prepared, Request
from ..errors import CellFailure
from ..measure.program import Draw
from .kind import Kind, of_backends
from .serving_case import ServingCase


class Serving(Kind):
    """The kind of :class:`ServingCase`. What imports flax is imported where it is used."""

    titles: ClassVar = {"serving": "continuous batching"}
    case: ClassVar = ServingCase
    shares_process: ClassVar = True

    def cells(self, case: ServingCase, request: Request) -> Iterable[Cell]:
        """A cell per backend. Raises InputError for a model that is not known, and a text too short for the case."""
        from . import model_quality, serving_trace  # noqa: PLC0415

        config = model_quality.checked_config(case, request.text, case.requests)
        return of_backends(case, request, lambda row: serving_trace.resolutions_of(case, config, row))

    def write_reference(self, case: ServingCase, path: Path, text: TextFile | None, draw: Draw | None) -> None:
        """The tokens that each request gets alone from the standard backend."""
        from . import serving_trace  # noqa: PLC0415

        serving_trace.write_alone(case, path, text)

    def prepare(self, cell: Cell, case: ServingCase, means: Means) -> Prepared:
        """Serve the trace once to compile, and once by the clock."""
        from . import serving_trace  # noqa: PLC0415

        if means.reference is None:
            raise CellFailure("crashed", f"{case.name} has no tokens to compare with.")
        return Prepared(serving_trace.measure(case, cell.row, means.reference, means.text))


SERVING = Serving()
