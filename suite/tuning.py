"""``attnsuite tune``: which options of a backend to take for each problem, tried on this machine.

Every candidate is compiled, judged by the oracle, and sampled in turns with the others in one process; after
a first look the best few are sampled on. For a device that is not here candidates are ranked by what the
compiler says of their kernels: those that compile and fit, fewest spilled bytes first, then the largest
blocks, and the defaults before what is no better. That is no measurement, and the file says which of the two
it holds. Winners, and all that was tried or failed, go to one JSON file (``backends/tuned.py`` reads it).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax

from attnsuite.backends import AttentionSpec, Backend, Takes, Target, names, plan, registry, support
from attnsuite.backends.contract import CompilesKernels
from attnsuite.backends.support import takes_of
from attnsuite.backends.tuned import SCHEMA

from . import files, statistics
from .cases import OpCase, problem_of, spec_of
from .errors import CellFailure, InputError
from .grid.process import Worker
from .grid.runner import Limits, References
from .measure import judge as accuracy
from .measure import speed
from .op_cell import op_program

FIRST_ROUNDS, LAST_ROUNDS, KEPT = 3, 9, 4
_KERNEL_FIELDS = ("name", "registers", "spilled_bytes", "shared_bytes", "shared_limit_bytes")


@runtime_checkable
class Tunable(Protocol):
    """A backend with options worth trying."""

    def defaults(self, spec: AttentionSpec, target: Target) -> Mapping[str, int]:
        """Options that hold where no table says otherwise."""
        ...

    def candidates(self, spec: AttentionSpec, target: Target) -> tuple[Mapping[str, int], ...]:
        """Options to try for ``spec`` on ``target``."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class _WithOptions:
    """A backend that is always planned with these options."""

    backend: Backend
    options: tuple[tuple[str, int], ...]

    @property
    def name(self) -> str:
        return self.backend.name

    @property
    def exact(self) -> bool:
        return self.backend.exact

    def takes(self, target: Target, mode: Any) -> Takes:
        return dataclasses.replace(takes_of(self.backend, target, mode), parts=False)

    def refuses(self, spec: AttentionSpec, target: Target, mode: Any, options: Any) -> tuple[str, ...]:
        return support(self.backend, spec, target, mode, dict(self.options)).reasons

    def plan(
        self, spec: AttentionSpec, layout: Any, *, target: Target, mode: Any = "native", options: Any = None
    ) -> Any:
        return plan(self.backend, spec, layout, target=target, mode=mode, options=dict(self.options))


TUNED = tuple(
    OpCase(kind=kind, sequence=sequence, kv_heads=kv_heads, dtype=dtype)
    for kind in ("op_forward", "op_forward_backward")
    for dtype in ("float32", "bfloat16")
    for kv_heads in (8, 2)
    for sequence in (512, 1024, 2048, 4096)
) + tuple(
    OpCase(kind=kind, sequence=sequence, kv_heads=kv_heads, head_dim=128, dtype="bfloat16")
    for kind in ("op_forward", "op_forward_backward")
    for kv_heads in (8, 2)
    for sequence in (1024, 4096)
)  # fmt: skip


def tunable(wanted: Sequence[str] | None, target: Target | None) -> tuple[str, ...]:
    """The backends that can be tuned for ``target``. Raises InputError for one that was asked for and cannot."""
    able = tuple(name for name in names() if isinstance(registry.get(name), Tunable))
    if target is not None:
        able = tuple(name for name in able if isinstance(registry.get(name), CompilesKernels))
    for name in wanted or ():
        if name not in able:
            where = "" if target is None else f" for {target}, which is not here"
            raise InputError(f"backend {name!r} has nothing to tune{where}; use {', '.join(able) or 'none: none has'}.")
    return tuple(wanted or able)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """What to tune, checked: for this machine, or for a ``target`` that is not here. ``command`` is what was typed."""

    backends: tuple[str, ...]
    cases: tuple[OpCase, ...]
    target: Target | None
    limits: Limits
    out: Path
    command: str


