"""The goals of the CPU page: each with its worst figure, and the cases that miss it by name.

The goals are this project's own, for the ``cpu-speed`` suite. A goal is judged on the medians of one run, and nothing
is rounded towards it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from attnsuite.suite import statistics
from attnsuite.suite.record import Record
from attnsuite.suite.shown import same_rounds, shows_memory

from .cells import Cell, Group
from .figures import problem_of
from .table import Column, Table, table
from .words import TIMES, Value, number

SUITE = "cpu-speed"
NATIVE, BACKEND = "flash_cpu", "chunked"

Figure = Callable[[Group, Cell], float | None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A bound on a figure of some rows in some cases; with ``least`` a lower bound, with ``median`` on their median.

    ``masked`` cases have a window or documents; the others are plain causal.
    """

    text: str
    figure: Figure
    bound: float
    least: bool = False
    rows: str = "all cores"  # "all cores" | "one device" | "best"
    backend: str = BACKEND
    median: bool = False
    masked: bool = False
    kinds: tuple[str, ...] = ("op_forward",)
    dtype: str | None = None
    model: str | None = None
    grouped: bool | None = None  # whether query heads share KV heads
    shortest: int = 0
    longest: int = 10**9

    def concerns(self, record: Record) -> bool:
        """Whether the goal applies to a case."""
        problem = record.problem
        length = problem.get("sequence")
        masked = problem.get("window") or problem.get("window_size") or problem.get("documents", 1) != 1
        return (
            isinstance(length, int)
            and bool(masked) is self.masked
            and record.kind in self.kinds
            and self.dtype in (None, problem.get("dtype"))
            and self.model in (None, problem.get("model"))
            and self.grouped in (None, problem.get("heads") != problem.get("kv_heads"))
            and self.shortest <= length <= self.longest
        )


def time_over(*peers: str) -> Figure:
    """Time relative to the first of the peers that was timed in the same case: the median over shared rounds."""

    def figure(group: Group, cell: Cell) -> float | None:
        timed = {c.record.requested: c.record for c in group.cells if c.speed}
        other = next((timed[peer] for peer in peers if peer in timed), None)
        if other is None or not same_rounds(cell.record, other):
            return None
        ratio = statistics.paired_ratio(cell.record.samples, other.samples)
        return None if ratio is None else ratio.value

    return figure


def _over_its_share(*peers: str) -> Figure:
    """Time relative to a peer's that computes all pairs, over the share of pairs that may be seen."""
    over = time_over(*peers)

    def figure(group: Group, cell: Cell) -> float | None:
        problem: Any = cell.record.problem
        ratio = over(group, cell)
        if ratio is None or not cell.record.flops:
            return None
        pairs = 4 * problem["heads"] * problem["head_dim"] * problem["sequence"] ** 2 * problem.get("batch", 1)
        return ratio * pairs / cell.record.flops

    return figure


def _over_temporary_of(other: str) -> Figure:
    """Compiled temporary memory relative to another backend's of the same case and as many devices."""

    def figure(group: Group, cell: Cell) -> float | None:
        own = cell.record.memory.get("compiled_temp")
        for beside in group.cells:
            record = beside.record
            if record.requested == record.resolved == other and record.devices == cell.record.devices:
                theirs = record.memory.get("compiled_temp") if shows_memory(record) else None
                return own / theirs if own is not None and theirs else None
        return None

    return figure


def _peak(_: Group, cell: Cell) -> float | None:
    return cell.speed.peak_share if cell.speed else None


def _read(_: Group, cell: Cell) -> float | None:
    return cell.speed.read_share if cell.speed else None


def _temporary(_: Group, cell: Cell) -> float | None:
    return cell.temp_ratio


_FORWARD, _BOTH, _DECODE = ("op_forward",), ("op_forward_backward",), ("op_decode",)
_EVERY = (*_FORWARD, *_BOTH)
_KINDS = {"op_forward": "forward", "op_forward_backward": "forward and backward", "op_decode": "decode",
          "model_prefill": "prefill", "model_train": "train step"}  # fmt: skip
# The fastest PyTorch: unthrottled if its math library takes slower code on the processor, else as installed.
_FASTEST_TORCH = ("torch_unthrottled", "torch")
_TORCH = time_over(*_FASTEST_TORCH)
_TRANSFORMERS = time_over("transformers_unthrottled", "transformers")


def _native(text: str, figure: Figure, bound: float, **rest: Any) -> Goal:
    return Goal(text=text, figure=figure, bound=bound, backend=NATIVE, rows="best", **rest)


