"""The kind of :class:`.retrieval_case.RetrievalCase`: its rows, and how a cell is made ready."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from ..cell import Cell, Means, Prepared, Request
from ..measure import tensor_errors
from .kind import Kind, of_backends
from .retrieval_case import RetrievalCase


class Retrieval(Kind):
    """The kind of :class:`RetrievalCase`. What imports flax is imported where it is used."""

    titles: ClassVar = {"retrieval": "retrieval"}
    case: ClassVar = RetrievalCase
    results: ClassVar = {"recall": "recall {:.3f}"}
    needs_ceilings: ClassVar = False
    shares_process: ClassVar = True

    def cells(self, case: RetrievalCase, request: Request) -> Iterable[Cell]:
        """A cell per backend."""
        from . import model_program, model_quality  # noqa: PLC0415

        config = model_quality.retrieval_model(case).config
        return of_backends(case, request, lambda row: model_program.resolutions_of_sequence(config, case.sequence, row))

    def prepare(self, cell: Cell, case: RetrievalCase, means: Means) -> Prepared:
        """Measure everything at once; nothing is timed."""
        from . import model_quality  # noqa: PLC0415

        return Prepared(tensor_errors.judged(model_quality.recall(case, cell.row), exact=bool(cell.exact)))


RETRIEVAL = Retrieval()
