"""Turn the cells of a grid into records; each executor in the way that suits its cells.

- :func:`in_turns` gives every cell of a case a process of its own. One process computes at a time, and the cells take
  turns sample by sample: no cell is measured beside another's load, and a machine that slows down slows all cells
  alike, so ratios hold. Interpreted cells, of which nothing is measured, come first, as many at once as there are
  cores.
- :func:`one_after_another` runs cells that are neither timed nor weighed in one shared process, or in several joined
  ones.
- :func:`here` runs such cells in the present process.
- :func:`side_by_side` runs several lanes of cells at once, for example one per target of a compiler.

A cell that fails, hangs or dies becomes a record, and the others go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import functools
import itertools
import queue
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from attnsuite.backends.devices import usable_cores

from .. import peers, typed
from ..cell import Case, Cell, Means, Outcome
from ..errors import CellFailure, InputError
from ..kinds import checked, kind_of, make_case
from ..measure.speed import Sampling
from ..record import Environment, Measured, Record, RecordError
from ..statistics import FEWEST
from .process import Joined, Restarting, Worker
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

    def fewer(self, cells: int) -> None:
        """The grid has ``cells`` cells fewer than it was begun with."""
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


def record_of(cell: Cell, outcome: Outcome, *, environment: Environment, **rest: Any) -> Record:
    """The record of a cell: its request, its outcome, and ``rest`` (suite, started, samples, ...). Raises RecordError.

    Where the cell's own process refused it (the outcome has reasons), nothing was resolved.
    """
    how = {
        "process_high_water_method": outcome.memory_method,
        "calls_per_sample": outcome.calls,
        "pinned_threads": outcome.pinned_threads,
    }
    record = Record(
        key=cell.key,
        case=cell.case,
        kind=cell.kind,
        problem=cell.problem,
        requested=cell.row,
        resolved=None if outcome.reasons else cell.resolved,
        mode=None if outcome.status == "unsupported" else cell.mode,
        devices=cell.devices,
        exact=cell.exact,
        target=cell.target,
        reasons=(*cell.reasons, *outcome.reasons),
        status=outcome.status,
        environment=environment | {name: value for name, value in how.items() if value is not None},  # pyright: ignore[reportArgumentType]
        **{field.name: getattr(outcome, field.name) for field in dataclasses.fields(Measured)},
        **rest,
    )
    return checked(record)


def outcome_of(answer: Any) -> Outcome:
    """The outcome in the answer of a cell's process. Raises CellFailure where it cannot be recorded."""
    try:
        return typed.convert(answer, Outcome)
    except ValueError as wrong:
        raise CellFailure("crashed", f"its figures cannot be recorded: {wrong}.") from wrong


@dataclasses.dataclass(slots=True)
class Running:
    """A cell between its start and its record. ``worker`` (a Worker or Restarting) is None in the present process."""

    cell: Cell
    worker: Any = None
    started: str = dataclasses.field(default_factory=now)
    outcome: Outcome = dataclasses.field(default_factory=Outcome)
    samples: list[float] = dataclasses.field(default_factory=list)
    wall: float = 0.0
    sampling_seconds: float = 0.0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Adds the time in this context to the cell's."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.wall += time.perf_counter() - begin

    def ask(self, request: dict[str, Any], seconds: float) -> Any:
        """The worker's answer."""
        with self.timed():
            return self.worker.ask(request, seconds)

    def note_few_samples(self) -> None:
        """Add a note where the samples are too few for an interval."""
        if len(self.samples) < FEWEST:
            note = f"sampled {len(self.samples)} times, since a sample takes {max(self.samples):.0f} s: no interval."
            self.outcome = dataclasses.replace(self.outcome, notes=(*self.outcome.notes, note))

    def failed(self, context: RunContext, failure: CellFailure | InputError) -> Record:
        """The record of a cell that failed. Its earlier samples are dropped; the other cells and cases go on."""
        status = failure.status if isinstance(failure, CellFailure) else "crashed"
        self.outcome, self.samples = Outcome(status=status, error=str(failure)), []
        return self.record(context)

    def record(self, context: RunContext) -> Record:
        """The record of a cell that has its outcome."""
        try:
            return record_of(
                self.cell,
                self.outcome,
                suite=context.suite,
                environment=context.environment,
                started=self.started,
                wall_seconds=self.wall,
                samples=tuple(self.samples),
            )
        except RecordError as wrong:
            return self.failed(context, CellFailure("crashed", f"its figures cannot be recorded: {wrong}."))


