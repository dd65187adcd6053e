"""``attnsuite tune``: find the best options of a backend for each problem, by trying them.

A cell is one backend on one problem. Its record holds every candidate, with its samples or with the reason why it
failed. Every candidate is compiled, judged by the oracle, and sampled in turns with the others in one process. After a
first look only the best few are sampled on.

For a device that is not here, candidates are compiled and ranked without a measured time. Of kernels that XLA compiles,
a spill is a failure. ``choosing.py`` says which candidate wins, and makes a policy of the records.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from attnsuite.backends import Backend, Target, names, registry, support
from attnsuite.backends.tunable import CompilesKernels, CountsWork, MadeExact, Tunable

from . import choosing, statistics
from .cell import Cell, Outcome
from .choosing import FIRST_ROUNDS, LAST_ROUNDS, tuned_choice
from .compile import topologies
from .compile.compilation import NO_SPILLS, compile_candidate, compile_kernels
from .compile.programs import op_program as abstract_program
from .compile_run import CompilerProcess
from .diagnosis import examine_here
from .errors import CellFailure, InputError, as_input
from .flag_values import known_backend
from .grid import work
from .grid.execute import execute
from .grid.fleet import FleetRequest
from .grid.grid import Grid, GridWatcher
from .grid.process import Worker
from .grid.running import Limits, RunContext, Running, answered
from .kinds import kind, problem_of
from .kinds.attention_call import OpCase, judged_case, op_program, spec_of
from .kinds.tuning_case import TUNING, Trial, Trials
from .measure import speed, tensor_errors
from .measure.program import named_outputs
from .record import Environment, Record
from .store import Manifest
from .suites import shipped
from .typed import Scalar

SUITE, FINALISTS = "tune", 4
TUNED: tuple[Any, ...] = shipped(SUITE).cases


def tunable(wanted: Sequence[str] | None, target: Target | None) -> tuple[str, ...]:
    """The backends that can be tuned for ``target``. Raises InputError for a requested one that cannot."""
    able = tuple(name for name in names() if isinstance(registry.get(name), Tunable))
    if target is not None:
        able = tuple(name for name in able if isinstance(registry.get(name), CompilesKernels | CountsWork))
    for name in map(known_backend, wanted or ()):
        if name not in able:
            where = "" if target is None else f" for {target}, which is not here"
            raise InputError(f"backend {name!r} has nothing to tune{where}; use {', '.join(able) or 'none: none has'}.")
    return tuple(wanted or able)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TuneGrid(Grid):
    """What to tune, checked: for this machine, or for an absent ``target``. ``command`` is the command line.

    ``fixed`` are options of the backend that hold for every candidate. After ``minutes`` no further cell is begun.
    """

    suite: str = SUITE
    target: Target | None
    command: str
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    minutes: float | None = None

    def look(self) -> tuple[Environment, list[Cell]]:
        """What this machine is, and its cells. Raises InputError."""
        found = examine_here(self.limits.seconds, self.limits.memory)["environment"]
        target = self._target(found)
        return found, [cell_of(case, name, target, self) for case in self.cases for name in self.backends]

    def options(self) -> dict[str, Scalar]:
        """The options that are fixed."""
        return {"options": json.dumps(dict(self.fixed), sort_keys=True)} if self.fixed else {}

    def manifest(self, environment: Environment, cells: int) -> Manifest:
        """The identity of the grid, with the target that is tuned for."""
        return Grid.manifest(self, {**environment, "target": self._target(environment)}, cells)

    def compute(self, cells: Sequence[Cell], context: RunContext) -> Iterator[Record]:
        """The record of each cell."""
        trials = dict(zip((cell.key for cell in cells), _trials(cells, self), strict=True))
        cells = sorted(cells, key=lambda cell: isinstance(trials[cell.key], int))  # what is unsupported takes no time
        begun, seconds, tried = time.monotonic(), 0.0, 0.0
        for place, cell in enumerate(cells):
            if isinstance(reason := trials[cell.key], str):
                yield _unsupported(cell, reason, context)
                continue
            left = sum(_work(other, trials[other.key]) for other in cells[place:])
            estimate = f"; about {math.ceil(left * seconds / tried / 60)} minutes left" if tried else ""
            context.watcher.doing(cell.case.name, cell.row, f"trying {trials[cell.key]} candidates{estimate}")
            start = time.monotonic()
            yield _record(cell, self, context)
            seconds, tried = seconds + time.monotonic() - start, tried + _work(cell, trials[cell.key])
            if self.minutes is not None and time.monotonic() - begun > 60 * self.minutes:
                context.watcher.fewer(len(cells) - place - 1)
                return

    def _target(self, environment: Environment) -> str:
        return environment.get("target", "") if self.target is None else str(self.target)


def tune(grid: TuneGrid, watcher: GridWatcher, fleet: FleetRequest | None = None) -> tuple[Record, ...]:
    """Try every backend's candidates on every case; writes the records and the policy to the grid's directory.

    Returns the records. Raises InputError at the start if the directory cannot be written, and at the end, without a
    policy, if no case could be tuned.
    """
    records = execute(grid, watcher, fleet)
    refused = [f"{record.case} / {record.requested}: {record.error}" for record in records if record.facts is None]
    if not (tuned := [record for record in records if record.facts is not None]):
        raise InputError(f"nothing could be tuned: {refused[0]}")
    details = {"refused": refused} if refused else {}
    source = choosing.source_of(grid.command, tuned, map(tuned_choice, tuned), **details)
    choosing.write_policy(grid.out / choosing.POLICY, [source])
    return records


def cell_of(case: OpCase, name: str, target: str, request: TuneGrid) -> Cell:
    """The cell of a backend on a case."""
    mode, exact = "native" if request.target is None else "compile", registry.get(name).exact
    return kind.cell(TUNING.of(case), name, target, resolved=name, mode=mode, exact=exact)


def _call(cell: Cell) -> OpCase:
    return TUNING.call(problem_of(cell.case))


def _trials(cells: Sequence[Cell], request: TuneGrid) -> list[int | str]:
    """Of each cell the number of candidates, or why there are none. For this device one process is asked for all."""
    problems = [(cell.row, _call(cell)) for cell in cells]
    if request.target is not None:
        return count_candidates(problems, request.target, request.fixed)
    try:
        with Worker(request.limits.memory) as worker:
            return worker.ask(request.limits.seconds, count_candidates, problems, None, dict(request.fixed))
    except CellFailure as failure:
        raise InputError(f"the backends do not say what they have to try: {failure.message}") from failure


def count_candidates(
    problems: Sequence[tuple[str, OpCase]], target: Target | None, fixed: Mapping[str, Any]
) -> list[int | str]:
    """For each backend and case how many candidates there are to try, or the sentence that says why none is.

    Without a ``target`` they are for the device of this process.
    """
    found: list[int | str] = []
    for name, case in problems:
        try:
            found.append(len(_supported(name, case, target or Target.here(), fixed)[1]))
        except InputError as reason:
            found.append(str(reason))
    return found


def _supported(
    name: str, case: OpCase, target: Target, fixed: Mapping[str, Any]
) -> tuple[Backend, list[dict[str, Any]]]:
    """The backend, and its candidates. Raises InputError where it cannot be tuned for this."""
    backend, mode = registry.get(name), "native" if target.present else "compile"
    if not isinstance(backend, Tunable):
        raise InputError(f"backend {name!r} has nothing to tune.")
    if not (answer := support(backend, spec_of(case), target, mode, dict(fixed))):
        raise InputError(f"case {case.name}: {' '.join(answer.reasons)}")
    return backend, _candidates(backend, case, target, fixed)


def _work(cell: Cell, candidates: int | str) -> float:
    """What trying the candidates of a cell takes, in units that all cells share: the pairs that are computed."""
    case = _call(cell)
    return 0.0 if isinstance(candidates, str) else candidates * case.sequence**2 * (3 if case.needs_grad else 1)


def _unsupported(cell: Cell, reason: str, context: RunContext) -> Record:
    each = Running(dataclasses.replace(cell, resolved=None))
    with each.timed():
        each.outcome = Outcome(status="unsupported", error=reason)
    return each.record(context)


def _record(cell: Cell, request: TuneGrid, context: RunContext) -> Record:
    each, case = Running(cell), _call(cell)
    try:
        with each.timed():
            if request.target is None:
                tried = _measure(case, cell.row, context.references.path(case), request)
            else:
                tried = rank_candidates(case, cell.row, request.target, request.fixed, request.limits)
    except CellFailure as failure:
        return each.failed(context, failure)
    except InputError as refusal:
        return _unsupported(cell, str(refusal), context)
    else:
        each.outcome = Outcome(facts=Trials(tried=tuple(tried)))
    return each.record(context)


def _measure(case: OpCase, name: str, reference: Path | None, request: TuneGrid) -> list[Trial]:
    """:func:`try_candidates` in a process of its own."""
    with Worker(request.limits.memory) as worker:
        worker.ask(request.limits.seconds, work.pin_pool)
        call = (try_candidates, case, name, reference, dict(request.fixed))
        return answered(worker.ask(request.limits.seconds * 5, *call), list[Trial])


def _candidates(backend: Any, case: OpCase, target: Target, fixed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The options to try, the defaults first. Raises InputError for ``fixed`` options that the backend does not take.

    A fixed option is not tried.
    """
    with as_input("--options: "):
        if fixed:
            program = abstract_program(case, backend, target, fixed)
            jax.eval_shape(program.function, *program.arguments)
        default = dict(backend.defaults(spec_of(case), target, fixed))
        others = map(dict, backend.candidates(spec_of(case), target, fixed))
    tried = [{name: value for name, value in each.items() if name not in fixed} for each in (default, *others)]
    return [each for i, each in enumerate(tried) if each not in tried[:i]]


