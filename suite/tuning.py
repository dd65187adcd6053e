"""``attnsuite tune``: which options of a backend are the fastest for each problem, measured on this machine.

Every candidate is compiled, judged by the oracle, and sampled in turns with the others in one process; after
a first look the best few are sampled on. Winners, and all that was tried or failed, go to one JSON file
(``backends/tuned.py`` reads it).
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax

from backends import AttentionSpec, Backend, Target, names, registry
from backends.tuned import SCHEMA
from suite import accuracy, speed, statistics
from suite.cases import OpCase, problem_of, spec_of
from suite.errors import CellFailure, InputError
from suite.op_cell import op_program
from suite.process import Worker
from suite.runner import Limits, References

FIRST_ROUNDS, LAST_ROUNDS, KEPT = 3, 9, 4


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

    def supports(self, spec: AttentionSpec, target: Target, mode: Any = "native") -> Any:
        return self.backend.supports(spec, target, mode)

    def plan(
        self, spec: AttentionSpec, layout: Any, *, target: Target, mode: Any = "native", options: Any = None
    ) -> Any:
        return self.backend.plan(spec, layout, target=target, mode=mode, options=dict(self.options))


TUNED = tuple(
    OpCase(kind=kind, sequence=sequence, kv_heads=kv_heads, dtype=dtype)
    for kind in ("op_forward", "op_forward_backward")
    for dtype in ("float32", "bfloat16")
    for kv_heads in (8, 2)
    for sequence in (512, 1024, 2048, 4096)
)  # fmt: skip


def tunable(wanted: Sequence[str] | None) -> tuple[str, ...]:
    """Those of the backends that can be tuned. Raises InputError for one that was asked for and cannot."""
    able = tuple(name for name in names() if isinstance(registry.get(name), Tunable))
    for name in wanted or ():
        if name not in able:
            raise InputError(f"backend {name!r} has nothing to tune; use {', '.join(able) or 'none: no backend has'}.")
    return tuple(wanted or able)


def tune(
    backends: Sequence[str], cases: Sequence[OpCase], limits: Limits, out: Path, command: str, watcher: Any
) -> None:
    """Measure every backend's candidates on every case and write the table to ``out``."""
    references = References(limits.seconds)
    entries, environment = [], None
    try:
        for case in cases:
            reference = references.path(case)
            for name in backends:
                watcher(f"{case.name} / {name}")
                with Worker(limits.memory) as worker:
                    environment = environment or worker.ask({"do": "doctor"}, limits.seconds)["environment"]
                    question = {"do": "tune", "case": problem_of(case), "backend": name, "reference": str(reference)}
                    try:
                        found = worker.ask(question, limits.seconds * 5)
                    except CellFailure as failure:
                        watcher(f"{case.name} / {name}: {failure.message}")
                        continue
                entries.append(_entry(case, name, found))
    finally:
        references.close()
    kept = ("versions", "git_revision", "target", "cpu", "cores", "flags")
    table = {
        "schema": SCHEMA,
        "command": command,
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "environment": {name: (environment or {}).get(name) for name in kept},
        "entries": entries,
    }
    head, lines = json.dumps(table | {"entries": []})[:-2], ",\n".join(json.dumps(entry) for entry in entries)
    out.write_text(f"{head}\n{lines}\n]}}\n", encoding="utf-8")


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
    return {"platform": target.platform, "tried": tried}


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
        "backend": name,
        "platform": found["platform"],
        "dtype": case.dtype,
        "grouped": case.heads != case.kv_heads,
        "gradient": case.needs_grad,
        "length": case.sequence,
        "case": case.name,
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
