"""Recall of distant needles on the constructed checkpoint: an attention that misses distant keys fails this test."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import ClassVar, Literal

from ..cell import Cell, Means, Prepared, Request
from ..measure import tensor_errors
from ..typed import Seed
from .kind import Kind, Least, Long, check_fields, name_case, of_backends


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalCase:
    """Recall at distance on the constructed checkpoint: ``prompts`` needles in ``sequence`` tokens."""

    kind: Literal["retrieval"] = "retrieval"
    name: str = ""
    sequence: Long = 1024
    prompts: Least = 64
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_fields(self)
        name_case(self, f"retrieval-s{self.sequence}")


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
