"""What Kvax loses on a GPU where Triton is not told which strides are divisible by 16.

jax-triton 0.3 on its own does not tell it; ``backends/kvax/upstream.py`` does. Measures: give it an idle GPU, and the
extra kvax. Each variant has a process of its own.

    python tests/stride_hint.py        # a minute
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp

from attnsuite.backends import attention
from attnsuite.backends.kvax import upstream

LENGTH, HEADS, KV_HEADS, HEAD_DIM = 16384, 8, 2, 128
SAMPLES, CALLS = 10, 10


def forward(q, k, v):
    return attention(q, k, v, is_causal=True, backend="kvax")


def both(q, k, v, cotangent):
    return jax.vjp(forward, q, k, v)[1](cotangent)


def milliseconds(function, *arguments) -> float:
    """The median of a call."""
    compiled, found = jax.jit(function), []
    jax.block_until_ready(compiled(*arguments))
    for _ in range(SAMPLES):
        start = time.perf_counter()
        jax.block_until_ready([compiled(*arguments) for _ in range(CALLS)])
        found.append(1e3 * (time.perf_counter() - start) / CALLS)
    return statistics.median(found)


def main() -> None:
    if not sys.argv[1:]:
        for name in ("hint", "no hint"):
            subprocess.run([sys.executable, __file__, name], check=True)
        return
    if sys.argv[1] == "no hint":
        upstream.is_divisible = lambda _: False
    shapes = [(1, LENGTH, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    inputs = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]
    found = milliseconds(forward, *inputs[:3]), milliseconds(both, *inputs)
    sys.stdout.write(f"{sys.argv[1]}: forward {found[0]:.2f} ms, with gradients {found[1]:.2f} ms\n")


if __name__ == "__main__":
    main()
