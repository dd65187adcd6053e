"""The kind of :class:`.cache_case.CacheCase`: its rows, and how a cell is made ready."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from ..cell import Cell, Means, Prepared, Request
from ..measure import tensor_errors
from .cache_case import DTYPES, CacheCase
from .kind import LOSS, Kind, cell


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
        from . import cache_quality  # noqa: PLC0415

        cache_quality.checked(case, request.text)
        for row in self.rows(case):
            if row in request.rows:
                exact = DTYPES[row] == "float32"
                yield cell(case, row, resolved=row, mode="native", exact=exact)

    def prepare(self, cell: Cell, case: CacheCase, means: Means) -> Prepared:
        """Measure everything at once; nothing is timed."""
        from . import cache_quality  # noqa: PLC0415

        return Prepared(tensor_errors.judged(cache_quality.measure(case, cell.row, means.text), exact=bool(cell.exact)))


CACHE = Cache()
