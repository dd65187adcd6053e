"""Judge the numbers of a cell by the noise-floor rule of ``backends/oracle.py``.

The oracle's float64 result and the standard backend's error are computed once per case, in a process of their own. The
cells read both from one .npz file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from attnsuite.backends import oracle

from ..cell import Outcome
from ..errors import CellFailure
from ..record import TensorError

_ERROR = "standard_error_"
# In units of the dtype's epsilon. float32: ten times what the shipped 4-layer model shows between exact backends.
MODEL_FLOOR = {"float32": 128.0, "bfloat16": 1.0, "float16": 2.0}


def pass_of(name: str) -> oracle.Kind:
    """The pass that the tensor of this name is of."""
    return "forward" if name == "out" else "gradient"


def save_reference(path: Path, expected: Mapping[str, Any], standard: Mapping[str, Any], dtype: str) -> None:
    """Save the tensors in float64 and the errors of the standard backend's to ``path`` (.npz)."""
    errors = {}
    for name, tensor in expected.items():
        verdict = oracle.judge(standard[name], tensor, None, dtype, kind=pass_of(name))
        errors[_ERROR + name] = np.array([verdict.max_error, verdict.rms_error])
    np.savez(path, allow_pickle=False, **expected, **errors)


def judge_outputs(outputs: Mapping[str, Any], reference: Path, dtype: str) -> dict[str, TensorError]:
    """Judge each output of a cell: ``out``, and its gradients, by the reference of :func:`save_reference`."""
    errors = {}
    with np.load(reference, allow_pickle=False) as arrays:
        for name, tensor in outputs.items():
            _check_form(name, tensor, arrays[name], dtype)
            max_error, rms_error = map(float, arrays[_ERROR + name])
            standard = oracle.Verdict(max_error, rms_error, None, np.inf, passed=True)
            errors[name] = as_error(oracle.judge(tensor, arrays[name], standard, dtype, kind=pass_of(name)))
    return errors


def judge_tensors(
    outputs: Mapping[str, Any], expected: Mapping[str, Any], standard: Mapping[str, Any], dtype: str
) -> dict[str, TensorError]:
    """Judge tensors by the oracle's and by those of the backend whose error is the yardstick."""
    return {
        name: as_error(oracle.judge(outputs[name], expected[name], standard[name], dtype, kind=pass_of(name)))
        for name in expected
    }


def _check_form(name: str, tensor: Any, expected: Any, dtype: str) -> None:
    found, wanted = f"{tensor.dtype}{[*tensor.shape]}", f"{dtype}{[*expected.shape]}"
    if found != wanted:
        raise CellFailure("wrong", f"its {name} is {found}, and that of attention is {wanted}.")


def as_error(verdict: oracle.Verdict) -> TensorError:
    """A verdict in the form of a record; a number that is not finite becomes None."""
    return TensorError(
        max_error=_finite(verdict.max_error),
        rms_error=_finite(verdict.rms_error),
        standard_error=_finite(verdict.standard_error),
        allowed=verdict.allowed,
        passed=verdict.passed,
    )


def as_model_error(actual: Any, expected: Any, standard: Any, dtype: str) -> TensorError:
    """Distance of a model's tensor from the standard backend's in float32, judged by the noise-floor rule.

    There is no transformer in float64 here. ``expected`` is the standard backend in float32 at highest matmul
    precision, ``standard`` the same backend in the case's ``dtype``. The tensor passes within twice the error of
    ``standard`` plus :data:`MODEL_FLOOR`, which leaves room for rounding that grows from layer to layer.
    """
    wanted = np.asarray(expected).astype(np.float64)
    verdict = oracle.judge(np.asarray(actual, np.float32), wanted, None, "float32")
    error = 0.0
    if standard is not None:
        error = oracle.judge(np.asarray(standard, np.float32), wanted, None, "float32").max_error
    allowed = 2 * error + MODEL_FLOOR[dtype] * oracle.EPSILON[dtype]
    return as_error(oracle.Verdict(verdict.max_error, verdict.rms_error, error, allowed, verdict.max_error <= allowed))


def judged(outcome: Outcome, *, exact: bool) -> Outcome:
    """The outcome, ``wrong`` if errors are too large; for an approximate row only if one is not finite."""
    errors = outcome.accuracy
    held = errors if exact else {name: error for name, error in errors.items() if error.max_error is None}
    error = describe_failure(held)
    return outcome if error is None else dataclasses.replace(outcome, status="wrong", error=error)


def describe_failure(errors: Mapping[str, TensorError]) -> str | None:
    """One line about the tensors that failed, or None where all passed."""
    failed = [
        f"{name} is off by {'NaN or infinity' if e.max_error is None else format(e.max_error, '.3g')}"
        f" (allowed {e.allowed:.3g})"
        for name, e in errors.items()
        if not e.passed
    ]
    return f"wrong numbers against the reference: {', '.join(failed)}." if failed else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and np.isfinite(value) else None
