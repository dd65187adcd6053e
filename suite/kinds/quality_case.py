"""What a model loses under a backend: perplexity on text, behind a cache of fewer bits, recall of distant needles.

``model_quality.py`` has the measurements, each beside the standard backend's on the same tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

from ..cell import Cell, Means, Prepared, Request
from ..measure import tensor_errors
from ..typed import Count, Seed
from . import kind_of
from .kind import (
    LOSS,
    SHORT_DTYPE,
    Dtype,
    Kind,
    Least,
    Long,
    backends_of,
    cell,
    check_fields,
    model_word,
    name_case,
    of_backend,
    of_backends,
    refused,
)

# The rows of a cache case: the dtype of each cache, and a control that gives prefilled slots the scales of others.
CONTROL = "cache_int8_wrong_scales"
CACHES = ("cache_float32", "cache_bfloat16", "cache_int8", "cache_float8_e4m3fn", CONTROL)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextCase:
    """Perplexity of a model on held-out text: ``sequences`` windows of ``sequence`` tokens each."""

    kind: Literal["perplexity"] = "perplexity"
    name: str = ""
    model: str = "text"
    sequence: Least = 512
    sequences: Count = 16
    dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        check_fields(self)
        name_case(self, f"perplexity-{model_word(self.model)}-s{self.sequence}-{SHORT_DTYPE[self.dtype]}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheCase:
    """What a model loses when its cache keeps keys and values in fewer bits: one row per dtype.

    The first half of each of ``sequences`` windows of held-out text, ``sequence`` tokens long, is prefilled. The second
    half is read behind the cache, as decode steps read it, and scored against the same model without a cache, in
    float32. The control ``cache_int8_wrong_scales`` gives each prefilled slot the scales of another slot and KV head,
    and has to lose more than ``cache_int8``. ``standard`` computes every row. Raises InputError for a field that does
    not fit.
    """

    kind: Literal["cache_text"] = "cache_text"
    name: str = ""
    model: str = "text"
    sequence: Long = 512
    sequences: Least = 12

    def __post_init__(self) -> None:
        check_fields(self)
        name_case(self, f"cache-text-{model_word(self.model)}-s{self.sequence}")


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


class Quality(Kind):
    """A kind whose cells measure everything at once; nothing is timed. Flax is imported where it is used."""

    results: ClassVar = LOSS
    needs_ceilings: ClassVar = False
    shares_process: ClassVar = True

    def prepare(self, cell: Cell, case: Any, means: Means) -> Prepared:
        """The loss of the row."""
        from . import model_quality  # noqa: PLC0415

        found = model_quality.MEASURED[case.kind](case, cell.row, means.text)
        return Prepared(tensor_errors.judged(found, exact=bool(cell.exact)))


class Text(Quality):
    """The kind of :class:`TextCase`."""

    titles: ClassVar = {"perplexity": "perplexity"}
    phases: ClassVar = {"perplexity": "text"}
    case: ClassVar = TextCase

    def cells(self, case: TextCase, request: Request) -> Iterable[Cell]:
        """A cell per backend. Raises InputError for a model that is not known, and a text too short for the case."""
        from . import model_program, model_quality  # noqa: PLC0415

        config = model_quality.checked_config(case, request.text)
        beside_controls = {
            kind_of(other.kind).controlled.get(other.kind): other.kind
            for other in request.cases
            if getattr(other, "model", None) == case.model
        }
        ask = functools.partial(model_program.resolutions_of_sequence, config, case.sequence)
        for row in backends_of(request):
            if (kind := beside_controls.get(row)) is None:
                yield of_backend(case, row, ask)
            else:
                named = f"in the {kind.replace('_', '-')} cases of this run"
                yield refused(case, row, (f"{row}: measured on this model's text beside its controls, {named}.",))

    def of_checkpoint(self, text: Mapping[str, Any], timed: Mapping[str, Any]) -> Iterable[TextCase]:
        """The loss on the text."""
        yield TextCase(**text)


class Cache(Quality):
    """The kind of :class:`CacheCase`."""

    titles: ClassVar = {"cache_text": "cache, text"}
    case: ClassVar = CacheCase

    def rows(self, case: CacheCase) -> tuple[str, ...]:
        """The dtypes of the cache, and the control."""
        return CACHES

    def cells(self, case: CacheCase, request: Request) -> Iterable[Cell]:
        """A cell per row. Raises InputError for a model that is not known, and a text too short for the case."""
        from . import model_quality  # noqa: PLC0415

        model_quality.checked_config(case, request.text)
        for row in (row for row in CACHES if row in request.rows):
            yield cell(case, row, resolved=row, mode="native", exact=row == "cache_float32")


class Retrieval(Quality):
    """The kind of :class:`RetrievalCase`."""

    titles: ClassVar = {"retrieval": "retrieval"}
    case: ClassVar = RetrievalCase
    results: ClassVar = {"recall": "recall {:.3f}"}

    def cells(self, case: RetrievalCase, request: Request) -> Iterable[Cell]:
        """A cell per backend."""
        from . import model_program, model_quality  # noqa: PLC0415

        config = model_quality.retrieval_model(case).config
        return of_backends(case, request, lambda row: model_program.resolutions_of_sequence(config, case.sequence, row))


TEXT, CACHE, RETRIEVAL = Text(), Cache(), Retrieval()
