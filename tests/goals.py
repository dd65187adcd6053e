"""This project's goals for `flash_cpu` and Kascade on CPUs, judged on the medians of published runs.

    python tests/goals.py reports/published/cpu-amd-epyc-speed

prints a table: in how many of its cases each run meets each goal, the worst figure; then the cases that miss one.
Nothing is rounded towards a goal. `tests/reports/test_goals.py` holds the table of docs/explanation/cpu.md equal to it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from attnsuite import reports
from attnsuite.reports.cells import Cell, Group, group
from attnsuite.reports.columns import problem_of
from attnsuite.reports.kascade import tables as kascade
from attnsuite.suite import statistics
from attnsuite.suite.reportable import same_rounds, shows_memory

Figure = Callable[[Group, Cell], float | None]


@dataclasses.dataclass(frozen=True, slots=True)
class Goal:
    """A bound on a figure of the row ``row`` in cases of ``kinds`` whose problem is one of ``where``.

    Of several rows of a case (one device, all cores) the best counts. With ``least`` the bound is a lower one, with
    ``median`` it is on the median of the cases.
    """

    text: str
    figure: Figure
    bound: float
    kinds: tuple[str, ...]
    where: Callable[[dict], bool] = lambda _: True
    least: bool = False
    median: bool = False
    row: str = "flash_cpu"

    def judged(self, groups: Sequence[Group]) -> Judged | None:
        """The goal in a run; None where the run has no such case."""
        found = [(value, name) for group in groups for value, name in self._values(group)]
        if not found:
            return None
        if self.median:
            found = [(statistics.median([value for value, _ in found]).value, "median")]
        missed = [(name, value) for value, name in found if (value < self.bound if self.least else value > self.bound)]
        return Judged(self, len(found), (min if self.least else max)(value for value, _ in found), tuple(missed))

    def _values(self, group: Group) -> Iterator[tuple[float, str]]:
        if group.kind not in self.kinds or not self.where(dict(group.cells[0].record.problem)):
            return
        rows = [cell for cell in group.cells if cell.record.requested == self.row and cell.speed]
        values = [value for cell in rows if (value := self.figure(group, cell)) is not None]
        if values:
            yield (max if self.least else min)(values), problem_of(rows[0])


@dataclasses.dataclass(frozen=True, slots=True)
class Judged:
    """A goal in one run: in how many cases it was judged, the worst figure, and the cases that miss it."""

    goal: Goal
    cases: int
    worst: float
    missed: tuple[tuple[str, float], ...]

    @property
    def met(self) -> str:
        """In how many cases the goal is met, and the worst figure."""
        return f"{self.cases - len(self.missed)} of {self.cases}, worst {self.worst:.3g}"

    def __str__(self) -> str:
        return self.goal.text + "".join(f"\n    missed: {name}: {value:.3g}" for name, value in self.missed)


def time_over(*peers: str) -> Figure:
    """Time relative to the first of the peers that was timed in the same rounds; one whose numbers are wrong counts."""

    def figure(group: Group, cell: Cell) -> float | None:
        timed = {c.record.requested: c.record for c in group.cells if c.speed}
        other = next((timed[peer] for peer in peers if peer in timed), None)
        if other is None or not same_rounds(cell.record, other):
            return None
        ratio = statistics.paired_ratio(cell.record.samples, other.samples)
        return None if ratio is None else ratio.value

    return figure


def over_its_share(group: Group, cell: Cell) -> float | None:
    """Time relative to PyTorch's, which computes all pairs, over the share of pairs that may be seen."""
    problem, ratio = cell.record.problem, TORCH(group, cell)
    if ratio is None or not cell.record.flops:
        return None
    pairs = 4 * problem["heads"] * problem["head_dim"] * problem["sequence"] ** 2 * problem.get("batch", 1)
    return ratio * pairs / cell.record.flops


def temporary_over_chunked(group: Group, cell: Cell) -> float | None:
    """Compiled temporary memory relative to that of chunked on as many devices."""
    for other in (beside.record for beside in group.cells):
        if other.requested == "chunked" and other.devices == cell.record.devices and shows_memory(other):
            ours, theirs = (record.memory.get("compiled_temp") for record in (cell.record, other))
            return ours / theirs if ours is not None and theirs else None
    return None


def faster_than_dense(group: Group, cell: Cell) -> float | None:
    """How many times as fast as the fastest dense row."""
    ratio = None if cell.record.exact or kascade.ran_dense(cell.record) else kascade.relative(group, cell)
    return None if ratio is None else 1 / ratio.value


