"""``attnsuite compile``: compile every case for every backend and every device, without an accelerator in the machine.

Each kind of device has one process; as many run side by side as there are cores and memory for. A compiler's answer is
kept on disk, so that a run that was stopped, or is asked again, compiles nothing twice: one file per cell, named by a
hash of everything that could change the answer: the case, the configuration of its model, the backend, the device, the
versions, this project's source and the flags. A damaged file, or one that another version wrote, counts as missing. A
file that cannot be written costs time; the run goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import platform
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attnsuite.backends import Target, registry
from attnsuite.backends.devices import cpu_name, usable_cores

from .cell import Cell, Outcome
from .compile import schedules, slices, topologies
from .compile.compilation import NO_COMPILER, backend_and_role, compiled, in_roles
from .compile.programs import model_config
from .errors import CellFailure, InputError
from .grid import folders, work
from .grid.execute import execute
from .grid.executors import Lane, side_by_side
from .grid.fleet import FleetRequest
from .grid.grid import Grid, GridWatcher
from .grid.process import Worker
from .grid.running import RunContext, Running, answered
from .grid.shared_process import Restarting
from .kinds import kind, problem_of
from .kinds.attention_call import OpCase
from .kinds.model_case import ModelCase
from .measure import environment
from .measure.memory import machine_bytes
from .record import Environment, Record, RecordError
from .store import Manifest
from .user_function import digests, files_of, is_reference, register_functions

SUITE = "compile"
_BYTES_PER_PROCESS = 5 * 2**30  # of this machine: a compiler on a whole model
_CIRCUMSTANCES = ("versions", "source", "flags")  # of an answer, that the environment of its record says
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# Sizes that a search tries: quarters of powers of two. There are 2**5 - 1, so five answers find the largest that fits.
SEARCH_LENGTHS = (768, 896, *(2**power * quarter // 4 for power in range(10, 17) for quarter in range(4, 8)), 2**17)
SEARCH_BATCHES = (1, 2, 3, *(2**power * quarter // 4 for power in range(2, 9) for quarter in range(4, 8)))
SEARCH_STEPS = 5
_SIZES = {"sequence": SEARCH_LENGTHS, "batch": SEARCH_BATCHES}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompileGrid(Grid):
    """What to compile, checked.

    Each of ``searches`` is a field, ``sequence`` or ``batch``, and a model case: the field's largest value that fits is
    searched. With ``schedule`` the schedules of Pallas kernels are read, or their launches, too.
    """

    suite: str = SUITE
    searches: tuple[tuple[str, ModelCase], ...] = ()
    targets: tuple[Target, ...]
    cache: Path
    command: tuple[str, ...]
    kernels: tuple[str, ...] = ()
    schedule: bool = False

    @property
    def searched(self) -> int:
        """The most sizes that the searches try."""
        return SEARCH_STEPS * len(self.searches) * len(self.backends) * len(self.targets)

    def look(self) -> tuple[Environment, list[Cell]]:
        """What this machine is, and the cells without the searches, those of a target together. Raises InputError.

        A file of the user that does not load is found before anything is compiled.
        """
        if files := files_of(self.backends):
            with contextlib.suppress(CellFailure), Worker(self.limits.memory, topologies.ENVIRONMENT, files) as worker:
                worker.ask(self.limits.seconds, register_functions, self.backends)
        cells = [
            cell_of(case, name, target)
            for target in self.targets
            for case in self.cases
            for backend in self.backends
            for name in in_roles(case, backend, self.kernels)
        ]
        return _environment(self.targets[0]), cells

    def manifest(self, environment: Environment, cells: int) -> Manifest:
        """The identity of the grid."""
        return dataclasses.replace(
            Grid.manifest(self, environment, cells),
            targets=tuple(str(target) for target in self.targets),
            searches=tuple(problem_of(case) for _, case in self.searches),
            command=self.command,
        )

    def compute(self, cells: Sequence[Cell], context: RunContext) -> Iterator[Record]:
        """The record of each cell; each target has a process."""
        compilers = [_Compiler(target, cells, self, context) for target in self.targets]
        lanes = [Lane(each.records(), each.stop) for each in compilers]
        for record in side_by_side(lanes, processes()):  # an answer that was kept may be of another node
            yield dataclasses.replace(record, environment={**context.environment, **record.environment})


def processes() -> int:
    """How many compilers run side by side on this machine."""
    return max(1, min(usable_cores(), machine_bytes() // _BYTES_PER_PROCESS))


def compile_all(grid: CompileGrid, watcher: GridWatcher, fleet: FleetRequest | None = None) -> tuple[Record, ...]:
    """Compile everything; writes the records and returns them. Raises InputError where the directory holds some."""
    if fleet is not None:
        if references := [name for name in grid.backends if is_reference(name)]:
            raise InputError(f"{references[0]} is a file of this machine alone; leave out --executor.")
        if grid.searches:
            raise InputError("--longest asks one compiler after the other on one machine; leave out --executor.")
    return execute(grid, watcher, fleet)


def nothing_compiled(records: Sequence[Record]) -> bool:
    """Whether no cell was compiled, and at least one because its compiler is missing."""
    return all(record.status == "unsupported" for record in records) and any(
        record.error == NO_COMPILER for record in records
    )


def longest(fits: Callable[[int], bool], sizes: Sequence[int]) -> int | None:
    """The largest of the ascending ``sizes`` that fits, by bisection; None where none does.

    >>> longest(lambda length: length <= 5000, (1024, 2048, 4096, 8192))
    4096
    """
    low, high = 0, len(sizes)  # everything below low fits, nothing from high on does
    while low < high:
        middle = (low + high) // 2
        if fits(sizes[middle]):
            low = middle + 1
        else:
            high = middle
    return sizes[low - 1] if low else None


class CompilerProcess(Restarting):
    """A process that compiles for ``target``, confined if it loads files of the user (``code``).

    With ``dumps`` the compiler writes schedules into ``dump``.
    """

    def __init__(self, target: Target, memory: int, code: Sequence[str] = (), *, dumps: bool, flags: str = "") -> None:
        self._folder = folders.make() if dumps else None
        self.dump = Path(self._folder.name) if self._folder else None
        variables = topologies.ENVIRONMENT | ({"XLA_FLAGS": flags} if flags else {})
        variables |= schedules.variables(self.dump, target.platform) if self.dump else {}
        writable = (self.dump,) if self.dump else ()
        Restarting.__init__(self, functools.partial(Worker, memory, variables, code, writable))

    def stop(self) -> None:
        """End the process for good, and remove its folder."""
        Restarting.stop(self)
        if self._folder:
            self._folder.cleanup()


class _Compiler:
    """The lane of one target: its cells, then the sizes that the searches try, each once."""

    def __init__(self, target: Target, cells: Sequence[Cell], request: CompileGrid, context: RunContext) -> None:
        self._target = target
        self._cells = [cell for cell in cells if cell.target == str(target)]
        self._request = request
        start = functools.partial(CompilerProcess, target, request.limits.memory, dumps=request.schedule)
        self._process, self._confined = start(), start(files_of(request.backends))
        self._records: dict[str, Record] = {}
        source_files = digests(request.backends)
        environment = _environment(target)
        if source_files:
            environment["source_files"] = source_files
        self._context = dataclasses.replace(context, environment=environment)

    def records(self) -> Iterator[Record]:
        """Every cell once: the cases in order, then the sizes that the searches try."""
        for cell in self._cells:
            yield from self._once(cell)
        for field, case in self._request.searches:
            # A batch that the chips of a slice cannot share would be refused.
            each = slices.shares(case, self._target)[1] if field == "batch" else 1
            for backend in self._request.backends:
                yield from self._search(case, backend, field, [each * size for size in _SIZES[field]])

    def stop(self) -> None:
        """End the process, and skip all remaining cells."""
        self._process.stop()
        self._confined.stop()

    def _search(self, case: ModelCase, backend: str, field: str, sizes: Sequence[int]) -> Iterator[Record]:
        made: list[Record] = []

        def answer(size: int) -> Record:
            changed: dict[str, Any] = {field: size, "name": ""}
            attempt = cell_of(dataclasses.replace(case, **changed), backend, self._target)
            made.extend(self._once(attempt))
            return self._records[attempt.key]

        first = answer(sizes[len(sizes) // 2])
        if first.status != "unsupported" and (first.memory or first.error):  # refused, or kernels alone, says all
            longest(lambda size: answer(size).status == "ok", sizes)
        self._context.watcher.fewer(SEARCH_STEPS - len(made))
        yield from made

    def _once(self, cell: Cell) -> Iterator[Record]:
        if cell.key in self._records or self._process.stopped:
            return
        self._context.watcher.doing(cell.case.name, cell.row, f"for {self._target}")
        cache = self._request.cache / "schedules" if self._request.schedule else self._request.cache
        path = cache_path(cache, cell, self._target, self._context.environment)
        is_user_function = is_reference(cell.row)  # what its file imports may have changed
        record = None if is_user_function else _find(path, cell.key)
        if record is None:
            record, lasting = self._compile(cell)
            if lasting and not is_user_function:
                _keep(path, record)
        self._records[cell.key] = record
        yield record

    def _compile(self, cell: Cell) -> tuple[Record, bool]:
        """The record of a cell, and whether compiling again would give the same record."""
        is_user_function = is_reference(cell.row)
        process = self._confined if is_user_function else self._process
        each, seconds = Running(cell, process), self._context.limits.seconds
        call = (compiled, cell.case, cell.row, self._target, process.dump)
        try:
            notes = () if not is_user_function or each.ask(seconds, work.confined) else (work.UNCONFINED,)
            outcome = answered(each.ask(seconds, *call), Outcome)
            each.outcome = dataclasses.replace(outcome, notes=(*outcome.notes, *notes))
            lasting = each.outcome.status != "unsupported"
        except (CellFailure, InputError) as failure:
            # ``oom`` means that the target device ran out; a compiler that exhausts this host is ``crashed``.
            late = isinstance(failure, CellFailure) and failure.status == "timeout"
            each.outcome = Outcome(status="timeout" if late else "crashed", error=f"the compiler: {failure}")
            lasting = False
        return each.record(self._context), lasting


def cell_of(case: OpCase | ModelCase, name: str, target: Target) -> Cell:
    """The cell of a case for a backend, or for one of its roles."""
    exact = None if is_reference(name) else registry.get(backend_and_role(name)[0]).exact  # workers load the file
    return kind.cell(case, name, target, resolved=name, mode="compile", exact=exact)


def _environment(target: Target) -> Environment:
    return {
        "versions": environment.versions(),
        "source": environment.source_digest(),
        "git_revision": environment.git_revision(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "machine_memory": machine_bytes(),
        "flags": {name: os.environ[name] for name in _FLAGS if name in os.environ},
        "target_memory": target.memory_bytes,
    }


def cache_path(folder: Path, cell: Cell, target: Target, environment: Mapping[str, Any]) -> Path:
    """The file of a cell in ``folder``. ``environment`` is that of the cell's record."""
    what: dict[str, Any] = {"case": problem_of(cell.case), "backend": cell.row, "target": dataclasses.asdict(target)}
    if isinstance(cell.case, ModelCase):
        what["model"] = repr(model_config(cell.case))
    what |= {name: environment[name] for name in _CIRCUMSTANCES}
    return folder / f"{hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]}.json"


def _find(path: Path, key: str) -> Record | None:
    """The record in ``path``; None where there is none, or it is not that of the cell ``key``."""
    with contextlib.suppress(OSError, RecordError):
        record = Record.from_json(path.read_bytes())
        return record if record.key == key else None
    return None


def _keep(path: Path, record: Record) -> None:
    """Write the record, whole or not at all."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        partial.write_text(record.to_json(), encoding="utf-8")
        partial.replace(path)
