"""One small problem through XLA, forward and backward, against NumPy, in each dtype that has products of its own.

``availability.py`` starts it as ``python -m attnsuite.backends.flash_cpu.self_test avx2``. The argument names an
instruction set, by default the best of the processor. Exits with 0 if the kernels are right, else with an exception.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np

from .. import oracle
from ..contract import AttentionSpec, Layout
from .calls import Calls
from .compiler import Processor
from .isa import Isa
from .visibility import visibility


def main(name: str | None = None) -> None:
    """Compare; raises RuntimeError with the quantity that is off."""
    isa = Processor.here().isa(name)
    if isa is None:
        raise RuntimeError("no instruction set")
    for dtype in ("float32", "bfloat16") if isa.multiplies_bfloat16 else ("float32",):
        _compare(isa.of(dtype), dtype)


def _compare(isa: Isa, dtype: str) -> None:
    spec = AttentionSpec(
        batch=1,
        query_length=150,
        key_value_length=130,
        num_heads=2,
        num_kv_heads=1,
        head_dim=24,
        dtype=dtype,
        is_causal=True,
        local_window_size=(100, 0),
    )
    rng = np.random.default_rng(0)
    shapes = ((1, 150, 2, 24), (1, 130, 1, 24), (1, 130, 1, 24), (1, 150, 2, 24))
    query, key, value, d_out = (rng.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in shapes)
    calls, seen = Calls(spec, isa), visibility(spec, Layout())

    @jax.jit
    def run(query: jax.Array, key: jax.Array, value: jax.Array, d_out: jax.Array) -> tuple[jax.Array, ...]:
        out, top, total = calls.forward(query, key, value, seen)
        return out, *calls.backward(query, key, value, seen, out, top, total, d_out, None)

    results = run(query, key, value, d_out)
    gradients = oracle.gradients(spec, Layout(), query, key, value, d_out)
    expected = (oracle.forward(spec, Layout(), query, key, value), *(gradients[name] for name in ("dq", "dk", "dv")))
    for quantity, actual, right in zip(("output", "dq", "dk", "dv"), results, expected, strict=True):
        kind = "forward" if quantity == "output" else "gradient"
        if not oracle.judge(actual, right, None, dtype, kind).passed:
            raise RuntimeError(f"{quantity} in {dtype} is not what the oracle says")


if __name__ == "__main__":
    main(*sys.argv[1:2])
