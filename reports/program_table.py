"""What the text of each compiled attention call shows, and whether a second run gives the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attnsuite.suite.kinds import kind_of
from attnsuite.suite.record import ProgramText

from .cells import Cell, Group, cells_of
from .columns import BACKEND, CASE
from .formatting import plural
from .page import Section
from .table import Column, table

EXPLANATION = (
    "\u201cSame bits\u201d: a second run gave the same bits in the output and in every gradient; nothing stands there "
    "where a call takes over a second. The other columns are read from the text of the compiled program. Each product "
    "is shown with the dtypes of its operands and the dtype that it accumulates into; a kernel is opaque there. "
    "\u201cArrays of scores\u201d have an element for each query and key, \u201cCopies of K or V\u201d are arrays made "
    "from keys or values in another layout or dtype, outside of loops. Arrays inside a fusion do not count. Where the "
    "library behind a backend was called by hand for the same arrays, its count stands in parentheses, and the bytes "
    "that the program accesses (by the compiler, the body of a loop once) are relative to that call's."
)


_COUNTED = ("fusions", "conditionals")


def programs(groups: Sequence[Group], *, targets: bool = False) -> Iterator[Section]:
    """A row per cell whose program was read, folded. With ``targets`` a column says the device."""
    columns = (
        CASE,
        BACKEND,
        *([Column("target", "device", lambda cell: cell.record.target)] if targets else []),
        Column("repeats", "same bits", lambda cell: cell.record.repeats),
        Column("products", "products", lambda cell: _products(_read(cell))),
        Column("score_arrays", "arrays of scores", lambda cell: _read(cell).score_arrays),
        Column("copies", "copies of K or V", lambda cell: _read(cell).copies),
        *(Column(name, name, lambda cell, name=name: _beside(_read(cell), name)) for name in _COUNTED),
        Column("bytes_over_by_hand", "bytes relative to by hand", lambda cell: _bytes_over_by_hand(_read(cell))),
    )
    calls = [cell for cell in cells_of(groups) if kind_of(cell.record.kind).is_call]
    selected = [cell for cell in calls if cell.record.program is not None or cell.record.repeats is not None]
    if selected:
        made = table("programs", "", columns, selected)
        yield Section("programs", "Programs", (EXPLANATION,), tables=(made,), folded=plural(len(selected), "program"))


def _read(cell: Cell) -> ProgramText:
    return cell.record.program or ProgramText(products={})


def _products(read: ProgramText) -> str | None:
    """The products; spaces in place of the underscores of a kernel's name, since a cell breaks only at spaces."""
    return ", ".join(f"{dtypes.replace('_', ' ')} ({count})" for dtypes, count in read.products.items()) or None


def _beside(read: ProgramText, name: str) -> str | None:
    """A count of the program, and in parentheses that of the library's own call."""
    if read.operations is None:
        return None
    count = str(getattr(read.operations, name))
    return count if read.by_hand is None else f"{count} ({getattr(read.by_hand, name)})"


def _bytes_over_by_hand(read: ProgramText) -> float | None:
    both = [each.bytes_accessed for each in (read.operations, read.by_hand) if each is not None]
    ours, other = both if len(both) == 2 else (None, None)
    return ours / other if ours and other else None
