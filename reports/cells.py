"""Group records by case, and derive for each cell the figures that ``suite/reportable.py`` lets a page show."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from attnsuite.suite.peers import PEERS
from attnsuite.suite.record import Record
from attnsuite.suite.reportable import STANDARD, Speed, label, speed_of, standard_of, temp_ratio

from . import cases


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One record with everything that is derived from it and from the standard cell of its case."""

    record: Record
    label: str
    case: str
    standard: Record | None  # the baseline of its case
    speed: Speed | None
    temp_ratio: float | None  # compiled temporary memory relative to the standard backend

    @property
    def is_baseline(self) -> bool:
        """Whether times and memory of the case are relative to this cell."""
        return self.record is self.standard

    @property
    def is_peer(self) -> bool:
        """Whether it is of an implementation outside this project."""
        return self.record.requested in PEERS


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """The cells of one case for one target, the standard backend first."""

    kind: str
    case: str
    cells: tuple[Cell, ...]

    @property
    def problem(self) -> dict[str, Any]:
        """The fields of the case."""
        return self.cells[0].record.problem


def group(records: Iterable[Record]) -> tuple[Group, ...]:
    """The records by case and target, in a stable order. A title names the target unless only that target ran."""
    ordered = sorted(records, key=cases.order)
    here = {record.target for record in ordered if record.mode in ("native", "fallback", "interpret")}
    grouped = [
        tuple(members)
        for _, members in itertools.groupby(ordered, key=lambda record: (record.kind, record.case, record.target))
    ]
    titles = [cases.title(members[0]) for members in grouped]
    titles = [
        title if here <= {members[0].target} and here else f"{title}, for {members[0].target}"
        for title, members in zip(titles, grouped, strict=True)
    ]
    unclear = {title for title in titles if titles.count(title) > 1}
    return tuple(
        _group(f"{title} ({members[0].case})" if title in unclear else title, members)
        for title, members in zip(titles, grouped, strict=True)
    )


def cells_of(groups: Iterable[Group]) -> list[Cell]:
    """The cells of all groups, in their order."""
    return [cell for group in groups for cell in group.cells]


def by_kind(groups: Sequence[Group]) -> Iterator[tuple[str, str, list[Cell]]]:
    """Each kind of case with the heading of its tables and its cells, in the order of the tables."""
    for kind, title in cases.titles(group.kind for group in groups):
        yield kind, title[:1].upper() + title[1:], cells_of(group for group in groups if group.kind == kind)


def _group(title: str, members: tuple[Record, ...]) -> Group:
    standard = standard_of(members)
    ordered = sorted(members, key=lambda record: (record.resolved != STANDARD, record.requested != STANDARD,
                                                  label(record), str(record.mode), record.key))  # fmt: skip
    cells = tuple(
        Cell(record, label(record), title, standard, speed_of(record, standard), temp_ratio(record, standard))
        for record in ordered
    )
    return Group(members[0].kind, title, cells)
