"""Turn the cells of a grid into records; each executor in the way that suits its cells.

- :func:`in_turns` gives every cell of a case a process of its own; on a TPU, which admits one process, the cells of a
  case share one. One process computes at a time, and the cells take
  turns sample by sample: no cell is measured beside another's load, and a machine that slows down slows all cells
  alike, so ratios hold. Interpreted cells, of which nothing is measured, come first, as many at once as there are
  cores.
- :func:`one_after_another` runs cells that are neither timed nor weighed in one shared process, in several joined ones,
  or on a GPU in several that share the cases.
- :func:`side_by_side` runs several lanes of cells at once, for example one per target of a compiler.

A cell that fails, hangs or dies becomes a record, and the others go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import queue
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from attnsuite.backends.devices import usable_cores

from .. import host_devices, peers
from ..cell import Case, Cell, Outcome
from ..errors import CellFailure, InputError
from ..kinds import kind_of
from ..record import Environment, Record
from ..user_function import files_of
from .process import Worker
from .running import RunContext, Running, now, on_device, prepare, profile, record_of, sample
from .shared_process import Joined, Restarting, Turn

_PROCESS_BYTES = 2 * 2**30  # of a GPU's memory, that JAX and a problem of the contract take in a process
# That share the problems of the contract on a GPU. On an H200 with 16 cores each of 16 took 2.6 to 7.6 times as long
# for a cell as one alone (tests/reports/test_h200.py).
_PROCESSES = 4


def in_turns(cells: Sequence[Cell], context: RunContext) -> Iterator[Record]:
    """Yields a failure at once, and the measured cells when all samples are taken. The cells are of one case."""
    case = cells[0].case
    with contextlib.ExitStack() as stack:
        running = _started(cells, context, stack)
        context.watcher.doing(case.name, "reference", "computing what the cells are judged by")
        modes = dict.fromkeys(cell.mode for cell in cells)
        judged_by = {
            mode: _reference(case, mode, context, drawn=kind_of(case.kind).judges_in_subprocess) for mode in modes
        }
        lanes = [
            Lane(_records([each], lambda _: judged_by["interpret"], context), each.worker.close)
            for each in running
            if each.cell.mode == "interpret"
        ]
        yield from side_by_side(lanes, 1 if _share(cells) else usable_cores())
        ready: list[Running] = []
        for each in running:
            if each.cell.mode == "interpret":
                continue
            record = prepare(each, judged_by[each.cell.mode], context)
            if record is None:
                ready.append(each)
            else:
                each.worker.close()
                yield record
        yield from _sample(case, ready, context)


def one_after_another(cells: Sequence[Cell], context: RunContext) -> Iterator[Record]:
    """Runs cells in one process, or in joined ones as their kind says; new ones start after a cell that failed.

    Cells on several devices have a process beside the others. On a GPU cases that share a process are divided among
    several (:func:`_parts`).
    """

    @functools.cache
    def reference(case: Case) -> Path | CellFailure | InputError | None:
        context.watcher.doing(case.name, "reference", "computing what the cells are judged by")
        return _reference(case, "native", context)

    def process_layout(cell: Cell) -> tuple[tuple[int, int] | None, int]:
        return kind_of(cell.kind).processes(cell.case), cell.devices

    for (joined, devices), members in itertools.groupby(cells, key=process_layout):
        if joined is None:
            start = functools.partial(Worker, context.limits.memory, host_devices.variables(devices))
        else:
            start = functools.partial(Joined, context.limits.memory // joined[0], *joined)
        parts = [(part, Restarting(start)) for part in _parts(list(members), context)]
        lanes = [
            Lane(_records(map(functools.partial(Running, worker=process), part), reference, context), process.stop)
            for part, process in parts
        ]
        if len(lanes) > 1:
            yield from side_by_side(lanes, len(lanes))
            continue
        with contextlib.closing(parts[0][1]):
            yield from lanes[0].records


@dataclasses.dataclass(frozen=True, slots=True)
class Lane:
    """Cells that are computed one after the other, beside other lanes: ``records`` has each as it ends.

    ``stop`` ends what is running, and skips the remaining cells. Another thread calls it, and once more at the end.
    """

    records: Iterator[Record]
    stop: Callable[[], None]


def side_by_side(lanes: Sequence[Lane], at_once: int) -> Iterator[Record]:
    """The records of all lanes, in the order in which they end; ``at_once`` lanes run at the same time."""
    found: queue.SimpleQueue[Record | BaseException | None] = queue.SimpleQueue()

    def work(lane: Lane) -> None:
        try:
            for record in lane.records:
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


def refused(cell: Cell, suite: str, environment: Environment) -> Record:
    """The record of a cell that is not measured, because its row was refused; it names the backend that could run."""
    instead = f"{cell.resolved} would run" if cell.resolved else "nothing else can run"
    return record_of(
        cell,
        Outcome(status="unsupported", error=f"refused; {instead}."),
        suite=suite,
        environment=environment,
        started=now(),
    )


def _variables(cell: Cell, context: RunContext) -> Mapping[str, str]:
    """Environment variables of a cell's process: the number of CPU devices for JAX, a library to preload for a peer."""
    devices = {} if cell.devices == 1 else {"JAX_NUM_CPU_DEVICES": str(cell.devices)}
    peer = peers.worker_environment(cell.row, context.references.folder) if cell.row in peers.PEERS else {}
    return {**devices, **peer}


