"""Backends compared with implementations outside this project, in the same rounds of the same case."""

from __future__ import annotations

from collections.abc import Sequence

from attnsuite.suite import statistics
from attnsuite.suite.peers import PEERS
from attnsuite.suite.record import Record
from attnsuite.suite.shown import same_rounds

from . import cases
from .cells import Cell, Group
from .figures import problem_of
from .table import CASE, Column, Table, table
from .words import Value


def against(groups: Sequence[Group]) -> tuple[Table, ...]:
    """One table for each kind of case: the time of each exact backend relative to each peer, paired by round."""
    made = []
    for kind, title in cases.titles(group.kind for group in groups):
        rows = [_row(group, cell) for group in groups if group.kind == kind for cell in group.cells if _ours(cell)]
        columns = [CASE, Column("backend", "backend"), *(Column(peer, f"relative to {peer}") for peer in PEERS)]
        rows = [row for row in rows if len(row) > 2]
        if rows:
            made.append(table(f"peers_{kind}", title[:1].upper() + title[1:], columns, rows))
    return tuple(made)


def is_peer(record: Record) -> bool:
    """Whether a record is of an implementation outside this project."""
    return record.requested in PEERS


def _ours(cell: Cell) -> bool:
    return cell.speed is not None and cell.record.exact is True and not is_peer(cell.record)


def _row(group: Group, cell: Cell) -> dict[str, Value]:
    row: dict[str, Value] = {"case": problem_of(group), "backend": cell.label}
    for other in group.cells:
        if is_peer(other.record) and other.speed and same_rounds(cell.record, other.record):
            row[other.record.requested] = statistics.paired_ratio(cell.record.samples, other.record.samples)
    return row
