"""The claims of the conformance suite as functions: each raises AssertionError where a backend breaks it.

``tests/backends/test_negative_controls.py`` shows that each of them fails a backend that breaks it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from attnsuite.backends import AttentionSpec, Backend, Target, support
from attnsuite.backends.features import Mode

from . import orders, problems
from .problems import Problem

Results = dict[str, jax.Array]
Run = Callable[..., Results]  # (query, key, value, cotangent) -> output, dq, dk, dv

# Finite and far outside what any problem holds, with room for a product with a query in the same dtype.
HUGE = {"float32": 1e30, "bfloat16": 1e30, "float16": 1e4, "int8": 127, "float8_e4m3fn": 448.0}
# Of a cotangent. Times a huge value it is finite: kernels multiply the two before they mask, and 0 x inf is NaN.
LARGE = 1e4


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
    run: Run, problem: Problem, expected: Results | None = None, *, keys: bool = True, rows: bool = True
) -> None:
    """Huge, infinite and undefined numbers where nobody looks change no bit of anything; and a second run changes none.

    With ``keys`` they stand in turn in the keys and values that no query sees. With ``rows`` they stand in the queries
    that see nothing, whose cotangents are large. One run holds all of them: what a backend lets through of any shows.
    ``expected`` is what the problem gives, where that has been computed.
    """
    expected = run(*problem.inputs) if expected is None else expected
    check_same(expected, run(*strewn(problem, keys=keys, rows=rows)))


def strewn(problem: Problem, *, keys: bool = True, rows: bool = True) -> problems.Inputs:
    """The arrays of a problem with such numbers; see :func:`check_unseen_does_not_matter`."""
    query, key, value, cotangent = problem.inputs
    if keys:
        unseen = problem.unseen_keys[..., None]
        key, value = (None if x is None else _strewn(unseen, x) for x in (key, value))
    if rows:
        unseen = problem.unseen_rows[..., None]
        query, cotangent = _strewn(unseen, query), _where(unseen, LARGE, cotangent)
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


def _strewn(unseen: np.ndarray, x: jax.Array) -> jax.Array:
    """``x`` with a huge, an infinite and an undefined number in turn, from position to position, where nobody looks."""
    array = np.asarray(x)
    position = np.arange(array.shape[1])[:, None, None]
    huge = HUGE[str(array.dtype)]
    others = (-huge, 0) if array.dtype == np.int8 else (np.inf, np.nan)
    numbers = np.asarray([huge, *others], array.dtype)[position % 3]
    return jax.device_put(np.where(unseen, numbers, array))


def _where(condition: np.ndarray, number: float, x: jax.Array) -> jax.Array:
    array = np.asarray(x)
    return jax.device_put(np.where(condition, np.asarray(number, array.dtype), array))
