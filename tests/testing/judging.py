"""Judge a backend on one problem, named or random: right, wrong and how far, or refused and why. Without pytest."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import jax
import numpy as np

from attnsuite.backends import AttentionSpec, Backend, Target, oracle, plan, support
from attnsuite.backends.features import Mode

from . import checks, orders, problems, random_specs, shapes
from .problems import CASES


@dataclasses.dataclass(frozen=True, slots=True)
class Judgement:
    """What was found on one problem.

    ``verdicts`` are those of the judge by quantity; ``reasons`` has one sentence for each fault of a wrong result, or
    for each reason of a refusal. ``problem`` describes a random problem, and is empty for a named one. ``isolates``:
    infinity and NaN behind the lengths, in padding and in other documents change nothing; None: there are none.
    """

    status: Literal["ok", "wrong", "unsupported"]
    verdicts: Mapping[str, oracle.Verdict] = dataclasses.field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    problem: str = ""
    isolates: bool | None = None


def judge_case(
    backend: Backend, name: str, target: Target, mode: Mode = "native", seed: int = 0, dtype: str | None = None
) -> Judgement:
    """Hold ``backend`` to the named problem, its arrays drawn by ``seed``, in the problem's dtype or another.

    Output and gradients have to pass the judge, and numbers where nobody may look have to change no bit of them. A
    backend that takes the problem only without gradients is judged by its output. What the backend raises is raised.
    """
    layout, terms, inputs = problems.arrays(CASES[name], name, dtype, seed)
    spec = problems.spec_of(CASES[name], layout, terms, inputs)
    refused = support(backend, spec, target, mode).reasons
    if refused:
        spec = dataclasses.replace(spec, needs_grad=False)
        if not support(backend, spec, target, mode):
            return Judgement("unsupported", reasons=refused)
    try:
        return _held(backend, dataclasses.replace(problems.problem(name, dtype, seed), spec=spec), target, mode)
    except Exception as error:  # noqa: BLE001 (raised again, unless the platform is why)
        return _of_the_platform(error, spec)


def _held(backend: Backend, problem: problems.Problem, target: Target, mode: Mode) -> Judgement:
    spec = problem.spec
    if misshapen := shapes.fault(problems.planned(backend, problem, target, mode), spec, problem.inputs, problem.terms):
        return Judgement("wrong", reasons=(misshapen,))
    run = (
        checks.compiled(backend, problem, target, mode) if spec.needs_grad else _forward(backend, problem, target, mode)
    )
    results = run(*problem.inputs)
    verdicts = orders.verdicts(problem, {name: results[name] for name in problem.expected if name in results})
    again = run(*checks.strewn(problem, finite=True))
    moved = [name for name, x in results.items() if not np.array_equal(x, again[name], equal_nan=True)]
    judged = _judged(verdicts, moved)
    if judged.status == "wrong" and np.asarray(results["output"])[problem.unseen_rows].any():
        judged = dataclasses.replace(judged, reasons=("rows that see nothing are not zero.", *judged.reasons))
    return dataclasses.replace(judged, isolates=checks.keeps_nan_out(run, problem, results))


def judge_random(backend: Backend, number: int, seed: int, target: Target, mode: Mode = "native") -> Judgement:
    """Hold ``backend`` to random problem ``number`` of ``seed``, of the features that it takes."""
    try:
        drawn = random_specs.draw(number, seed, backend, target, mode)
    except RuntimeError as error:
        return Judgement("unsupported", reasons=(str(error),))
    try:
        found = _held_to_random(backend, drawn, target, mode)
    except Exception as error:  # noqa: BLE001 (raised again, unless the platform is why)
        found = _of_the_platform(error, drawn.spec)
    return dataclasses.replace(found, problem=str(drawn))


def _held_to_random(backend: Backend, drawn: random_specs.Drawn, target: Target, mode: Mode) -> Judgement:
    made = plan(backend, drawn.spec, drawn.layout, target=target, mode=mode, options=drawn.options)
    if misshapen := shapes.fault(lambda *x: made.run(*x[:3], terms=x[3])[0], drawn.spec, drawn.inputs, drawn.terms):
        return Judgement("wrong", reasons=(misshapen,))
    return _judged(random_specs.verdicts(drawn, backend, target, mode), ())


def _of_the_platform(error: Exception, spec: AttentionSpec) -> Judgement:
    """What JAX's own attention cannot do here either is no fault of the backend; everything else is raised again."""
    if not shapes.platform_fails(error, spec):
        raise error
    message = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
    return Judgement("unsupported", reasons=(f"{shapes.PLATFORM_FAILS} in {spec.dtype}: {message}.",))


def _forward(backend: Backend, problem: problems.Problem, target: Target, mode: Mode) -> checks.Run:
    run = problems.planned(backend, problem, target, mode)
    return jax.jit(lambda *inputs: problems.forward_alone(run, inputs, problem.terms))


def _judged(verdicts: Mapping[str, oracle.Verdict], moved: list[str] | tuple[str, ...]) -> Judgement:
    reasons = [_fault(name, verdict) for name, verdict in verdicts.items() if not verdict.passed]
    if moved:
        reasons.append(f"{', '.join(moved)} change with numbers that no query may see, or from one run to the next.")
    return Judgement("wrong" if reasons else "ok", verdicts, tuple(reasons))


def _fault(name: str, verdict: oracle.Verdict) -> str:
    """One sentence on a quantity that fails, by the bound that it breaks."""
    if not np.isfinite(verdict.max_error):
        return f"{name} holds NaN or infinity."
    if verdict.max_error > verdict.allowed:
        return f"{name} is off by {verdict.max_error:.2g} of its largest value (allowed {verdict.allowed:.2g})."
    if verdict.rms_error > verdict.allowed_rms:
        return f"{name} is off by {verdict.rms_error:.2g} in root mean square (allowed {verdict.allowed_rms:.2g})."
    return f"{name} is not exactly zero where nothing is visible."
