"""Perplexity of a model on held-out text, and its agreement with the standard backend, sequence by sequence."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

from ..cell import Cell, Means, Prepared, Request
from ..measure import tensor_errors
from . import kind_of
from .kind import (
    LOSS,
    SHORT_DTYPE,
    Dtype,
    Kind,
    Least,
    backends_of,
    check_fields,
    model_word,
    name_case,
    of_backend,
    refused,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextCase:
    """Perplexity of a model on held-out text: ``sequences`` windows of ``sequence`` tokens each."""

    kind: Literal["perplexity"] = "perplexity"
    name: str = ""
    model: str = "text"
    sequence: Least = 512
    sequences: Least = 16
    dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        check_fields(self)
        name_case(self, f"perplexity-{model_word(self.model)}-s{self.sequence}-{SHORT_DTYPE[self.dtype]}")


class Text(Kind):
    """The kind of :class:`TextCase`. What imports flax is imported where it is used."""

    titles: ClassVar = {"perplexity": "perplexity"}
    phases: ClassVar = {"perplexity": "text"}
    case: ClassVar = TextCase
    results: ClassVar = LOSS
    needs_ceilings: ClassVar = False
    shares_process: ClassVar = True

    def cells(self, case: TextCase, request: Request) -> Iterable[Cell]:
        """A cell per backend. Raises InputError for a model that is not known, and a text too short for the case."""
        from . import model_program, model_quality  # noqa: PLC0415

        config = model_program.model_config(case)
        model_quality.read_text(case, config, request.text)
        ask = functools.partial(model_program.resolutions_of_sequence, config, case.sequence)
        beside_controls = {
            kind_of(other.kind).controlled.get(other.kind): other.kind
            for other in request.cases
            if getattr(other, "model", None) == case.model
        }
        for row in backends_of(request):
            kind = beside_controls.get(row)
            yield of_backend(case, row, ask) if kind is None else _left_to_controls(case, row, kind)

    def of_checkpoint(self, text: Mapping[str, Any], timed: Mapping[str, Any]) -> Iterable[TextCase]:
        """The loss on the text."""
        yield TextCase(**text)

    def prepare(self, cell: Cell, case: TextCase, means: Means) -> Prepared:
        """Measure everything at once; nothing is timed."""
        from . import model_quality  # noqa: PLC0415

        return Prepared(
            tensor_errors.judged(model_quality.perplexity(case, cell.row, means.text), exact=bool(cell.exact))
        )


def _left_to_controls(case: TextCase, row: str, kind: str) -> Cell:
    cases = kind.replace("_", "-")
    reason = f"{row}: measured on this model's text beside its controls, in the {cases} cases of this run."
    return refused(case, row, (reason,))


TEXT = Text()
