"""Which block sizes to give a kernel: tried on the device if it is here, compiled for it if it is not.

On the device a candidate has to pass the oracle before it is timed. Without it candidates are ranked by what the
assembler says: those that fit, fewest spilled bytes first, then the largest blocks, then the least shared memory. That
is an order of plausibility and no measurement, and the file says which of the two it holds. Failures stay in it with
their errors. Backends read it when told to (``tuned`` among the options of ``kvax``).
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax

from backends import AttentionSpec, Backend, Layout, Plan, Target, UnknownBackendError, registry
from backends.contract import CompilesKernels, KernelBuild, Mode
from suite import accuracy, speed
from suite.cases import OpCase, spec_of
from suite.errors import InputError
from suite.op_cell import op_program

SCHEMA_VERSION = 1
_SAMPLES = 10


@runtime_checkable
class Tunable(Protocol):
    """A backend with something to tune."""

    def tuning_candidates(self, spec: AttentionSpec) -> Mapping[str, tuple[Mapping[str, int], ...]]:
        """Options to try, for each pass that is tuned by itself."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One candidate of one pass. ``seconds`` is the median of a measured one, and None for a compiled one."""

    stage: str
    options: Mapping[str, int]
    seconds: float | None = None
    spilled_bytes: int | None = None
    shared_bytes: int | None = None
    error: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What came of one spec on one device: ``method`` is ``measured`` or ``compiled``, ``options`` the winner's."""

    backend: str
    device: str
    spec: Mapping[str, Any]
    method: str
    options: Mapping[str, int]
    trials: tuple[Trial, ...]


def tune(name: str, case: OpCase, target: Target) -> Tuned:
    """Try every candidate of the backend ``name`` for ``case``. Raises InputError where there is nothing to tune."""
    try:
        backend, spec = registry.get(name), spec_of(case)
    except UnknownBackendError as error:
        raise InputError(str(error)) from error
    if not isinstance(backend, Tunable):
        raise InputError(f"backend {name} has nothing to tune; use kvax.")
    mode: Mode = "native" if target.present else "compile"
    support = backend.supports(spec, target, mode)
    if not support:
        raise InputError(f"case {case.name}: {' '.join(support.reasons)}")
    winners: dict[str, int] = {}
    trials: list[Trial] = []
    for stage, candidates in backend.tuning_candidates(spec).items():
        found = []
        for candidate in candidates:
            trial = Trial(stage=stage, options=dict(candidate))
            if target.present:
                found.append(_measured(trial, winners, backend, case, target))
            else:
                found.append(_compiled(trial, winners, backend, spec, target))
        trials += found
        working = [trial for trial in found if trial.error is None]
        if not working:
            continue
        best = min(working, key=_by_time if target.present else _by_plausibility)
        winners |= best.options
    return Tuned(
        backend=name,
        device=target.kind,
        spec=json.loads(json.dumps(dataclasses.asdict(spec))),
        method="measured" if target.present else "compiled",
        options=winners,
        trials=tuple(trials),
    )


def write(path: Path, found: list[Tuned]) -> None:
    """Add to the file, or begin it. Raises InputError where it is another kind of file."""
    entries = []
    if path.exists():
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            schema, entries = data["schema"], list(data["entries"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path} is not a file that `attnsuite tune` wrote ({error}); choose another.") from error
        if schema != SCHEMA_VERSION:
            raise InputError(f"{path} has schema {schema!r}, this version writes {SCHEMA_VERSION}; choose another.")
    entries += [dataclasses.asdict(tuned) for tuned in found]
    text = json.dumps({"schema": SCHEMA_VERSION, "entries": entries}, indent=1)
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}.") from error


def describe(tuned: Tuned, case: str) -> list[str]:
    """The lines that a user sees of one result."""
    how = (
        "measured here"
        if tuned.method == "measured"
        else "ranked by what compiles, since the device is not here: no time was measured"
    )
    failed = sum(trial.error is not None for trial in tuned.trials)
    chosen = ", ".join(f"{name}={value}" for name, value in tuned.options.items()) or "none: every candidate failed"
    return [f"{case}, {tuned.backend} on {tuned.device} ({how})", f"  {chosen}",
            f"  {len(tuned.trials)} candidates, {failed} failed"]  # fmt: skip


def _by_time(trial: Trial) -> float:
    return math.inf if trial.seconds is None else trial.seconds


def _by_plausibility(trial: Trial) -> tuple[int, int, int]:
    block = math.prod(value for name, value in trial.options.items() if name.endswith("block_size"))
    return trial.spilled_bytes or 0, -block, trial.shared_bytes or 0


def _compiled(trial: Trial, winners: Mapping[str, int], backend: Backend, spec: AttentionSpec, target: Target) -> Trial:
    if not isinstance(backend, CompilesKernels):
        raise InputError(f"backend {backend.name} cannot be compiled for {target} from here; tune it on the device.")
    spec = dataclasses.replace(spec, needs_grad=trial.stage != "forward")
    builds = backend.compile_kernels(spec, target, {**winners, **trial.options})
    errors = [f"{build.name}: {build.error}" for build in builds if build.error]
    return dataclasses.replace(
        trial,
        spilled_bytes=_most(builds, "spilled_bytes"),
        shared_bytes=_most(builds, "shared_bytes"),
        error=errors[0] if errors else None,
    )


def _most(builds: tuple[KernelBuild, ...], field: str) -> int | None:
    return max((size for build in builds if (size := getattr(build, field)) is not None), default=None)


@dataclasses.dataclass(frozen=True)
class _WithOptions:
    """A backend that plans with options."""

    backend: Backend
    options: Mapping[str, int]

    def plan(self, spec: AttentionSpec, layout: Layout, *, target: Target, mode: Mode = "native") -> Plan:
        return self.backend.plan(spec, layout, target=target, mode=mode, options=self.options)


def _measured(trial: Trial, winners: Mapping[str, int], backend: Backend, case: OpCase, target: Target) -> Trial:
    """Judged against the oracle, then timed; whatever fails is the trial's error."""
    if trial.stage == "forward" and case.needs_grad:
        case = dataclasses.replace(case, kind="op_forward", name=f"{case.name}-forward")
    planned: Any = _WithOptions(backend, {**winners, **trial.options})
    try:
        with tempfile.TemporaryDirectory(prefix="attnsuite-") as folder:
            judged, _ = accuracy.judged_case(case)
            reference = Path(folder) / "reference.npz"
            accuracy.write_reference(judged, reference)
            program = op_program(judged, planned, "native", target)
            outputs = accuracy.named_outputs(jax.jit(program.function)(*program.arguments))
            wrong = accuracy.describe_failure(accuracy.judge_outputs(outputs, reference, case.dtype))
        if wrong is not None:
            return dataclasses.replace(trial, error=f"wrong: {wrong}")
        program = op_program(case, planned, "native", target)
        compiled = speed.compile_program(program.function, program.arguments)
        calls = speed.calls_per_sample(speed.sample(compiled.call, program.arguments, 1))
        samples = [speed.sample(compiled.call, program.arguments, calls) for _ in range(_SAMPLES)]
    except Exception as error:  # noqa: BLE001 (whatever a candidate raises is its result)
        first = (str(error).strip().splitlines() or ["no message"])[0]
        return dataclasses.replace(trial, error=f"{type(error).__name__}: {first}")
    return dataclasses.replace(trial, seconds=statistics.median(samples))
