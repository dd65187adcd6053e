"""Compile the program of a cell, check its sizes, run it once for its memory, and make it ready to be sampled."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from attnsuite.backends import AttentionSpec, Target

from ..cell import Means, Outcome
from ..errors import CellFailure
from . import judge, lint, memory, speed
from .program import Program


def outputs_of(program: Program) -> Any:
    """The outputs of one run, as JAX returns them."""
    if program.arrays is not None:
        return program.arrays(program.function(*program.arguments))
    return jax.jit(program.function)(*program.arguments)


def execute(
    program: Program, means: Means, devices: int = 1, spec: AttentionSpec | None = None
) -> tuple[Any, Callable[[], float], Outcome]:
    """The outputs, a function that takes a sample, and what was measured on the way.

    The program runs once for its memory, and once more if it took less than a second; ``repeats`` says whether the
    second run gave the same bits. The text of a program that computes only attention ``spec`` is read. Raises
    CellFailure where the program needs more memory than its limit.
    """
    if program.arrays is None:
        compiled = speed.compile_program(program.function, program.arguments)
        sizes = memory.compiled_sizes(compiled.call, devices)
    else:
        compiled, sizes = speed.Compiled(program.function), {}
    needed = sum(size for size in sizes.values() if size)
    target = Target.here()
    limit = means.memory_limit
    available = limit if target.platform == "cpu" or target.memory_bytes is None else target.memory_bytes
    if needed > available:
        raise CellFailure("oom", f"the compiled program needs {_gib(needed)}, and the limit is {_gib(available)}.")
    jax.block_until_ready(program.arguments)
    start = time.perf_counter()
    outputs, used, method = memory.measure(compiled.call, program.arguments)
    seconds = time.perf_counter() - start
    repeats = None
    if seconds < 1.0:  # the first call also pays for thread pools and page faults
        start = time.perf_counter()
        again = jax.block_until_ready(compiled.call(*program.arguments))
        seconds = time.perf_counter() - start
        repeats = None if program.arrays is not None else _same_bits(outputs, again)
    calls = speed.calls_per_sample(seconds)
    if program.arrays is not None:
        outputs = program.arrays(outputs)
    outcome = Outcome(
        lower_seconds=compiled.lower_seconds,
        compile_seconds=compiled.compile_seconds,
        memory=sizes | used,
        memory_method=method,
        calls=calls,
        program=None if spec is None or program.arrays is not None else lint.read(compiled.call.as_text(), spec),
        repeats=repeats,
    )
    return outputs, lambda: speed.sample(compiled.call, program.arguments, calls), outcome


def _same_bits(first: Any, second: Any) -> bool:
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def judged(outcome: Outcome, *, exact: bool) -> Outcome:
    """The outcome, ``wrong`` if errors are too large; for an approximate row only if one is not finite."""
    errors = outcome.accuracy
    held = errors if exact else {name: error for name, error in errors.items() if error.max_error is None}
    error = judge.describe_failure(held)
    return outcome if error is None else dataclasses.replace(outcome, status="wrong", error=error)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
