"""Run the cells of a case in worker processes.

:func:`in_turns` gives every cell a process of its own. One process computes at a time, and the cells take turns sample
by sample: no cell is measured beside another's load, and a machine that slows down slows all cells alike, so ratios
hold. :func:`one_after_another` runs cells that are neither timed nor weighed in one shared process. A cell that fails,
hangs or dies becomes a record, and the others go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .. import peers, typed
from ..cell import Case, Cell, Facts, record_of
from ..errors import CellFailure, InputError
from ..kinds import kind_of
from ..measure.speed import Sampling
from ..record import Environment, Record, RecordError, Status
from .process import Worker
from .references import References

if TYPE_CHECKING:
    from attnsuite.models import TextFile


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What one cell may use: seconds to get ready, as many again for all its samples, and bytes of memory."""

    seconds: float
    memory: int


class Watcher(Protocol):
    """Receives progress of the work on cells."""

    def doing(self, case: str, backend: str, what: str) -> None:
        """Work on a cell begins."""
        ...

    def warn(self, sentence: str) -> None:
        """A warning that does not stop the grid."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What all cells of a run share."""

    suite: str
    limits: Limits
    environment: Environment
    text: TextFile | None
    watcher: Watcher
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    profile: Path | None = None  # directory for a profile of each timed cell


def now() -> str:
    """The time to the second, ISO 8601, UTC."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


@dataclasses.dataclass(slots=True)
class _Running:
    """A cell between its start and its record."""

    cell: Cell
    worker: Worker
    started: str = dataclasses.field(default_factory=now)
    facts: Facts = dataclasses.field(default_factory=Facts)
    samples: list[float] = dataclasses.field(default_factory=list)
    wall: float = 0.0
    sampling_seconds: float = 0.0

    def ask(self, request: dict[str, Any], seconds: float) -> Any:
        """The worker's answer. The time that it takes is added to the cell's."""
        begin = time.perf_counter()
        try:
            return self.worker.ask(request, seconds)
        finally:
            self.wall += time.perf_counter() - begin

    def record(self, context: RunContext, status: Status, error: str | None = None) -> Record:
        """The record of a cell that was made ready."""
        try:
            return self._record(context, self.facts, status=status, error=error, samples=tuple(self.samples))
        except RecordError as wrong:
            return self.failed(context, CellFailure("crashed", f"its figures cannot be recorded: {wrong}."))

    def failed(self, context: RunContext, failure: CellFailure | InputError) -> Record:
        """The record of a cell that failed. Its earlier samples are dropped; the other cells and cases go on."""
        status = failure.status if isinstance(failure, CellFailure) else "crashed"
        return self._record(context, Facts(), status=status, error=str(failure))

    def _record(self, context: RunContext, facts: Facts, **rest: Any) -> Record:
        return record_of(
            self.cell,
            facts,
            suite=context.suite,
            environment=context.environment,
            started=self.started,
            wall_seconds=self.wall,
            **rest,
        )


def run_case(case: Case, cells: Sequence[Cell], references: References, context: RunContext) -> Iterator[Record]:
    """Measure the cells of ``case`` with the executor that its kind asks for, and yield their records."""
    executor = one_after_another if kind_of(case.kind).shares_process else in_turns
    yield from executor(case, cells, references, context)


def in_turns(case: Case, cells: Sequence[Cell], references: References, context: RunContext) -> Iterator[Record]:
    """Yields a failure at once, and the measured cells when all samples are taken."""
    with contextlib.ExitStack() as stack:
        running = [
            _Running(cell, stack.enter_context(Worker(context.limits.memory, environment=_variables(cell, references))))
            for cell in cells
        ]
        context.watcher.doing(case.name, "reference", "computing what the cells are judged by")
        judged_by = {mode: _reference(case, mode, references) for mode in dict.fromkeys(cell.mode for cell in cells)}
        ready: list[_Running] = []
        for each in running:
            record = _prepare(each, judged_by[each.cell.mode], context)
            if record is None:
                ready.append(each)
            else:
                each.worker.close()
                yield record
        yield from _sample(case, ready, context)


def one_after_another(
    case: Case, cells: Sequence[Cell], references: References, context: RunContext
) -> Iterator[Record]:
    """Runs all cells in one process; a new one starts after a cell that ended it."""
    worker = Worker(context.limits.memory)
    try:
        context.watcher.doing(case.name, "reference", "computing what the cells are judged by")
        reference = _reference(case, "native", references)
        for cell in cells:
            each = _Running(cell, worker)
            ended = _prepare(each, reference, context) or each.record(context, "ok")
            if ended.status not in ("ok", "wrong") and not isinstance(reference, Exception):
                worker.close()
                worker = Worker(context.limits.memory)
            yield ended
    finally:
        worker.close()


def refused(cell: Cell, context: RunContext) -> Record:
    """The record of a cell that is not measured, because its row was refused.

    The backend refused. Its fallback is measured in its own cell, or no backend can run the case.
    """
    instead = f"{cell.resolved} would run, and is a cell of its own" if cell.resolved else "nothing else can run"
    return record_of(
        cell,
        status="unsupported",
        error=f"refused; {instead}.",
        suite=context.suite,
        environment=context.environment,
        started=now(),
    )


def facts_of(answer: Any) -> Facts:
    """The facts in the answer of a cell's process. Raises CellFailure where they cannot be recorded."""
    try:
        return typed.convert(answer, Facts)
    except ValueError as wrong:
        raise CellFailure("crashed", f"its figures cannot be recorded: {wrong}.") from wrong


