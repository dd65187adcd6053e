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
    "from keys or values in another layout or dtype, outside of loops. Arrays inside a fusion do not count."
)


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
    }


def _spaced(dtypes: str) -> str:
    """Spaces in place of the underscores of a kernel's name: a table cell breaks only at spaces."""
    return dtypes.replace("_", " ")