def _records(
    cells: Iterable[Running],
    reference: Callable[[Case], Path | CellFailure | InputError | None],
    context: RunContext,
) -> Iterator[Record]:
    """The records of cells that are not sampled."""
    for each in cells:
        yield prepare(each, reference(each.cell.case), context) or each.record(context)


def _parts(cells: Sequence[Cell], context: RunContext) -> list[list[Cell]]:
    """The cells of each process: all of them, or on a GPU those of every n-th case, where no case has its own process.

    There compiling takes the time, on one core per process. What a process itself takes of the GPU's memory is limited.
    """
    cases = [list(members) for _, members in itertools.groupby(cells, key=lambda cell: cell.case)]
    memory = context.environment.get("device_memory")
    if not (cells[0].target.startswith("cuda") and kind_of(cells[0].kind).cases_share_process and memory):
        return [list(cells)]
    count = max(1, min(len(cases), usable_cores(), _PROCESSES, memory // _PROCESS_BYTES))
    return [list(itertools.chain(*cases[first::count])) for first in range(count)]


def _share(cells: Sequence[Cell]) -> bool:
    """Whether the cells are of a device that admits one process."""
    return cells[0].target.startswith("tpu")


def _started(cells: Sequence[Cell], context: RunContext, stack: contextlib.ExitStack) -> list[Running]:
    """The cells, each with its process or its part of the one that they share; confined with a file of the user."""
    memory = context.limits.memory
    if not _share(cells):
        starts = (Worker(memory, _variables(cell, context), files_of([cell.row])) for cell in cells)
        return [Running(cell, stack.enter_context(worker)) for cell, worker in zip(cells, starts, strict=True)]
    process = stack.enter_context(Worker(memory, code=files_of(cell.row for cell in cells)))
    return [Running(cell, Turn(process, cell.key)) for cell in cells]


def _reference(
    case: Case, mode: str | None, context: RunContext, *, drawn: bool = False
) -> Path | CellFailure | InputError | None:
    """The file that judges the cells of ``case`` in ``mode``; the failure where it cannot be computed."""
    try:
        return context.references.path(case, mode, drawn=drawn)
    except (CellFailure, InputError) as failure:
        return failure


def _sample(case: Case, running: list[Running], context: RunContext) -> Iterator[Record]:
    """In each round take one sample of every cell that still needs some."""
    done: list[Running] = []
    active = list(running)
    number = 0
    while active:
        number += 1
        for each in tuple(active):
            context.watcher.doing(case.name, each.cell.row, f"sample {number}")
            try:
                enough = sample(each, context)
                if enough:
                    on_device(each, context)
            except CellFailure as failure:
                active.remove(each)
                yield each.failed(context, failure)
                continue
            if enough:
                active.remove(each)
                each.note_few_samples()
                done.append(each)
                profile(each, context)
                each.worker.close()
    yield from (each.record(context) for each in sorted(done, key=running.index))
