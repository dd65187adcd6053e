"""Prints a bfloat16 call of flash_cpu with each instruction set of this processor, beside the float32 call.

Measures: give it an idle machine. The calls take turns: causal, one sequence of 2048 tokens, 8/8 heads.

    python tests/instruction_sets.py        # a minute
"""

import time

import jax
import jax.numpy as jnp
import numpy as np

from attnsuite import backends
from attnsuite.backends.flash_cpu.compiler import Processor
from attnsuite.suite.measure import placement

ROUNDS = 12


def call(dtype, isa, head_dim, *, gradient):
    arrays = [jax.random.normal(key, (1, 2048, 8, head_dim), dtype) for key in jax.random.split(jax.random.key(0), 3)]
    options = {"backend": "flash_cpu", "on_unavailable": "raise", "backend_options": {"isa": isa}}

    def attend(query, key, value):
        found = backends.attention(query, key, value, is_causal=True, needs_grad=gradient, **options)
        return found.astype(jnp.float32).sum() if gradient else found

    compiled = jax.jit(jax.grad(attend, (0, 1, 2)) if gradient else attend).lower(*arrays).compile()
    return lambda: jax.block_until_ready(compiled(*arrays))


def seconds(run):
    run()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    names = [isa.name for isa in Processor.here().isas()]
    rows = [("bfloat16", name) for name in names] + [("float32", names[0])]
    for gradient in (False, True):
        for head_dim in (64, 128):
            calls = {row: call(*row, head_dim, gradient=gradient) for row in rows}
            jax.block_until_ready(next(iter(calls.values()))())
            placement.pin_pool()
            times = {row: [] for row in rows}
            for _ in range(ROUNDS):
                for row, run in calls.items():
                    times[row].append(seconds(run))
            shown = ", ".join(f"{' '.join(row)} {1e3 * np.median(found):.2f}" for row, found in times.items())
            print(f"{'gradient' if gradient else 'forward'}, D {head_dim}: {shown} ms")  # noqa: T201 (a script)


if __name__ == "__main__":
    main()
