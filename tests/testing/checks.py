"""The claims of the conformance suite as functions: each raises AssertionError where a backend breaks it.

``tests/backends/test_negative_controls.py`` shows that each of them fails a backend that breaks it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from attnsuite.backends import AttentionSpec, Backend, Target, registry, support
from attnsuite.backends.features import Mode

from . import orders, problems
from .problems import Problem

Results = dict[str, jax.Array]
Run = Callable[..., Results]  # (query, key, value, cotangent) -> output, dq, dk, dv

# Finite and far outside what any problem holds, with room for a product with a query in the same dtype.
HUGE = {"float32": 1e30, "bfloat16": 1e30, "float16": 1e4, "int8": 127, "float8_e4m3fn": 448.0}
# Of a cotangent. Times a huge value it is finite: kernels multiply the two before they mask, and 0 x inf is NaN.
LARGE = 1e4

# Backends that keep NaN and infinity out of rows which may not see them, in slots behind the lengths, padding and other
# documents, forward and backward (backends/contract.py). Of every other backend it is measured: `keeps_nan_out`.
ISOLATING = frozenset({"standard", "chunked", "flash_cpu", "kascade"})
ISOLATING_ON_CPUS = frozenset({"kascade"})  # measured there alone
# Backends that were seen to let NaN behind the lengths into other rows, each by a test of its own.
LETS_NAN_IN = frozenset({"kvax", "splash", "tokamax_splash", "tokamax_triton", "tpu_flash_attention"})

# Other verdicts (verdicts/), by `attnsuite judge` on an AMD EPYC with 2 cores and JAX 0.12.0.1, 2026-11-26: natively,
# or with --interpret in an interpreter. A backend that is not named was not measured.
_INTERPRETED = (
    *("kvax", "splash", "pallas_flash", "tokamax_splash", "tokamax_triton", "paged_attention"),
    *("ragged_paged_attention", "tpu_flash_attention"),
)
MEASURED: Mapping[str, Mapping[str, str]] = {
    "deterministic": dict.fromkeys(("standard", "chunked", "kascade"), "yes")
    | {"flash_cpu": "with `batch_invariant=True`"}
    | dict.fromkeys(_INTERPRETED, "yes, interpreted"),
    "batch_invariant": {
        "standard": "no",
        "chunked": "no",
        "flash_cpu": "with `batch_invariant=True`",
        "kascade": "yes",
    }
    | dict.fromkeys(_INTERPRETED, "yes, interpreted")
    | {"ragged_paged_attention": "no, interpreted"},
    "symmetric": dict.fromkeys(("standard", "chunked", "flash_cpu"), "yes")
    | dict.fromkeys(_INTERPRETED, "yes, interpreted")
    | {"kascade": "approximate", "paged_attention": "not applicable"},
}


def compiled(
    backend: Backend, problem: Problem, target: Target, mode: Mode = "native", options: Mapping[str, Any] | None = None
) -> Run:
    """Plan outside of jit, as a model does, and compile forward and backward together."""
    run = problems.planned(backend, problem, target, mode, options)
    return problems.compiled(run, problem)


def check_accuracy(results: Results, problem: Problem) -> None:
    """Output and gradients pass the judge; what nobody sees is exactly zero."""
    assert set(results) == set(problem.expected)
    for name in problem.expected:
        check_quantity(name, results[name], problem)


def check_quantity(name: str, result: jax.Array, problem: Problem) -> None:
    """One of the output and the gradients passes the judge, in whatever order a score is summed (``orders.py``)."""
    verdict = orders.verdicts(problem, {name: result})[name]
    assert verdict.passed, f"{name}: {verdict}"


def check_same(results: Results, again: Results) -> None:
    """Bit for bit the same."""
    assert set(results) == set(again)
    for name in results:
        np.testing.assert_array_equal(np.asarray(results[name]), np.asarray(again[name]), err_msg=name)


def check_unseen_does_not_matter(
    run: Run,
    problem: Problem,
    expected: Results | None = None,
    *,
    keys: bool = True,
    rows: bool = True,
    finite: bool = False,
) -> None:
    """Numbers where nobody looks change no bit of anything; and a second run changes none.

    With ``keys`` they stand in the keys and values that no query sees. With ``rows`` they stand in the queries that see
    nothing, whose cotangents are large. One run holds all of them: what a backend lets through of any shows. They are
    huge; where lengths, padding or documents hide, they are infinity and NaN in turn, unless ``finite``. ``expected``
    is what the problem gives, where that has been computed.
    """
    expected = run(*problem.inputs) if expected is None else expected
    check_same(expected, run(*strewn(problem, keys=keys, rows=rows, finite=finite)))


def keeps_nan_out(run: Run, problem: Problem, expected: Results) -> bool | None:
    """Whether infinity and NaN in what lengths, padding and documents hide change nothing; None: they hide nothing."""
    if not (problem.hidden_keys.any() or problem.hidden_rows.any()):
        return None
    again = run(*strewn(problem))
    return all(np.array_equal(x, again[name]) for name, x in expected.items())


def check_nan_is_let_in(name: str, dtype: str = "float32") -> None:
    """In its interpreter the backend lets NaN behind the lengths through, as the support matrix says."""
    problem = problems.problem("ragged-causal", dtype)
    problem = dataclasses.replace(problem, spec=dataclasses.replace(problem.spec, needs_grad=False))
    run = compiled(registry.get(name), problem, Target.here(), "interpret")
    assert name in LETS_NAN_IN
    assert keeps_nan_out(run, problem, run(*problem.inputs)) is False


def strewn(problem: Problem, *, keys: bool = True, rows: bool = True, finite: bool = False) -> problems.Inputs:
    """The arrays of a problem with such numbers; see :func:`check_unseen_does_not_matter`."""
    query, key, value, cotangent = problem.inputs
    if keys:
        unseen, hidden = problem.unseen_keys[..., None], problem.hidden_keys[..., None] & (not finite)
        key, value = (None if x is None else _strewn(unseen, hidden, x) for x in (key, value))
    if rows:
        unseen, hidden = problem.unseen_rows[..., None], problem.hidden_rows[..., None] & (not finite)
        query, cotangent = _strewn(unseen, hidden, query), _where(unseen, LARGE, cotangent)
    return query, key, value, cotangent


def check_support(
    backend: Backend,
    spec: AttentionSpec,
    target: Target,
    mode: Mode,
    options: Mapping[str, Any] | None = None,
    *,
    refused: bool,
) -> None:
    """The backend takes or refuses the spec as declared, and refuses with reasons that are sentences."""
    found = support(backend, spec, target, mode, options)
    if not refused:
        assert found, f"{backend.name} refuses what it is declared to take: {found.reasons}"
        return
    assert not found, f"{backend.name} takes what it is declared to refuse"
    assert found.reasons
    for reason in found.reasons:
        assert len(reason.split()) > 5, f"not a sentence: {reason!r}"
        assert reason.endswith("."), f"not a sentence: {reason!r}"


def _strewn(unseen: np.ndarray, hidden: np.ndarray, x: jax.Array) -> jax.Array:
    """``x`` with a huge number where nobody looks; in what is ``hidden``, infinity and NaN in turn too."""
    array = np.asarray(x)
    position = np.arange(array.shape[1])[:, None, None]
    huge = HUGE[str(array.dtype)]
    others = (-huge, 0) if array.dtype == np.int8 else (np.inf, np.nan)
    numbers = np.asarray([huge, *others], array.dtype)[position % 3]
    return jax.device_put(np.where(hidden, numbers, np.where(unseen, np.asarray(huge, array.dtype), array)))


def _where(condition: np.ndarray, number: float, x: jax.Array) -> jax.Array:
    array = np.asarray(x)
    return jax.device_put(np.where(condition, np.asarray(number, array.dtype), array))
