"""What a model loses when its cache keeps keys and values in fewer bits: one row per dtype, and a control."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import ClassVar, Literal

from ..cell import Cell, Means, Prepared, Request
from ..measure import tensor_errors
from .kind import LOSS, Kind, Least, Long, cell, check_fields, model_word, name_case

# Each row with the dtype of its cache. The control gives prefilled slots the scales of others.
DTYPES = {
    "cache_float32": "float32",
    "cache_bfloat16": "bfloat16",
    "cache_int8": "int8",
    "cache_float8_e4m3fn": "float8_e4m3fn",
    "cache_int8_wrong_scales": "int8",
}
CONTROL = "cache_int8_wrong_scales"


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


class Cache(Kind):
    """The kind of :class:`CacheCase`. What imports flax is imported where it is used."""

    titles: ClassVar = {"cache_text": "cache, text"}
    case: ClassVar = CacheCase
    results: ClassVar = LOSS
    needs_ceilings: ClassVar = False
    shares_process: ClassVar = True

    def rows(self, case: CacheCase) -> tuple[str, ...]:
        """The dtypes of the cache, and the control."""
        return tuple(DTYPES)

    def cells(self, case: CacheCase, request: Request) -> Iterable[Cell]:
        """A cell per row. Raises InputError for a model that is not known, and a text too short for the case."""
        from . import model_program, model_quality  # noqa: PLC0415

        model_quality.read_text(case, model_program.model_config(case), request.text)
        for row in self.rows(case):
            if row in request.rows:
                exact = DTYPES[row] == "float32"
                yield cell(case, row, resolved=row, mode="native", exact=exact)

    def prepare(self, cell: Cell, case: CacheCase, means: Means) -> Prepared:
        """Measure everything at once; nothing is timed."""
        from . import model_quality  # noqa: PLC0415

        found = model_quality.cache_loss(case, DTYPES[cell.row], means.text, wrong_scales=cell.row == CONTROL)
        return Prepared(tensor_errors.judged(found, exact=bool(cell.exact)))


CACHE = Cache()
