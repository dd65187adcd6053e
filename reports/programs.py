"""What the text of each compiled attention call shows, and whether a second run gives the same bits."""

from __future__ import annotations

from collections.abc import Sequence

from attnsuite.suite.record import ProgramText, Record

from .cells import Group
from .table import CASE, Column, Table, table
from .words import Value

TOLD = (
    "\u201cSame bits\u201d: a second run gave the same bits in the output and in every gradient; nothing stands there "
    "where a call takes over a second. The other columns are read from the text of the compiled program. Each product "
    "is shown with the dtypes of its operands and the dtype that it accumulates into; a kernel is opaque there. "
    "\u201cArrays of scores\u201d have an element for each query and key, \u201cCopies of K or V\u201d are arrays made "
    "from keys or values in another layout or dtype, outside of loops. Arrays inside a fusion do not count. Where the "
    "library behind a backend was called by hand for the same arrays, its count stands in parentheses, and the bytes "
    "that the program accesses (by the compiler, the body of a loop once) are relative to that call's."
)


_COUNTED = ("fusions", "conditionals")


def programs(groups: Sequence[Group], *, targets: bool = False) -> Table | None:
    """A row per cell whose program was read; None where none was. With ``targets`` a column says the device."""
    shown = [(group, cell.record, cell.label) for group in groups for cell in group.cells if _is_read(cell.record)]
    columns = (
        CASE,
        Column("backend", "backend"),
        *([Column("target", "device")] if targets else []),
        Column("repeats", "same bits"),
        Column("products", "products"),
        Column("score_arrays", "arrays of scores"),
        Column("copies", "copies of K or V"),
        *(Column(name, name) for name in _COUNTED),
        Column("bytes_over_by_hand", "bytes relative to by hand"),
    )
    rows = [_row(group, record, label) for group, record, label in shown]
    return table("programs", "", columns, rows) if rows else None


def _is_read(record: Record) -> bool:
    return record.kind.startswith("op_") and (record.program is not None or record.repeats is not None)


def _row(group: Group, record: Record, label: str) -> dict[str, Value]:
    read = record.program or ProgramText(products={})
    return {
        "case": group.case,
        "backend": label,
        "target": record.target,
        "repeats": record.repeats,
        "products": ", ".join(f"{_spaced(dtypes)} ({count})" for dtypes, count in read.products.items()) or None,
        "score_arrays": read.score_arrays,
        "copies": read.copies,
        **{name: _beside(read, name) for name in _COUNTED},
        "bytes_over_by_hand": _bytes_over_by_hand(read),
    }


def _beside(read: ProgramText, name: str) -> str | None:
    """A count of the program, and in parentheses that of the library's own call."""
    if read.operations is None:
        return None
    own = str(getattr(read.operations, name))
    return own if read.by_hand is None else f"{own} ({getattr(read.by_hand, name)})"


def _bytes_over_by_hand(read: ProgramText) -> float | None:
    both = [each.bytes_accessed for each in (read.operations, read.by_hand) if each is not None]
    own, other = both if len(both) == 2 else (None, None)
    return own / other if own and other else None


def _spaced(dtypes: str) -> str:
    """Spaces in place of the underscores of a kernel's name: a table cell breaks only at spaces."""
    return dtypes.replace("_", " ")