# The fastest PyTorch: unthrottled if its math library takes slower code on the processor, else as installed.
TORCH = time_over("torch_unthrottled", "torch")
TRANSFORMERS = time_over("transformers_unthrottled", "transformers")
FORWARD, BOTH, DECODE, MODEL = (
    ("op_forward",),
    ("op_forward_backward",),
    ("op_decode",),
    ("model_prefill", "model_train"),
)


def read_share(_: Group, cell: Cell) -> float | None:
    """Of the read bandwidth."""
    return cell.speed and cell.speed.read_share


def peak_share(_: Group, cell: Cell) -> float | None:
    """Of the matmul rate."""
    return cell.speed and cell.speed.peak_share


def masked(problem: dict) -> bool:
    """Whether the case has a window or documents."""
    return bool(problem.get("window_size")) or problem.get("documents", 1) != 1


def causal(problem: dict) -> bool:
    """Whether the case is plain causal attention at a length for which there are goals."""
    return not masked(problem) and problem["sequence"] <= 8192


def long(problem: dict) -> bool:
    """Those of them of 2048 tokens and more."""
    return causal(problem) and problem["sequence"] >= 2048


def stack(sequence: int, top_k: float) -> Callable[[dict], bool]:
    """Whether the case is a stack of 16 layers, 5 of them anchors, by the native kernels."""
    wanted = {"sequence": sequence, "top_k": top_k, "anchors": 5, "layers": 16, "kernel": "flash_cpu"}
    return lambda problem: problem | wanted == problem


GOALS = (
    Goal("forward: time below 0.95 of PyTorch's", TORCH, 0.95, FORWARD, causal),
    Goal("forward: median time below 0.75 of PyTorch's", TORCH, 0.75, FORWARD, causal, median=True),
    Goal("with gradients: time below 0.95 of PyTorch's", TORCH, 0.95, BOTH, causal),
    Goal("with gradients: median time below 0.75 of PyTorch's", TORCH, 0.75, BOTH, causal, median=True),
    Goal(
        "windows, documents: time at most 1.3 of their share of PyTorch's with an equal mask",
        *(over_its_share, 1.3, FORWARD, masked),
    ),
    Goal("decode step: 85% of the read bandwidth", read_share, 0.85, DECODE, least=True),
    Goal("forward, S 2048 and more: 80% of the matmul rate", peak_share, 0.8, FORWARD, long, least=True),
    Goal("with gradients, S 2048 and more: 70% of the matmul rate", peak_share, 0.7, BOTH, long, least=True),
    Goal(
        "model `small`, prefill and train step: time below 0.85 of `transformers`",
        *(TRANSFORMERS, 0.85, MODEL, lambda problem: problem["model"] == "small"),
    ),
    Goal("no more temporary memory than `chunked`", temporary_over_chunked, 1.0, FORWARD + BOTH, causal),
    Goal(
        "prefill, S 8192, 12.5%, 5 of 16 layers: 2.5 times dense",
        *(faster_than_dense, 2.5, ("kascade_prefill",), stack(8192, 0.125)),
        least=True,
        row="kascade",
    ),
    Goal(
        "decode step, S 32768, 10%, 5 of 16 layers: 4 times dense",
        *(faster_than_dense, 4.0, ("kascade_decode",), stack(32768, 0.1)),
        least=True,
        row="kascade",
    ),
)


def judged(run: Path) -> list[Judged]:
    """The goals that a run can judge."""
    groups = group(reports.load(run).records)
    return [found for goal in GOALS if (found := goal.judged(groups))]


def table(runs: Sequence[Path]) -> str:
    """Goals by runs, in Markdown: in how many of its cases a run meets a goal, and the worst figure."""
    found = [{each.goal.text: each for each in judged(run)} for run in runs]
    lines = [f"| goal | {' | '.join(run.name for run in runs)} |", "| :-- |" + " :-- |" * len(runs)]
    for text in (goal.text for goal in GOALS if any(goal.text in of_run for of_run in found)):
        cells = (of_run[text].met if text in of_run else "" for of_run in found)
        lines.append(f"| {text} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the goals of the runs that the command line names, and the cases that miss one."""
    runs = [Path(directory) for directory in sys.argv[1:]]
    missed = (f"{run.name}: {each}" for run in runs for each in judged(run) if each.missed)
    print(table(runs), *missed, sep="\n")  # noqa: T201 (a script)


if __name__ == "__main__":
    main()