def tune(request: TuneRequest, tell: Callable[[str], None]) -> None:
    """Try every backend's candidates on every case and write the table to ``request.out``.

    Raises InputError, and writes nothing, where not one case could be tuned, and at the start where the table cannot be
    written.
    """
    files.check_file(request.out)
    entries: list[dict[str, Any]] = []
    refused: list[str] = []
    with contextlib.closing(References(request.limits.seconds)) as references:
        for case, name in itertools.product(request.cases, request.backends):
            tell(f"{case.name} / {name}")
            try:
                if request.target is None:
                    entries.append(_entry(case, name, _measure(case, name, references, request.limits)))
                else:
                    entries.append(_compiled_entry(case, name, request.target))
            except (CellFailure, InputError) as error:
                refused.append(f"{case.name} / {name}: {error}")
                tell(refused[-1])
    if not entries:
        raise InputError(f"nothing could be tuned: {refused[0]}")
    with Worker(request.limits.memory) as worker:
        environment = worker.ask({"do": "doctor"}, request.limits.seconds)["environment"]
    kept = ("versions", "git_revision", "target", "cpu", "cores", "flags")
    table = {
        "schema": SCHEMA,
        "command": request.command,
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "environment": {name: environment[name] for name in kept},
        "refused": refused,
    }
    head, lines = json.dumps(table | {"entries": []})[:-2], ",\n".join(json.dumps(entry) for entry in entries)
    files.write_text(request.out, f"{head}\n{lines}\n]}}\n")


def _measure(case: OpCase, name: str, references: References, limits: Limits) -> dict[str, Any]:
    """:func:`try_candidates` in a process of its own."""
    reference = str(references.path(case))
    with Worker(limits.memory) as worker:
        question = {"do": "tune", "case": problem_of(case), "backend": name, "reference": reference}
        return worker.ask(question, limits.seconds * 5)


def rank_candidates(case: OpCase, name: str, target: Target) -> list[dict[str, Any]]:
    """What the compiler says of every candidate's kernels, the defaults first; none is run."""
    backend, spec = registry.get(name), spec_of(case)
    if not isinstance(backend, Tunable) or not isinstance(backend, CompilesKernels):
        raise InputError(f"backend {name!r} cannot be compiled for {target} from here; tune it on such a device.")
    if not (answer := support(backend, spec, target, "compile")):
        raise InputError(f"case {case.name}: {' '.join(answer.reasons)}")
    default = dict(backend.defaults(spec, target))
    others = [dict(options) for options in backend.candidates(spec, target) if dict(options) != default]
    return [_compiled(backend, spec, target, options) for options in (default, *others)]


