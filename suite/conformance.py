"""``attnsuite judge``: backends held to the contract on the device that is here.

One worker process judges problem after problem; it is replaced when it dies, hangs or holds too much memory. All
backends of a problem follow each other, because the oracle's results are computed once per problem.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attnsuite.backends import registry
from attnsuite.testing.problems import CASES

from . import typed
from .cell import Cell
from .errors import CellFailure, InputError, jax_does_not_start
from .grid.executors import Limits, now, outcome_of, record_of
from .grid.keeping import GridWatcher, identity, keep, opened
from .grid.process import Worker
from .names import known_backend
from .record import Environment, Record

KIND = "conformance"
_LOOK_SECONDS = 300.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to judge, checked: ``cases`` are named problems, ``numbers`` those of random ones of ``seed``."""

    backends: tuple[str, ...]
    cases: tuple[str, ...]
    numbers: range = range(0)
    seed: int = 0

    def problems(self) -> tuple[dict[str, Any], ...]:
        """The problems as the worker is asked for them, each with a name."""
        named = [{"name": name, "number": None, "seed": None} for name in self.cases]
        drawn = [{"name": f"random {n} of seed {self.seed}", "number": n, "seed": self.seed} for n in self.numbers]
        return (*named, *drawn)


def checked_backends(wanted: Sequence[str] | None) -> tuple[str, ...]:
    """The names, or every registered one. Raises InputError for one that does not exist."""
    names = registry.names() if wanted is None else wanted
    return tuple(known_backend(name) for name in names)


def checked_cases(patterns: Sequence[str]) -> tuple[str, ...]:
    """The named problems that match. Raises InputError for a pattern that matches none."""
    for pattern in patterns:
        if not fnmatch.filter(CASES, pattern):
            raise InputError(f"--cases {pattern!r} matches no problem; they are {', '.join(CASES)}.")
    return tuple(name for name in CASES if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))


def run(request: Request, out: Path, limits: Limits, watcher: GridWatcher, *, resume: bool) -> tuple[Record, ...]:
    """The records of all problems and backends, written to ``out``. Raises InputError."""
    with contextlib.closing(_Judge(limits)) as judge:
        return _run(request, out, judge, watcher, resume=resume)


def _run(request: Request, out: Path, judge: _Judge, watcher: GridWatcher, *, resume: bool) -> tuple[Record, ...]:
    watcher.doing("", "", "looking at the machine")
    found, exact = judge.look(request.backends)
    target = str(found.get("target"))
    asked = {
        "backends": ",".join(request.backends),
        "cases": ",".join(request.cases),
        "random": len(request.numbers),
        "first": request.numbers.start,
        "seed": request.seed,
    }
    cells = [
        Cell(
            case=problem["name"],
            problem={"kind": KIND, **problem},
            row=name,
            target=target,
            resolved=name,
            mode="native",
            exact=exact[name],
        )
        for problem in request.problems()
        for name in request.backends
    ]

    def records(missing: Sequence[Cell]) -> Iterator[Record]:
        for cell in missing:
            watcher.doing(cell.case, cell.row, "")
            started, begin = now(), time.perf_counter()
            answer = judge.ask(cell.row, cell.problem)
            drawn = {"drawn": answer.pop("drawn", None) or None}
            yield record_of(
                dataclasses.replace(cell, problem={**cell.problem, **drawn}),
                outcome_of(answer),
                environment=found,
                suite="judge",
                started=started,
                wall_seconds=time.perf_counter() - begin,
            )

    with opened(out, watcher, resume=resume) as store:
        return keep(store, identity("judge", asked, target, found), cells, records, watcher)


def all_right(records: Sequence[Record]) -> bool:
    """Whether something was judged, and nothing was wrong."""
    statuses = {record.status for record in records}
    return "ok" in statuses and statuses <= {"ok", "unsupported"}


class _Judge:
    """The worker that judges; another one takes its place where it dies, hangs or holds too much memory."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._worker: Worker | None = None

    def look(self, backends: Sequence[str]) -> tuple[Environment, Mapping[str, bool]]:
        """The environment, and whether each backend is exact. Raises InputError."""
        try:
            answer = self._ask({"do": "look", "backends": list(backends)}, _LOOK_SECONDS)
        except CellFailure as failure:
            raise jax_does_not_start(failure) from failure
        return typed.convert(answer["environment"], Environment), answer["exact"]

    def ask(self, backend: str, problem: Mapping[str, Any]) -> dict[str, Any]:
        """The answer of ``conformance_worker``, or the failure of its process."""
        try:
            return self._ask({"do": "judge", "backend": backend, "problem": problem}, self._limits.seconds)
        except CellFailure as failure:
            self.close()
            return {"status": failure.status, "error": failure.message}

    def _ask(self, request: dict[str, Any], seconds: float) -> Any:
        self._worker = self._worker or Worker(self._limits.memory)
        return self._worker.ask(request, seconds)

    def close(self) -> None:
        """End the process, if there is one."""
        if self._worker is not None:
            self._worker.close()
        self._worker = None
