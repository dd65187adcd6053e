"""The rates that this machine reaches, measured: matmul peak by dtype, copy and read bandwidth.

They are the ceilings of the roofline (Williams, Waterman and Patterson, CACM 2009) that stands beside each time. They
are measured once per run, in a process of its own; vendors' figures are never used.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..record import Machine

_SIZES = {"cpu": (512, 1024, 2048), "cuda": (8192,), "rocm": (4096, 8192), "tpu": (4096, 8192)}
_COPY_BYTES = {"cpu": 2**28, "cuda": 2**31, "rocm": 2**31, "tpu": 2**30}
_DTYPES = ("float32", "bfloat16")
_COLUMNS = (2**12, 2**16, 2**20)
_TRIES = 10


def measure_machine() -> Machine:
    """The rates that this machine reaches now."""
    platform = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    sizes = _SIZES.get(platform, _SIZES["cpu"])
    return Machine(
        matmul_flops={dtype: max(_matmul_flops(dtype, size) for size in sizes) for dtype in _DTYPES},
        copy_bytes_per_second=_copy_rate(_COPY_BYTES.get(platform, _COPY_BYTES["cpu"])),
        read_bytes_per_second=_read_rate(_COPY_BYTES.get(platform, _COPY_BYTES["cpu"])),
    )


def _matmul_flops(dtype: str, size: int) -> float:
    """The best of several forms: with a float32 result bfloat16 is twice as fast on CPUs, and slower elsewhere."""
    left = jax.random.normal(jax.random.key(0), (size, size), dtype)
    results = (dtype,) if dtype == "float32" else (dtype, "float32")
    seconds = [
        _best_seconds(
            functools.partial(jax.jit(functools.partial(jnp.matmul, preferred_element_type=result)), left, left)
        )
        for result in results
    ]
    return 2 * size**3 / min(seconds)


def _copy_rate(size: int) -> float:
    """Read, change and write each element in place; writing a fresh output would measure page faults."""
    step = jax.jit(lambda a: a + 1, donate_argnums=0)
    state = [jnp.zeros(size // 4, jnp.float32)]

    def once() -> Any:
        state[0] = step(state[0])
        return state[0]

    return 2 * size / _best_seconds(once)


def _read_rate(size: int) -> float:
    """Reduce rows, with almost no writes. Long rows are read fastest; the best length differs by machine."""
    numbers = jnp.ones(size // 4, jnp.float32)
    times = []
    for columns in _COLUMNS:
        matrix, vector = numbers.reshape(-1, columns), jnp.ones(columns, jnp.float32)
        times.append(_best_seconds(functools.partial(jax.jit(jnp.matmul), matrix, vector)))
    return size / min(times)


def _best_seconds(call: Callable[[], Any]) -> float:
    jax.block_until_ready(call())
    times = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return min(times)