def rank_candidates(case: OpCase, name: str, target: Target, fixed: Mapping[str, Any], limits: Limits) -> list[Trial]:
    """Facts about every candidate's kernels, the defaults first; no kernel is run."""
    backend, spec = registry.get(name), spec_of(case)
    if not isinstance(backend, Tunable) or not isinstance(backend, CompilesKernels | CountsWork):
        raise InputError(f"backend {name!r} cannot be compiled for {target} from here; tune it on such a device.")
    candidates = _supported(name, case, target, fixed)[1]
    if isinstance(backend, CompilesKernels):
        return [compile_kernels(backend, spec, target, {**fixed, **options}) for options in candidates]
    if (reason := topologies.missing(target)) is not None:
        raise InputError(reason)
    return _compile_each(case, name, target, fixed, candidates, limits)


def _compile_each(
    case: OpCase,
    name: str,
    target: Target,
    fixed: Mapping[str, Any],
    candidates: Sequence[dict[str, Any]],
    limits: Limits,
) -> list[Trial]:
    """The trials of a process for ``target``; a candidate that ends it has another after it."""
    flags, is_tpu = " ".join(filter(None, (os.environ.get("XLA_FLAGS"), NO_SPILLS))), target.platform == "tpu"
    process, tried = CompilerProcess(target, limits.memory, dumps=is_tpu, flags="" if is_tpu else flags), []
    try:
        for options in candidates:
            call = (compile_candidate, case, name, target, options, dict(fixed), process.dump)
            try:
                tried.append(answered(process.ask(limits.seconds, *call), Trial))
            except CellFailure as failure:
                tried.append(Trial(options=options, error=str(failure)))
    finally:
        process.stop()
    return tried


