"""How much Kvax loses on a GPU where Triton is not told which strides are divisible by 16: ``python tests/stride_hint.py``.

jax-triton 0.3 on its own does not tell it; ``backends/kvax/upstream.py`` does. Each variant has a process of its own,
and the two take turns. Needs a GPU and the extra kvax.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

LENGTH, HEADS, KV_HEADS, HEAD_DIM = 16384, 8, 2, 128
ROUNDS, SAMPLES, CALLS = 2, 10, 10


def measure(*, hint: bool) -> dict[str, float]:
    """Median seconds per call, by what is called."""
    import jax
    import jax.numpy as jnp

    from attnsuite.backends import attention
    from attnsuite.backends.kvax import upstream

    if not hint:
        upstream.is_divisible = lambda _: False
    shapes = [(1, LENGTH, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    *inputs, cotangent = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))

    def forward(q, k, v):
        return attention(q, k, v, is_causal=True, backend="kvax")

    @jax.jit
    def both(q, k, v, cotangent):
        return jax.vjp(forward, q, k, v)[1](cotangent)

    return {
        "forward": seconds(jax.jit(forward), *inputs),
        "forward and backward": seconds(both, *inputs, cotangent),
    }


def seconds(function, *arguments) -> float:
    import jax

    jax.block_until_ready(function(*arguments))
    found = []
    for _ in range(SAMPLES):
        start = time.perf_counter()
        outputs = [function(*arguments) for _ in range(CALLS)]
        jax.block_until_ready(outputs)
        found.append((time.perf_counter() - start) / CALLS)
    return statistics.median(found)


def main() -> None:
    if sys.argv[1:]:
        print(json.dumps(measure(hint=sys.argv[1] == "hint")))
        return
    found = {"hint": [], "no hint": []}
    for name in [*found] * ROUNDS:
        done = subprocess.run([sys.executable, __file__, name], stdout=subprocess.PIPE, text=True, check=True)
        found[name].append(json.loads(done.stdout.splitlines()[-1]))
        print(name, {what: f"{1e3 * time:.3f} ms" for what, time in found[name][-1].items()}, flush=True)
    for what in found["hint"][0]:
        ratios = [b[what] / a[what] for a, b in zip(found["hint"], found["no hint"], strict=True)]
        print(f"{what}: without the hint {min(ratios):.2f} to {max(ratios):.2f} times as long")


if __name__ == "__main__":
    main()
