"""Backends compared with implementations outside this project, in the same rounds of the same case."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attnsuite.suite.peers import PEERS
from attnsuite.suite.record import Record
from attnsuite.suite.reportable import ratio_of, same_rounds

from .cells import Cell, Group, by_kind
from .columns import BACKEND, PROBLEM
from .formatting import Value
from .table import Column, Table, table


def against(groups: Sequence[Group]) -> tuple[Table, ...]:
    """One table for each kind of case: the time of each exact backend relative to each peer, paired by round."""
    made = []
    for kind, title, cells in by_kind(groups):
        timed = [cell for cell in cells if is_peer(cell.record) and cell.speed]
        columns = [Column(peer, f"relative to {peer}", _over(peer, timed)) for peer in PEERS]
        ours = [cell for cell in cells if cell.speed is not None and cell.record.exact and not is_peer(cell.record)]
        if compared := [cell for cell in ours if any(column.value(cell) for column in columns)]:
            made.append(table(f"peers_{kind}", title, (PROBLEM, BACKEND, *columns), compared))
    return tuple(made)


def is_peer(record: Record) -> bool:
    """Whether a record is of an implementation outside this project."""
    return record.requested in PEERS


def _over(peer: str, timed: Sequence[Cell]) -> Callable[[Cell], Value]:
    """A function from a cell to its time relative to that of ``peer`` in the same case and rounds."""

    def ratio(cell: Cell) -> Value:
        found = [x.record for x in timed if x.record.requested == peer and x.case == cell.case]
        same = [record for record in found if same_rounds(cell.record, record)]
        return ratio_of(cell.record, same[-1]) if same else None

    return ratio