def try_candidates(case: OpCase, name: str, reference: Path, fixed: Mapping[str, Any]) -> list[Trial]:
    """In a worker: every candidate's samples, or why it failed. The defaults come first."""
    target = Target.here()
    backend, tried = _supported(name, case, target, fixed)
    candidates = [_try(case, backend, options, fixed, target, reference) for options in tried]
    ready = [candidate for candidate in candidates if candidate.error is None]
    _sample(ready, FIRST_ROUNDS)
    ranked = sorted(ready, key=lambda candidate: statistics.median(candidate.samples).value)
    _sample([c for c in ready if c in ranked[:FINALISTS] or c is candidates[0]], LAST_ROUNDS)
    return [Trial(options=c.options, samples=tuple(c.samples), error=c.error) for c in candidates]


@dataclasses.dataclass(slots=True, eq=False)
class _Candidate:
    """Options on trial. ``call`` takes one sample; ``error`` says why there is none."""

    options: dict[str, Any]
    call: Callable[[], float] | None = None
    error: str | None = None
    samples: list[float] = dataclasses.field(default_factory=list)


def _try(
    case: OpCase, backend: Backend, options: dict[str, Any], fixed: Mapping[str, Any], target: Target, reference: Path
) -> _Candidate:
    whole = {**fixed, **options}
    try:
        program = op_program(case, backend, "native", target, options=whole)
        compiled = speed.compile_program(program.function, program.arguments)
        outputs = jax.block_until_ready(compiled.call(*program.arguments))
        if isinstance(backend, MadeExact):  # its own result is an approximation, which no oracle can judge
            exact = op_program(case, backend, "native", target, options=whole | dict(backend.exact_options))
            outputs = jax.jit(exact.function)(*exact.arguments)
    except Exception as error:  # noqa: BLE001 (a candidate that cannot be compiled is a result)
        return _Candidate(options, error=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    if judged_case(case)[0] == case:
        errors = tensor_errors.judge_outputs(named_outputs(outputs), reference, case.dtype)
        if wrong := tensor_errors.describe_failure(errors):
            return _Candidate(options, error=wrong)

    def sample(calls: int) -> float:
        return speed.sample(compiled.call, lambda _: program.arguments, calls).seconds

    calls = speed.calls_per_sample(sample(1))
    return _Candidate(options, call=lambda: sample(calls))


def _sample(candidates: Sequence[_Candidate], rounds: int) -> None:
    for _ in range(rounds):
        for candidate in candidates:
            if candidate.call is not None:
                candidate.samples.append(candidate.call())