def in_turns(case: Case, cells: Sequence[Cell], references: References, context: RunContext) -> Iterator[Record]:
    """Yields a failure at once, and the measured cells when all samples are taken."""
    with contextlib.ExitStack() as stack:
        running = [
            Running(cell, stack.enter_context(Worker(context.limits.memory, environment=_variables(cell, references))))
            for cell in cells
        ]
        context.watcher.doing(case.name, "reference", "computing what the cells are judged by")
        judged_by = {mode: _reference(case, mode, references) for mode in dict.fromkeys(cell.mode for cell in cells)}
        lanes = [
            _Interpreted(each, judged_by["interpret"], context) for each in running if each.cell.mode == "interpret"
        ]
        yield from side_by_side(lanes, usable_cores())
        ready: list[Running] = []
        for each in running:
            if each.cell.mode == "interpret":
                continue
            record = _prepare(each, judged_by[each.cell.mode], context)
            if record is None:
                ready.append(each)
            else:
                each.worker.close()
                yield record
        yield from _sample(case, ready, context)


def one_after_another(cells: Sequence[Cell], references: References, context: RunContext) -> Iterator[Record]:
    """Runs cells in one process, or in joined ones as their kind says; new ones start after a cell that failed."""

    @functools.cache
    def reference(case: Case) -> Path | CellFailure | InputError | None:
        context.watcher.doing(case.name, "reference", "computing what the cells are judged by")
        return _reference(case, "native", references)

    def joined(cell: Cell) -> tuple[int, int] | None:
        return kind_of(cell.kind).processes(make_case(cell.problem))

    for found, members in itertools.groupby(cells, key=joined):
        count = found[0] if found else 1
        start = functools.partial(Worker if found is None else Joined, context.limits.memory // count, *(found or ()))
        with contextlib.closing(Restarting(start)) as process:
            for cell in members:
                each = Running(cell, process)
                yield _prepare(each, reference(make_case(cell.problem)), context) or each.record(context)


def here(cells: Iterable[Cell], context: RunContext) -> Iterator[Record]:
    """Runs cells in the present process, without a limit, one after the other."""
    means = Means(reference=None, memory_limit=context.limits.memory, text=context.text)
    for cell in cells:
        if cell.mode is None:
            yield refused(cell, context)
            continue
        context.watcher.doing(cell.case, cell.row, "computing")
        each = Running(cell)
        try:
            with each.timed():
                each.outcome = kind_of(cell.kind).prepare(cell, make_case(cell.problem), means).outcome
        except Exception as error:  # noqa: BLE001 (whatever a backend raises becomes this cell's record)
            each.outcome = Outcome(status="crashed", error=f"{type(error).__name__}: {' '.join(str(error).split())}")
        yield each.record(context)


class Lane(Protocol):
    """Cells that are computed one after the other, beside other lanes."""

    def records(self) -> Iterator[Record]:
        """The record of each cell, as it ends."""
        ...

    def stop(self) -> None:
        """End what is running, and skip the remaining cells. Called by another thread, and once more at the end."""
        ...


def side_by_side(lanes: Sequence[Lane], at_once: int) -> Iterator[Record]:
    """The records of all lanes, in the order in which they end; ``at_once`` lanes run at the same time."""
    found: queue.SimpleQueue[Record | BaseException | None] = queue.SimpleQueue()

    def work(lane: Lane) -> None:
        try:
            for record in lane.records():
                found.put(record)
        except BaseException as error:  # noqa: BLE001 (raised again where the records are read)
            found.put(error)
        lane.stop()
        found.put(None)

    with ThreadPoolExecutor(at_once) as pool:
        for lane in lanes:
            pool.submit(work, lane)
        try:
            for _ in lanes:
                while (record := found.get()) is not None:
                    if isinstance(record, BaseException):
                        raise record
                    yield record
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for lane in lanes:
                lane.stop()


def refused(cell: Cell, context: RunContext) -> Record:
    """The record of a cell that is not measured, because its row was refused; it names the backend that could run."""
    instead = f"{cell.resolved} would run" if cell.resolved else "nothing else can run"
    return record_of(
        cell,
        Outcome(status="unsupported", error=f"refused; {instead}."),
        suite=context.suite,
        environment=context.environment,
        started=now(),
    )


def is_measured(cell: Cell) -> bool:
    """Whether a cell is measured: what was named runs. Nothing is measured under another name in its place."""
    return cell.mode is not None and cell.mode != "fallback"


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


def _prepare(each: Running, reference: Path | CellFailure | InputError | None, context: RunContext) -> Record | None:
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
        each.outcome = outcome_of(each.ask(request, context.limits.seconds))
    except (CellFailure, InputError) as failure:
        return each.failed(context, failure)
    # A rival is timed although its numbers are outside the bound: no goal is met by leaving it out.
    timed = each.outcome.status == "ok" or (each.outcome.status == "wrong" and each.cell.row in peers.PEERS)
    return None if timed and each.outcome.calls is not None else each.record(context)


@dataclasses.dataclass(frozen=True, slots=True)
class _Interpreted:
    """The lane of one cell that an interpreter runs."""

    each: Running
    reference: Path | CellFailure | InputError | None
    context: RunContext

    def records(self) -> Iterator[Record]:
        yield _prepare(self.each, self.reference, self.context) or self.each.record(self.context)

    def stop(self) -> None:
        self.each.worker.close()


def _profile(each: Running, context: RunContext) -> None:
    """Profile one more call, after the samples: a profiler slows what it watches. Its failure is a warning."""
    if context.profile is None:
        return
    context.watcher.doing(each.cell.case, each.cell.row, "profiling")
    devices = "" if each.cell.devices == 1 else f"-{each.cell.devices}-devices"
    name = f"{each.cell.case}-{each.cell.row}{devices}"
    request = {"do": "profile", "folder": str(context.profile.resolve()), "name": name}
    try:
        warnings = each.worker.ask(request, context.limits.seconds)
    except CellFailure as failure:
        warnings = [f"{name} was not profiled: {failure}"]
    for sentence in warnings:
        context.watcher.warn(sentence)


def _sample(case: Case, running: list[Running], context: RunContext) -> Iterator[Record]:
    """In each round take one sample of every cell that still needs some."""
    done: list[Running] = []
    active = list(running)
    number = 0
    while active:
        number += 1
        for each in tuple(active):
            context.watcher.doing(case.name, each.cell.row, f"sample {number}")
            before, slept = each.wall, each.worker.slept
            try:
                sample = each.ask({"do": "sample"}, context.limits.seconds)
            except CellFailure as failure:
                active.remove(each)
                yield each.failed(context, failure)
                continue
            if each.worker.slept > slept:  # the time for which the run was stopped may be in the sample
                continue
            each.samples.append(sample)
            each.sampling_seconds += each.wall - before
            enough = context.sampling.enough(each.samples, each.outcome.calls or 1)
            if enough or each.sampling_seconds > context.limits.seconds:
                active.remove(each)
                each.note_few_samples()
                done.append(each)
                _profile(each, context)
                each.worker.close()
    yield from (each.record(context) for each in sorted(done, key=running.index))