def _compiled(backend: CompilesKernels, spec: AttentionSpec, target: Target, options: dict[str, int]) -> dict[str, Any]:
    try:
        builds = backend.compile_kernels(spec, target, options)
    except Exception as error:  # noqa: BLE001 (a candidate that cannot be compiled is a result)
        return {"options": options, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    errors = [f"{build.name}: {build.error}" for build in builds if build.error]
    return {
        "options": options,
        "error": errors[0] if errors else None,
        "kernels": [{name: getattr(build, name) for name in _KERNEL_FIELDS} for build in builds],
    }


def _plausibility(trial: dict[str, Any]) -> tuple[int, int]:
    """Spilled bytes of all kernels together (most are the same in every trial), then the blocks' size."""
    block = math.prod(value for name, value in trial["options"].items() if name.endswith("block_size"))
    return sum(kernel["spilled_bytes"] or 0 for kernel in trial["kernels"]), -block


def try_candidates(case: OpCase, name: str, reference: Path) -> dict[str, Any]:
    """In a worker: every candidate's samples, or why it failed. The defaults come first."""
    backend, target = registry.get(name), Target.here()
    if not isinstance(backend, Tunable):
        raise InputError(f"backend {name!r} has nothing to tune.")
    spec = spec_of(case)
    default = dict(backend.defaults(spec, target))
    others = [dict(options) for options in backend.candidates(spec, target) if dict(options) != default]
    candidates = [_try(case, backend, options, target, reference) for options in (default, *others)]
    ready = [candidate for candidate in candidates if candidate.error is None]
    _sample(ready, FIRST_ROUNDS)
    ranked = sorted(ready, key=lambda candidate: statistics.median(candidate.samples).value)
    _sample([c for c in ready if c in ranked[:KEPT] or c.options == default], LAST_ROUNDS)
    tried = [{"options": c.options, "samples": c.samples, "error": c.error} for c in candidates]
    return {"platform": target.platform, "kind": target.kind, "tried": tried}


@dataclasses.dataclass(slots=True, eq=False)
class _Candidate:
    """Options on trial. ``call`` takes one sample; ``error`` says why there is none."""

    options: dict[str, int]
    call: Callable[[], float] | None = None
    error: str | None = None
    samples: list[float] = dataclasses.field(default_factory=list)


def _try(case: OpCase, backend: Backend, options: dict[str, int], target: Target, reference: Path) -> _Candidate:
    try:
        program = op_program(case, _WithOptions(backend, tuple(sorted(options.items()))), "native", target)
        compiled = speed.compile_program(program.function, program.arguments)
        outputs = jax.block_until_ready(compiled.call(*program.arguments))
    except Exception as error:  # noqa: BLE001 (a candidate that cannot be compiled is a result)
        return _Candidate(options, error=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    if accuracy.judged_case(case)[0] == case:
        errors = accuracy.judge_outputs(accuracy.named_outputs(outputs), reference, case.dtype)
        if wrong := accuracy.describe_failure(errors):
            return _Candidate(options, error=wrong)
    calls = speed.calls_per_sample(speed.sample(compiled.call, program.arguments, 1))
    return _Candidate(options, call=lambda: speed.sample(compiled.call, program.arguments, calls))


def _sample(candidates: Sequence[_Candidate], rounds: int) -> None:
    for _ in range(rounds):
        for candidate in candidates:
            if candidate.call is not None:
                candidate.samples.append(candidate.call())


def _entry(case: OpCase, name: str, found: dict[str, Any]) -> dict[str, Any]:
    """The winner: the fastest candidate that is measurably faster than the defaults, else the defaults."""
    default, *others = found["tried"]
    contenders = [t for t in others if t["error"] is None and len(t["samples"]) == FIRST_ROUNDS + LAST_ROUNDS]
    best, ratio = default, None
    for attempt in sorted(contenders, key=lambda t: statistics.median(t["samples"]).value):
        found_ratio = statistics.paired_ratio(attempt["samples"], default["samples"])
        if found_ratio is not None and found_ratio.high is not None and found_ratio.high < 1.0:
            best, ratio = attempt, found_ratio
            break
    return {
        **_of(case, name, found["platform"], found["kind"]),
        "method": "measured",
        "options": best["options"],
        "time_over_default": None
        if ratio is None
        else [round(x, 3) for x in (ratio.value, ratio.low, ratio.high) if x],
        "tried": [
            {
                "options": t["options"],
                "median_seconds": round(statistics.median(t["samples"]).value, 6) if t["samples"] else None,
                "error": t["error"],
            }
            for t in found["tried"]
        ],
    }


def _compiled_entry(case: OpCase, name: str, target: Target) -> dict[str, Any]:
    """The most plausible of those that compile and fit, the first of equals; no options where none does."""
    tried = rank_candidates(case, name, target)
    working = [trial for trial in tried if trial["error"] is None]
    best = min(working, key=_plausibility)["options"] if working else {}
    return {
        **_of(case, name, target.platform, target.kind),
        "method": "compiled: ranked by what compiles, since the device was not there; no time was measured",
        "options": best,
        "tried": tried,
    }


def _of(case: OpCase, name: str, platform: str, kind: str) -> dict[str, Any]:
    return {
        "backend": name,
        "platform": platform,
        "kind": kind,
        "dtype": case.dtype,
        "grouped": case.heads != case.kv_heads,
        "head_dim": max(case.head_dim, case.value_head_dim or 0),
        "gradient": case.needs_grad,
        "length": case.sequence,
        "case": case.name,
    }
