"""Whether a cell's numbers are right: the noise-floor rule of ``backends/oracle.py``, applied to cells.

The oracle's float64 result and the standard backend's error on the same problem are computed once per case,
in a process of their own, and reach the cells through one .npz file. An op case that is too large for
the oracle, or for an interpreter, is judged on a case of the same kind at a shorter length, and its record says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from attnsuite.backends import Target, oracle, registry

from ..cases import OpCase, spec_of
from ..op_cell import op_program
from ..record import TensorError
from .inputs import make_inputs

# Score entries (batch x heads x query x key) that the oracle takes at most: 8 heads at 4096 tokens. It needs
# about 2 s forward and 8 s with gradients for that on 2 cores of a 2026 server.
ORACLE_ENTRIES = 8 * 4096 * 4096
# And an interpreter: Kvax's kernels, forward and backward, need about 4 s for that, and four times that at 1024.
INTERPRETED_ENTRIES = 8 * 512 * 512
_ERROR = "standard_error_"
# In units of the dtype's epsilon. float32: ten times what the shipped 4-layer model shows between exact backends.
MODEL_FLOOR = {"float32": 128.0, "bfloat16": 1.0, "float16": 2.0}
GRADIENTS = ("dq", "dk", "dv")


def judged_case(case: OpCase, mode: str | None = "native") -> tuple[OpCase, tuple[str, ...]]:
    """The case that accuracy is judged on: ``case`` itself, or a shorter one and a note that says so."""
    slow, entries = "the float64 oracle", ORACLE_ENTRIES
    if mode == "interpret":
        slow, entries = "an interpreter", INTERPRETED_ENTRIES
    length = case.sequence
    while case.batch * case.heads * min(case.query_length, length) * length > entries:
        length //= 2
    if length == case.sequence:
        return case, ()
    note = f"accuracy was judged at sequence={length}: {slow} is too slow at sequence={case.sequence}."
    return dataclasses.replace(case, sequence=length, name=f"{case.name[:190]}-judged"), (note,)


def write_reference(case: OpCase, path: Path) -> None:
    """Compute the oracle's tensors and the standard backend's errors for ``case`` and save them to ``path`` (.npz)."""
    spec, inputs = spec_of(case), make_inputs(case)
    arrays = (inputs.query, inputs.key, inputs.value)
    expected = {"out": oracle.forward(spec, inputs.layout, *arrays)}
    if case.needs_grad:
        expected |= oracle.gradients(spec, inputs.layout, *arrays, inputs.d_out)
    program = op_program(case, registry.get("standard"), "native", Target.here())
    outputs = named_outputs(jax.jit(program.function)(*program.arguments))
    errors = {}
    for name, tensor in expected.items():
        verdict = oracle.judge(outputs[name], tensor, None, case.dtype, kind=_kind(name))
        errors[_ERROR + name] = np.array([verdict.max_error, verdict.rms_error])
    np.savez(path, allow_pickle=False, **expected, **errors)


def judge_outputs(outputs: Mapping[str, Any], reference: Path, dtype: str) -> dict[str, TensorError]:
    """Judge each output of a cell (``out``, and ``dq``, ``dk``, ``dv`` where there are gradients)."""
    errors = {}
    with np.load(reference, allow_pickle=False) as arrays:
        for name, tensor in outputs.items():
            max_error, rms_error = map(float, arrays[_ERROR + name])
            standard = oracle.Verdict(max_error, rms_error, None, np.inf, passed=True)
            errors[name] = as_error(oracle.judge(tensor, arrays[name], standard, dtype, kind=_kind(name)))
    return errors


def named_outputs(outputs: Any) -> dict[str, Any]:
    """The outputs of an op program by name."""
    values = outputs if isinstance(outputs, tuple) else (outputs,)
    return dict(zip(("out", *GRADIENTS)[: len(values)], values, strict=True))


def as_error(verdict: oracle.Verdict) -> TensorError:
    """A verdict as it stands in a record; what is not finite becomes None."""
    return TensorError(
        max_error=_finite(verdict.max_error),
        rms_error=_finite(verdict.rms_error),
        standard_error=_finite(verdict.standard_error),
        allowed=verdict.allowed,
        passed=verdict.passed,
    )


def as_model_error(actual: Any, expected: Any, standard: Any, dtype: str) -> TensorError:
    """Distance of a model's tensor from the standard backend's in float32, judged by the noise-floor rule.

    There is no float64 transformer here: ``expected`` is the standard backend at float32 and highest matmul
    precision, ``standard`` the same backend in the case's ``dtype``. It passes within twice that one's error
    plus :data:`MODEL_FLOOR`, which leaves room for rounding to grow from layer to layer.
    """
    wanted = np.asarray(expected).astype(np.float64)
    verdict = oracle.judge(np.asarray(actual, np.float32), wanted, None, "float32")
    error = 0.0
    if standard is not None:
        error = oracle.judge(np.asarray(standard, np.float32), wanted, None, "float32").max_error
    allowed = 2 * error + MODEL_FLOOR[dtype] * oracle.EPSILON[dtype]
    return as_error(oracle.Verdict(verdict.max_error, verdict.rms_error, error, allowed, verdict.max_error <= allowed))


def describe_failure(errors: Mapping[str, TensorError]) -> str | None:
    """One line about the tensors that failed, or None where all passed."""
    failed = [
        f"{name} is off by {'NaN or infinity' if e.max_error is None else format(e.max_error, '.2g')}"
        f" (allowed {e.allowed:.2g})"
        for name, e in errors.items()
        if not e.passed
    ]
    return f"wrong numbers against the reference: {', '.join(failed)}." if failed else None


def _kind(name: str) -> oracle.Kind:
    return "gradient" if name in GRADIENTS else "forward"


def _finite(value: float | None) -> float | None:
    return value if value is not None and np.isfinite(value) else None