GOALS = (
    *(_native(text, _TORCH, bound, kinds=kinds, median=median, longest=8192)
      for kinds in (_FORWARD, _BOTH)
      for text, bound, median in (("below 0.95 of torch, S 512 to 8192", 0.95, False),
                                  ("median below 0.75 of torch, S 512 to 8192", 0.75, True))),
    _native("masked, at most 1.3 of the share of visible pairs in the time of torch with an equal mask",
            _over_its_share(*_FASTEST_TORCH), 1.3, masked=True),
    *(_native(f"80% of the measured read bandwidth, {dtype}", _read, 0.80, least=True, kinds=_DECODE, dtype=dtype)
      for dtype in ("float32", "bfloat16")),
    _native("70% of the measured matmul rate, float32, S 4096", _peak, 0.70, least=True, kinds=_EVERY,
            dtype="float32", shortest=4096, longest=4096),
    _native("50% of the measured matmul rate, bfloat16, S 4096", _peak, 0.50, least=True, kinds=_EVERY,
            dtype="bfloat16", shortest=4096, longest=4096),
    _native("model small, below 0.8 of transformers", _TRANSFORMERS, 0.8, kinds=("model_prefill", "model_train"),
            model="small"),
    _native("no more temporary memory than chunked", _over_temporary_of(BACKEND), 1.0, kinds=_EVERY),
    Goal(text="never slower than jax.nn", figure=time_over("jax_nn"), bound=1.0, rows="one device", kinds=_EVERY),
    Goal(text="a fifth of jax.nn's time or less, float32, S 2048", figure=time_over("jax_nn"), bound=1 / 5,
         dtype="float32", shortest=2048, longest=2048),
    Goal(text="a tenth of jax.nn's time or less, bfloat16, S 2048", figure=time_over("jax_nn"), bound=1 / 10,
         dtype="bfloat16", shortest=2048, longest=2048),
    Goal(text="a fifth of jax.nn's time or less, S 2048", figure=time_over("jax_nn"), bound=1 / 5, kinds=_BOTH,
         shortest=2048, longest=2048),
    Goal(text="at most 1.10 of torch, float32, S from 1024", figure=_TORCH, bound=1.10,
         dtype="float32", shortest=1024),
    Goal(text="at most 1.15 of torch, bfloat16, equal heads", figure=_TORCH, bound=1.15,
         dtype="bfloat16", grouped=False),
    Goal(text="at most 1.35 of torch, bfloat16, shared KV heads", figure=_TORCH, bound=1.35,
         dtype="bfloat16", grouped=True),
    Goal(text="at most 1.35 of torch, S from 2048", figure=_TORCH, bound=1.35,
         rows="one device", shortest=2048),
    Goal(text="at most 1.00 of torch", figure=_TORCH, bound=1.0, kinds=_BOTH),
    Goal(text="45% of the measured matmul rate, float32, S from 2048", figure=_peak, bound=0.45, least=True,
         kinds=_EVERY, dtype="float32", shortest=2048, longest=8192),
    Goal(text="35% of the measured matmul rate, bfloat16, S from 2048", figure=_peak, bound=0.35, least=True,
         kinds=_EVERY, dtype="bfloat16", shortest=2048, longest=8192),
    Goal(text="70% of the measured read bandwidth, float32", figure=_read, bound=0.70, least=True, rows="best",
         kinds=_DECODE, dtype="float32"),
    Goal(text="an eighth of standard's temporary memory or less, S 4096", figure=_temporary, bound=1 / 8,
         rows="one device", kinds=_EVERY, shortest=4096, longest=4096),
)  # fmt: skip


def goals(groups: Sequence[Group]) -> Table | None:
    """The goals that this run can judge; None for a run of another suite."""
    records = [cell.record for group in groups for cell in group.cells]
    if not records or any(record.suite != SUITE for record in records):
        return None
    rows = [row for goal in GOALS if (row := _row(goal, groups))]
    columns = (
        Column("goal", "goal"),
        Column("row", "row"),
        Column("met", "met"),
        Column("worst", "worst figure"),
        Column("missed", "missed in"),
    )
    return table("goals", "", columns, rows) if rows else None


def _row(goal: Goal, groups: Sequence[Group]) -> dict[str, Value] | None:
    found = [(value, group) for group in groups if goal.concerns(group.cells[0].record)
             for value in _value(goal, group)]  # fmt: skip
    if not found:
        return None
    if goal.median:
        found = [(statistics.median([value for value, _ in found]).value, None)]
    worst, _ = (min if goal.least else max)(found, key=lambda pair: pair[0])
    missed = [
        f"{problem_of(group) if group else 'median'}: {_shown(goal, value)}"
        for value, group in found
        if (value < goal.bound if goal.least else value > goal.bound)
    ]
    kinds = " and ".join(_KINDS[kind] for kind in goal.kinds)
    return {
        "goal": f"{goal.backend}, {kinds}: {goal.text}",
        "row": goal.rows,
        "met": f"{len(found) - len(missed)} of {len(found)}",
        "worst": _shown(goal, worst),
        "missed": "; ".join(missed) or None,
    }


def _shown(goal: Goal, value: float) -> str:
    return f"{number(100 * value)}%" if goal.least else f"{number(value)}{TIMES}"


def _value(goal: Goal, group: Group) -> Iterator[float]:
    rows = [cell for cell in group.cells if cell.record.requested == cell.record.resolved == goal.backend]
    if goal.figure is not _temporary:
        rows = [cell for cell in rows if cell.speed]
    most = max((cell.record.devices for cell in rows), default=1)
    if goal.rows != "best":
        rows = [cell for cell in rows if cell.record.devices == (1 if goal.rows == "one device" else most)]
    values = [value for cell in rows if (value := goal.figure(group, cell)) is not None]
    if values:
        yield (max if goal.least else min)(values)
