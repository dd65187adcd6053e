"""``attnsuite compile``: compile every case for every backend and every device, without an accelerator in the machine.

Each kind of device has one process; as many run side by side as there are cores and memory for. A compiler's answer is
kept on disk (``absent/cache.py``), so that a run that was stopped, or is asked again, compiles nothing twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from attnsuite.backends import Target, registry
from attnsuite.backends.devices import cpu_name, usable_cores

from .absent import cache as compile_cache
from .absent import slices, topologies
from .absent.compilation import NO_COMPILER, ROLE, in_roles
from .errors import CellFailure, InputError
from .grid.executors import Limits, now
from .grid.keeping import GridWatcher
from .grid.process import Worker
from .kinds import problem_of
from .kinds.attention import OpCase
from .kinds.model import ModelCase
from .measure import environment
from .measure.memory import machine_bytes
from .record import Environment, Kernel, Record, Status
from .store import MANIFEST, CompileManifest, RunStore

SUITE = "compile"
_BYTES_PER_PROCESS = 5 * 2**30  # of this machine: a compiler on a whole model
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# Sizes that a search tries: quarters of powers of two. There are 2**5 - 1, so five answers find the largest that fits.
SEARCH_LENGTHS = (768, 896, *(2**power * quarter // 4 for power in range(10, 17) for quarter in range(4, 8)), 2**17)
SEARCH_BATCHES = (1, 2, 3, *(2**power * quarter // 4 for power in range(2, 9) for quarter in range(4, 8)))
SEARCH_STEPS = 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompileRequest:
    """What to compile, checked.

    Each of ``searches`` is a model case whose longest length that fits is searched, and each of ``batch_searches`` one
    whose largest batch is.
    """

    cases: tuple[OpCase | ModelCase, ...]
    searches: tuple[ModelCase, ...]
    batch_searches: tuple[ModelCase, ...] = ()
    backends: tuple[str, ...]
    targets: tuple[Target, ...]
    out: Path
    limits: Limits
    cache: Path
    command: tuple[str, ...]
    kernels: tuple[str, ...] = ()


def processes() -> int:
    """How many compilers run side by side on this machine."""
    return max(1, min(usable_cores(), machine_bytes() // _BYTES_PER_PROCESS))


def execute(request: CompileRequest, watcher: GridWatcher) -> None:
    """Compile everything and write the records. Raises InputError where ``out`` holds records already."""
    with RunStore(request.out, resume=False) as store:
        store.write_json(MANIFEST, dataclasses.asdict(_manifest(request)))
        cells = sum(
            len(in_roles(case, backend, request.kernels)) for case in request.cases for backend in request.backends
        )
        searches = len(request.searches) + len(request.batch_searches)
        per_target = cells + SEARCH_STEPS * searches * len(request.backends)
        watcher.begin(len(request.targets) * per_target, 0)
        for record in _in_parallel(request, watcher):
            store.append([record])
            watcher.done(record)


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


def _in_parallel(request: CompileRequest, watcher: GridWatcher) -> Iterator[Record]:
    """The records of all targets, in the order in which they finish."""
    found: queue.SimpleQueue[Record | BaseException | None] = queue.SimpleQueue()
    compilers = [_Compiler(target, request, watcher) for target in request.targets]

    def work(compiler: _Compiler) -> None:
        try:
            with contextlib.closing(compiler):
                for record in compiler.records():
                    found.put(record)
        except BaseException as error:  # noqa: BLE001 (raised again where the records are read)
            found.put(error)
        found.put(None)

    with ThreadPoolExecutor(processes()) as pool:
        for compiler in compilers:
            pool.submit(work, compiler)
        try:
            for _ in compilers:
                while (record := found.get()) is not None:
                    if isinstance(record, BaseException):
                        raise record
                    yield record
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for compiler in compilers:
                compiler.stop()


class _Compiler:
    """The cells of one target: their records, and the target's process, started at the first cell that needs it."""

    def __init__(self, target: Target, request: CompileRequest, watcher: GridWatcher) -> None:
        self._target = target
        self._request = request
        self._watcher = watcher
        self._worker: Worker | None = None
        self._records: dict[str, Record] = {}
        self._environment = _environment(target)
        self._stopped = threading.Event()

    def records(self) -> Iterator[Record]:
        """Every cell once: the cases in order, then the sizes that the searches try."""
        for case in self._request.cases:
            for backend in self._request.backends:
                for name in in_roles(case, backend, self._request.kernels):
                    yield from self._once(case, name)
        for case in self._request.searches:
            for backend in self._request.backends:
                yield from self._search(case, backend, "sequence", SEARCH_LENGTHS)
        for case in self._request.batch_searches:
            # A batch that the chips of a slice cannot share would be refused.
            each = slices.shares(case, self._target)[1]
            for backend in self._request.backends:
                yield from self._search(case, backend, "batch", [each * batch for batch in SEARCH_BATCHES])

    def close(self) -> None:
        """End the process."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def stop(self) -> None:
        """End the process, and skip all remaining cells."""
        self._stopped.set()
        self.close()

    def _search(self, case: ModelCase, backend: str, field: str, sizes: Sequence[int]) -> Iterator[Record]:
        made: list[Record] = []

        def answer(size: int) -> Record:
            changed: dict[str, Any] = {field: size, "name": ""}
            attempt = dataclasses.replace(case, **changed)
            made.extend(self._once(attempt, backend))
            return self._records[_key(attempt, backend, self._target)]

        first = answer(sizes[len(sizes) // 2])
        if first.status != "unsupported" and (first.memory or first.error):  # refused, or kernels alone, says all
            longest(lambda size: answer(size).status == "ok", sizes)
        self._watcher.fewer(SEARCH_STEPS - len(made))
        yield from made

    def _once(self, case: OpCase | ModelCase, backend: str) -> Iterator[Record]:
        key = _key(case, backend, self._target)
        if key in self._records or self._stopped.is_set():
            return
        self._watcher.doing(case.name, backend, f"for {self._target}")
        path = compile_cache.path_of(self._request.cache, case, backend, self._target, self._environment)
        record = compile_cache.find(path, key)
        if record is None:
            record, lasting = self._compile(case, backend, key)
            if lasting:
                compile_cache.keep(path, record)
        self._records[key] = record
        yield record

    def _compile(self, case: OpCase | ModelCase, backend: str, key: str) -> tuple[Record, bool]:
        """The record of a cell, and whether compiling again would give the same record."""
        started, begin = now(), time.perf_counter()
        facts: dict[str, Any]
        try:
            facts = self._ask(case, backend)
            lasting = facts["status"] != "unsupported"
        except (CellFailure, InputError) as failure:
            self.close()
            facts, lasting = {"status": _status_of(failure), "error": f"the compiler: {failure}"}, False
        refused = facts["status"] == "unsupported"
        record = Record(
            key=key,
            suite=SUITE,
            case=case.name,
            kind=case.kind,
            problem=problem_of(case),
            requested=backend,
            resolved=None if refused else backend,
            mode=None if refused else "compile",
            exact=registry.get(backend.partition(ROLE)[0]).exact,
            target=str(self._target),
            reasons=tuple(facts.get("reasons", ())),
            status=facts["status"],
            error=facts["error"],
            notes=tuple(facts.get("notes", ())),
            lower_seconds=facts.get("lower_seconds"),
            compile_seconds=facts.get("compile_seconds"),
            memory=facts.get("memory", {}),
            kernels=tuple(Kernel(**kernel) for kernel in facts.get("kernels", ())),
            environment=self._environment,
            started=started,
            wall_seconds=time.perf_counter() - begin,
        )
        return record, lasting

    def _ask(self, case: OpCase | ModelCase, backend: str) -> dict[str, Any]:
        if self._worker is None:
            self._worker = Worker(self._request.limits.memory, "attnsuite.suite.absent.worker", topologies.ENVIRONMENT)
            if self._stopped.is_set():  # while this one was made
                self._worker.close()
        question = {"case": problem_of(case), "backend": backend, "target": self._target.name}
        return self._worker.ask(question, self._request.limits.seconds)


def _key(case: OpCase | ModelCase, backend: str, target: Target) -> str:
    return f"{case.name}/{backend}/{target}/compile"


def _status_of(failure: CellFailure | InputError) -> Status:
    """``oom`` is kept for the device's memory: a compiler too large for this machine gets another status."""
    return "timeout" if isinstance(failure, CellFailure) and failure.status == "timeout" else "crashed"


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


def _manifest(request: CompileRequest) -> CompileManifest:
    return CompileManifest(
        suite=SUITE,
        targets=tuple(str(target) for target in request.targets),
        backends=request.backends,
        cases=tuple(problem_of(case) for case in request.cases),
        searches=tuple(problem_of(case) for case in (*request.searches, *request.batch_searches)),
        command=request.command,
    )