def is_measured(cell: Cell, rows: Sequence[str]) -> bool:
    """Whether a cell is measured: something runs for it, and its fallback is not another row of the case."""
    return cell.mode is not None and not (cell.mode == "fallback" and cell.resolved in rows)


def _variables(cell: Cell, references: References) -> Mapping[str, str]:
    """Environment variables of a cell's process: the number of CPU devices for JAX, a library to preload for a peer."""
    devices = {} if cell.devices == 1 else {"JAX_NUM_CPU_DEVICES": str(cell.devices)}
    peer = peers.worker_environment(cell.row, references.folder) if cell.row in peers.PEERS else {}
    return {**devices, **peer}


def _reference(case: Case, mode: str | None, references: References) -> Path | CellFailure | InputError | None:
    """The file that judges the cells of ``case`` in ``mode``; the failure where it cannot be computed."""
    try:
        return references.path(case, mode)
    except (CellFailure, InputError) as failure:
        return failure


def _prepare(each: _Running, reference: Path | CellFailure | InputError | None, context: RunContext) -> Record | None:
    """Make a cell ready for sampling. Returns its record where it ends here: it failed, is wrong, or is not timed."""
    if isinstance(reference, Exception):
        return each.failed(context, reference)
    context.watcher.doing(each.cell.case, each.cell.row, "compiling and judging")
    request = {
        "do": "prepare",
        "cell": dataclasses.asdict(each.cell),
        "reference": None if reference is None else str(reference),
        "memory_limit": context.limits.memory,
        "text": context.text,
    }
    try:
        each.facts = facts_of(each.ask(request, context.limits.seconds))
    except (CellFailure, InputError) as failure:
        return each.failed(context, failure)
    if each.facts.wrong is not None:
        return each.record(context, "wrong", each.facts.wrong)
    return each.record(context, "ok") if each.facts.calls is None else None


def _profile(each: _Running, context: RunContext) -> None:
    """Profile one more call, after the samples: a profiler slows what it watches. Its failure is a warning."""
    if context.profile is None:
        return
    context.watcher.doing(each.cell.case, each.cell.row, "profiling")
    devices = "" if each.cell.devices == 1 else f"-{each.cell.devices}-devices"
    name = f"{each.cell.case}-{each.cell.row}{devices}"
    request = {"do": "profile", "folder": str(context.profile.resolve()), "name": name}
    try:
        refused = each.worker.ask(request, context.limits.seconds)
    except CellFailure as failure:
        refused = [f"{name} was not profiled: {failure}"]
    for sentence in refused:
        context.watcher.warn(sentence)


def _sample(case: Case, running: list[_Running], context: RunContext) -> Iterator[Record]:
    """In each round take one sample of every cell that still needs some."""
    done: list[_Running] = []
    active = list(running)
    number = 0
    while active:
        number += 1
        for each in tuple(active):
            context.watcher.doing(case.name, each.cell.row, f"sample {number}")
            before = each.wall
            try:
                each.samples.append(each.ask({"do": "sample"}, context.limits.seconds))
            except CellFailure as failure:
                active.remove(each)
                yield each.failed(context, failure)
                continue
            each.sampling_seconds += each.wall - before
            enough = context.sampling.enough(each.samples, each.facts.calls or 1)
            if enough or each.sampling_seconds > context.limits.seconds:
                active.remove(each)
                done.append(each)
                _profile(each, context)
                each.worker.close()
    yield from (each.record(context, "ok") for each in sorted(done, key=running.index))
