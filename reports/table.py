"""A table: rows of values under named columns. Values stay numbers until they are shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from attnsuite.suite.statistics import Interval

from .formatting import Value

MIB = 2**20
MILLI = 1e3


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """A column: its key in JSON, its header with the unit, and how its value is read from what a row is about.

    Without ``read`` a row is about a mapping, and the value is that of the key. With ``merge`` a cell that repeats the
    row above stays empty.
    """

    key: str
    header: str
    read: Callable[[Any], Value] | None = None
    merge: bool = False

    def value(self, item: Any) -> Value:
        """The value of the row about ``item``."""
        return item.get(self.key) if self.read is None else self.read(item)

    def of_first(self) -> Column:
        """The same column of rows that are about tuples: it reads their first member."""
        return dataclasses.replace(self, read=lambda item: self.value(item[0]))


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """Rows of values under named columns."""

    key: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Value], ...]


def table(key: str, title: str, columns: Iterable[Column], items: Iterable[Any]) -> Table:
    """A table with a row for each item, of the columns that have a value in at least one row."""
    columns = tuple(columns)
    rows = tuple({column.key: column.value(item) for column in columns} for item in items)
    return Table(key, title, tuple(c for c in columns if any(row[c.key] is not None for row in rows)), rows)


def scaled(value: Value, factor: float) -> Value:
    """A number or an interval times ``factor``; anything else as it is."""
    if factor == 1 or isinstance(value, bool) or not isinstance(value, int | float | Interval):
        return value
    if not isinstance(value, Interval):
        return value * factor
    low, high = (None if end is None else end * factor for end in (value.low, value.high))
    return dataclasses.replace(value, value=value.value * factor, low=low, high=high)
