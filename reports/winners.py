"""Maps of winners: the fastest exact backend of each case, where the cases of a kind vary in two dimensions or more.

A map is a grid. Its columns are the sequence lengths, or the values of the field that varies most where the length does
not vary. Its rows are the combinations of all other fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from . import cases
from .answer import distinguishable, exact_speeds
from .cells import Group
from .plot import Picture, Square, Winners

_FEWEST = 2  # columns, and rows, that make a map
_LAYOUT = ("heads", "kv_heads")  # described together
_NAMES = frozenset({"kind", "name"})


def winners(groups: Sequence[Group]) -> tuple[Picture, ...]:
    """The maps of all kinds as one picture; none where no kind varies in two dimensions."""
    timed = [member for member in groups if exact_speeds(member)]
    maps = [
        found
        for kind, title in cases.titles(member.kind for member in timed)
        if (found := _map(title, [member for member in timed if member.kind == kind]))
    ]
    return (Picture("winners.svg", "Fastest exact backend of each case", tuple(maps)),) if maps else ()


def _map(title: str, members: Sequence[Group]) -> Winners | None:
    """The map of one kind; None where fewer than two rows have cases in two columns or more."""
    across = _across(members)
    if across is None:
        return None
    varying = [name for name in _fields(members) if name != across and len(_values(members, name)) > 1]
    grid: dict[str, dict[str, Group]] = {}  # row -> column -> the first case there
    for member in members:
        grid.setdefault(_row(member, across, varying), {}).setdefault(str(member.problem.get(across)), member)
    rows = _distinct(row for row, found in grid.items() if len(found) >= _FEWEST)
    columns = _distinct(column for row in rows for column in grid[row])
    if len(rows) < _FEWEST:
        return None
    squares = tuple(
        _square(x, y, grid[row][column])
        for x, column in enumerate(columns)
        for y, row in enumerate(rows)
        if column in grid[row]
    )
    return Winners(title, across.replace("_", " "), tuple(columns), tuple(rows), squares)


def _across(members: Sequence[Group]) -> str | None:
    """The field of the columns; None where nothing varies."""
    counts = {name: len(_values(members, name)) for name in _fields(members)}
    if counts.get("sequence", 0) >= _FEWEST:
        return "sequence"
    most = max(counts.values(), default=0)
    return next(name for name, count in counts.items() if count == most) if most >= _FEWEST else None


def _row(member: Group, across: str, varying: Sequence[str]) -> str:
    problem = member.problem
    described = {name: problem.get(name) for name in varying}
    if described.keys() & set(_LAYOUT) and across not in _LAYOUT:
        described |= {name: problem.get(name) for name in _LAYOUT}
    return cases.describe(member.kind, described) or "otherwise plain"


def _square(column: int, row: int, member: Group) -> Square:
    ranked = exact_speeds(member)
    unclear = len(ranked) > 1 and not distinguishable(ranked)
    return Square(column, row, ranked[0].label, ranked[1].label if unclear else None)


def _fields(members: Sequence[Group]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for member in members for name in member.problem if name not in _NAMES))


def _values(members: Sequence[Group], name: str) -> set[str]:
    return {str(member.problem.get(name)) for member in members}


def _distinct(texts: Iterator[str]) -> list[str]:
    return sorted(set(texts), key=cases.natural)
