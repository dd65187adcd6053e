"""Decode steps of flash_cpu beside a plain read of as many bytes, in the conditions of a run.

Measures: give it an idle machine. The plain read is a product of a matrix with a vector of ones, for the best of a few
lengths of its rows. Calls take turns: on the same arrays again and again; on new arrays, as every call of a run has
them; and on new arrays after the process came to rest, as where one of them has 32 MiB or more.

    python tests/decode_reads.py        # a minute and a half

Prints a table in Markdown: GB/s (medians) of the step and of the read, and the step's share of the read.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnsuite import backends
from attnsuite.suite.measure import placement, speed

ROUNDS, CALLS = 4, 12
ROWS = (2**12, 2**14, 2**16, 2**18)  # numbers; in long rows a machine reads fastest, and the best length differs
CONDITIONS = ("again", "new", "new, at rest")
Call = Callable[..., Any]


@jax.jit
def renewed(arrays: tuple[jax.Array, ...], by: int) -> tuple[jax.Array, ...]:
    """New arrays of the same numbers."""
    return tuple(jnp.roll(x, by, axis=int(np.argmax(x.shape))) for x in arrays)


def seconds(call: Call, arrays: tuple[jax.Array, ...], condition: str) -> list[float]:
    """Of each call."""
    found = []
    for number in range(CALLS):
        given = arrays if condition == "again" else jax.block_until_ready(renewed(arrays, number + 1))
        if condition == "new, at rest":
            speed.come_to_rest()
        begin = time.perf_counter()
        jax.block_until_ready(call(*given))
        found.append(time.perf_counter() - begin)
    return found


def step(query_heads: int, key_heads: int, length: int, dtype: str) -> tuple[Call, tuple[jax.Array, ...]]:
    """A decode step behind ``length`` tokens, and its keys and values."""
    key = jax.random.key(0)
    query = jax.random.normal(key, (1, 1, query_heads, 64), dtype)
    cache = tuple(jax.random.normal(each, (1, length, key_heads, 64), dtype) for each in jax.random.split(key))
    call = jax.jit(lambda k, v: backends.attention(query, k, v, backend="flash_cpu", on_unavailable="raise"))
    return call.lower(*cache).compile(), cache


def read(row: int, arrays: tuple[jax.Array, ...]) -> Call:
    """Reads as many numbers as there are in each of ``arrays``, in rows."""
    ones = jnp.ones(row)
    call = jax.jit(lambda *x: [each.reshape(-1, row) @ ones for each in x])
    return call.lower(*arrays).compile()


def main() -> None:
    """Print the table."""
    lines = []
    for length, key_heads, dtype in itertools.product((8192, 32768), (2, 8), ("bfloat16", "float32")):
        decode, cache = step(8, key_heads, length, dtype)
        size = cache[0].nbytes
        plain = (jnp.ones(size // 4), jnp.full(size // 4, 2.0))
        calls = {"step": (decode, cache)} | {row: (read(row, plain), plain) for row in ROWS}
        jax.block_until_ready(decode(*cache))
        if not placement.pin_pool():
            sys.exit("XLA's threads cannot be bound to processors here: the figures would not be those of a run.")
        shown = []
        for condition in CONDITIONS:
            times = {name: [] for name in calls}
            for _ in range(ROUNDS):
                for name, (call, arrays) in calls.items():
                    times[name] += seconds(call, arrays, condition)
            rates = {name: 2e-9 * size / float(np.median(found)) for name, found in times.items()}
            best = max(rates[row] for row in ROWS)
            shown.append(f"{rates['step']:.1f} / {best:.1f} = {rates['step'] / best:.2f}")
        lines.append(f"| {length}, 8/{key_heads}, {dtype} | {2 * size / 2**20:.0f} | {' | '.join(shown)} |\n")
        sys.stderr.write(lines[-1])
    head = f"| behind, heads, dtype | MiB | {' | '.join(CONDITIONS)} |\n| :-- | --: | --: | --: | --: |\n"
    sys.stdout.write(head + "".join(lines))


if __name__ == "__main__":
    main()
