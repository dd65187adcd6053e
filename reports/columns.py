"""The columns of a measured cell, each declared once: its name, its header and unit, and how it is read.

Pages, their JSON and the CSV file are made of :data:`FIGURES`. A figure of ``Record.figures`` that is not among them is
one of its kind alone: the kind declares its header (``Kind.figures``), and :func:`further` reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from attnsuite.suite.kinds import kind_of, phase_of, title_of
from attnsuite.suite.reportable import is_trusted
from attnsuite.suite.statistics import Interval

from .cells import Cell
from .formatting import Value
from .table import MILLI, Column, scaled

BASELINE = "1 (baseline)"


def problem_of(cell: Cell) -> str:
    """The title of the cell's case without its kind, for tables whose heading names the kind."""
    return cell.case.removeprefix(f"{title_of(cell.record.kind)}, ")


CASE = Column("case", "case", lambda cell: cell.case, merge=True)
PROBLEM = Column("case", "case", problem_of, merge=True)
BACKEND = Column("backend", "backend", lambda cell: cell.label)
MODE = Column("mode", "mode", lambda cell: cell.record.mode)
EXACT = Column("exact", "exact", lambda cell: cell.record.exact)


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """``field`` of a cell's speed, of its record, or of the record's ``figures``: seconds, bytes, rates, shares.

    A page shows it times ``scale``. ``header`` may hold ``{baseline}``, ``{phase}``, ``{flops}``, which depend on the
    kind of case. Only cells of a kind of this ``phase`` have it, and only with a speed, unless it is ``untimed``.
    With ``relative`` the baseline's own cell shows :data:`BASELINE`. ``unit`` ends the name of the CSV file's column,
    where an interval has three: its value, ``low`` and ``high``.
    """

    name: str
    header: str
    table: Literal["times", "rates"]
    field: str
    scale: float = 1
    unit: str = ""
    phase: str = ""
    relative: bool = False
    untimed: bool = False

    def column(self, **values: str) -> Column:
        """The column of a page."""
        return Column(self.name, self.header.format(**values), self.on_page)

    def read(self, cell: Cell) -> Value:
        """The value, None where the cell has none."""
        if self.phase not in ("", phase_of(cell.record.kind)) or (cell.speed is None and not self.untimed):
            return None
        if hasattr(cell.speed, self.field):
            return getattr(cell.speed, self.field)
        return getattr(cell.record, self.field, cell.record.figures.get(self.field))

    def on_page(self, cell: Cell) -> Value:
        """What a page shows."""
        is_baseline = self.relative and cell.speed is not None and cell.is_baseline
        return BASELINE if is_baseline else scaled(self.read(cell), self.scale)

    def in_file(self, cell: Cell) -> Iterator[tuple[str, Value]]:
        """Names and values of its columns in the CSV file."""
        value, name = self.read(cell), f"{self.name}_{self.unit}" if self.unit else self.name
        if not isinstance(value, Interval):
            yield name, value
        else:
            yield from ((name, value.value), (f"{name}_low", value.low), (f"{name}_high", value.high))


_FIGURES = (
    Figure("median", "median (ms) [95% interval]", "times", "median", MILLI, "seconds"),
    Figure("time_over_standard", "time relative to {baseline} [95% interval]", "times", "ratio", relative=True),
    Figure("ttft", "TTFT (ms) [95% interval]", "times", "step", MILLI, "seconds", "prefill"),
    Figure("tpot", "TPOT (ms) [95% interval]", "times", "step", MILLI, "seconds", "decode"),
    Figure("tokens_per_second", "{phase}tokens/s", "times", "tokens_rate"),
    Figure("samples", "samples", "times", "samples"),
    Figure("in_flight", "calls in flight (ms)", "times", "in_flight", MILLI, "seconds"),
    Figure("cached", "inputs in the L2 cache (ms)", "times", "cached", MILLI, "seconds"),
    Figure("flops_per_second", "{flops}", "rates", "flops_rate"),
    Figure("share_of_matmul_peak", "% of peak", "rates", "peak_share", 100),
    Figure("share_of_read_rate", "% of read rate", "rates", "read_share", 100, phase="token"),
    Figure("kv_bytes_per_token", "KV cache (bytes per token)", "rates", "kv_bytes_per_token", untimed=True),
    Figure("lower_seconds", "trace and lower (s)", "rates", "lower_seconds"),
    Figure("compile_seconds", "compile (s)", "rates", "compile_seconds"),
)
FIGURES = {figure.name: figure for figure in _FIGURES}


def further(cell: Cell) -> dict[str, Value]:
    """The figures that only its kind has; none where the numbers of the cell are wrong."""
    figures = cell.record.figures if is_trusted(cell.record) else {}
    return {name: value for name, value in figures.items() if name not in FIGURES}


def further_column(kind: str, name: str) -> Column:
    """The column of a figure that only this kind has."""
    header = kind_of(kind).figures.get(name, name.replace("_", " "))
    return Column(name, header, lambda cell: further(cell).get(name))
