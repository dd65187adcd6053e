"""The mask inside a kernel: bounds of keys and queries, the kind of a block that follows, and the comparison itself.

``visibility.py`` defines the numbers. A key block has one record per strip of keys and one for the whole; a group of
queries keeps six numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .emit import Function, Value, Variable, i1, i32, i64, vector
from .isa import Isa
from .visibility import NO_KEY, NO_QUERY

_LEAST, _MOST = -(2**31), 2**31 - 1

# One record: the least and largest position and id of the keys that exist, and whether all do. int32 each.
LOW, HIGH, LOW_ID, HIGH_ID, ALL = range(0, 20, 4)
RECORD = 32

# Of a group of queries: least and largest first and last position, least and largest id, whether all exist.
FIRST_LOW, FIRST_HIGH, LAST_LOW, LAST_HIGH, QUERY_LOW_ID, QUERY_HIGH_ID, QUERY_ALL = range(0, 28, 4)
QUERY_RECORD = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Live:
    """The part of a key block that a group of queries needs: keys ``start`` to ``stop``, and whether it is masked."""

    start: Value
    stop: Value
    mixed: Value

    @property
    def any(self) -> Value:
        """Whether there is anything to compute."""
        return self.start < self.stop


def key_bounds(e: Function, position: Value, key_id: Value, keys: int, strip: int, records: Value) -> None:
    """Bounds of ``keys`` keys (their positions and ids, int32): one record for all, then one per ``strip``."""
    whole = _of_none(e, 2)
    with e.loop(0, keys // strip) as n:
        part = _of_none(e, 2)
        with e.loop(n * strip, n * strip + strip) as j:
            p, key = position.at(j, 4).load(i32), key_id.at(j, 4).load(i32)
            _extend(e, part, (p, key), key.compare("!=", NO_KEY))
        for variable, x, join in zip(whole, part, (e.min, e.max, e.min, e.max, e.min), strict=True):
            variable.set(join(x(), variable()))
        _store(part, records.at(n * RECORD + RECORD))
    _store(whole, records)


def query_bounds(e: Function, first: Value, last: Value, query_id: Value, count: Value, record: Value) -> None:
    """Bounds of ``count`` queries, from their int32 intervals and ids."""
    bounds = _of_none(e, 3)
    with e.loop(0, count) as i:
        numbers = [x.at(i, 4).load(i32) for x in (first, last, query_id)]
        _extend(e, bounds, numbers, numbers[2].compare("!=", NO_QUERY))
    _store(bounds, record)


def _of_none(e: Function, numbers: int) -> list[Variable]:
    """The least and largest of each number of nothing yet, and whether all exist."""
    return [e.variable(e.const(i32, x)) for x in (*(_MOST, _LEAST) * numbers, 1)]


def _extend(e: Function, bounds: list[Variable], numbers: Sequence[Value], exists: Value) -> None:
    """The bounds with one more, if it exists."""
    *ends, every = bounds
    joins = (e.min, e.max) * len(numbers)
    for variable, x, join in zip(ends, (x for x in numbers for _ in range(2)), joins, strict=True):
        variable.set(e.select(exists, join(x, variable()), variable()))
    every.set(e.select(exists, every(), 0))


def _store(bounds: list[Variable], record: Value) -> None:
    for n, bound in enumerate(bounds):
        record.at(4 * n).store(bound())


def live_keys(e: Function, queries: Value, records: Value, keys: int, strip: int) -> Live:
    """Empty, mixed or all visible; a mixed block is cut to the strips from the first to the last visible one."""

    def q(offset: int) -> Value:
        return queries.at(offset).load(i32)

    def k(offset: int, record: Value = records) -> Value:
        return record.at(offset).load(i32)

    def some(record: Value) -> Value:
        low, high, low_id, high_id = (k(offset, record) for offset in (LOW, HIGH, LOW_ID, HIGH_ID))
        positions = (low <= q(LAST_HIGH)) & (high >= q(FIRST_LOW)) & (low <= high)
        ids = (low_id <= q(QUERY_HIGH_ID)) & (high_id >= q(QUERY_LOW_ID))
        return positions & ids & (q(QUERY_LOW_ID) <= q(QUERY_HIGH_ID))

    start, stop = e.variable(e.const(i64, 0)), e.variable(e.const(i64, 0))
    mixed = e.variable(e.const(i1, 0))
    with e.when(some(records)):
        inside = (k(LOW) >= q(FIRST_HIGH)) & (k(HIGH) <= q(LAST_LOW)) & (k(ALL) & q(QUERY_ALL)).equals(1)
        same = (
            k(LOW_ID).equals(k(HIGH_ID)) & q(QUERY_LOW_ID).equals(q(QUERY_HIGH_ID)) & k(LOW_ID).equals(q(QUERY_LOW_ID))
        )
        stop.set(e.const(i64, keys))
        mixed.set((inside & same).equals(0))
        with e.when(mixed()):
            start.set(e.const(i64, keys))
            stop.set(e.const(i64, 0))
            with e.loop(0, keys // strip) as n, e.when(some(records.at(n * RECORD + RECORD))):
                start.set(e.min(start(), n * strip))
                stop.set((n + 1) * strip)
    return Live(start(), stop(), mixed())


@dataclasses.dataclass(frozen=True, slots=True)
class Lanes:
    """The intervals and ids of a group's queries, one vector of each per vector of queries."""

    first: list[Value]
    last: list[Value]
    query_id: list[Value]

    @staticmethod
    def of(isa: Isa, first: Value, last: Value, query_id: Value) -> Lanes:
        """Loads a whole group."""
        type_ = vector(i32, isa.lanes)
        return Lanes(
            *([x.at(v * isa.lanes, 4).load(type_) for v in range(isa.score_vectors)] for x in (first, last, query_id))
        )

    def see(self, e: Function, isa: Isa, v: int, position: Value, key_id: Value) -> Value:
        """Which queries of vector ``v`` see the key with this position and id."""
        p, name = e.splat(position, isa.lanes), e.splat(key_id, isa.lanes)
        return (self.first[v] <= p) & (p <= self.last[v]) & name.equals(self.query_id[v])
