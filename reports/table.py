"""A table: rows of values under named columns. Values stay numbers until they are shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from .words import Value

MIB = 2**20
MILLI = 1e3


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """A column: its key in JSON, its header with the unit, and whether equal cells of consecutive rows are merged."""

    key: str
    header: str
    merge: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """Rows of values under named columns. Columns without any value are left out by :func:`table`."""

    key: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Value], ...]


CASE = Column("case", "case", merge=True)


def table(key: str, title: str, columns: Iterable[Column], rows: Iterable[Mapping[str, Value]]) -> Table:
    """A table of the columns that have a value in at least one row."""
    kept = tuple(rows)
    return Table(key, title, tuple(c for c in columns if any(row.get(c.key) is not None for row in kept)), kept)


def scaled(value: float | None, factor: float) -> float | None:
    """``value`` times ``factor``, None where there is none."""
    return None if value is None else value * factor
