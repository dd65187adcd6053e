"""Time: lowering and compiling apart from running, samples that wait for every output, and their statistics.

A sample is the mean seconds per call over enough calls to last :data:`SAMPLE_SECONDS`; the median of the
samples is what a table shows, with a percentile-bootstrap 95% interval (Efron and Tibshirani, 1993, chapter
13). Ratios of two cells are taken round by round, so that drift of the machine cancels.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

SAMPLE_SECONDS = 0.02  # a shorter call is repeated until a sample lasts about this long
_MAX_CALLS = 1000
_LEAST_FOR_INTERVAL = 3


@dataclasses.dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled program and what it took to get it, in seconds."""

    call: Callable[..., Any]
    executable: Any
    lower_seconds: float
    compile_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
    """A median with its 95% interval; ``low`` and ``high`` are None where there are too few samples."""

    median: float
    low: float | None
    high: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """When a cell has samples enough: ``minimum`` of them, or ``seconds`` of them and at least ``floor``."""

    minimum: int = 10
    seconds: float = 1.0
    floor: int = 6

    def enough(self, samples: Sequence[float], calls: int = 1) -> bool:
        """Whether these samples (seconds per call, of ``calls`` calls each) are enough."""
        return len(samples) >= self.minimum or (len(samples) >= self.floor and sum(samples) * calls >= self.seconds)


def compile_program(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Compiled:
    """Lower and compile ``function`` for ``arguments``, timing the two apart."""
    start = time.perf_counter()
    lowered = jax.jit(function).lower(*arguments)
    middle = time.perf_counter()
    executable = lowered.compile()
    return Compiled(executable, executable, middle - start, time.perf_counter() - middle)


def calls_per_sample(seconds: float) -> int:
    """Calls that a sample needs to last about SAMPLE_SECONDS, when one call takes ``seconds``."""
    return max(1, min(_MAX_CALLS, math.ceil(SAMPLE_SECONDS / max(seconds, 1e-9))))


def sample(call: Callable[..., Any], arguments: tuple[Any, ...], calls: int) -> float:
    """Mean seconds per call over ``calls`` calls, each waited for with all its outputs.

    Where a sample has several calls, one more comes first and is not counted: other cells had their turn
    since, and the caches are theirs.
    """
    if calls > 1:
        jax.block_until_ready(call(*arguments))
    start = time.perf_counter()
    for _ in range(calls):
        jax.block_until_ready(call(*arguments))
    return (time.perf_counter() - start) / calls


def median_interval(values: Sequence[float]) -> Interval:
    """Median of ``values`` and its bootstrap 95% interval, the same on every call.

    >>> median_interval([2.0, 2.0, 2.0, 2.0])
    Interval(median=2.0, low=2.0, high=2.0)
    """
    low, high = bootstrap(values, np.median)
    return Interval(float(np.median(values)), low, high)


def bootstrap(values: Sequence[float], statistic: Callable[..., Any]) -> tuple[float | None, float | None]:
    """The 95% interval of a statistic of ``values``, the same on every call; (None, None) for under 3 values."""
    if len(values) < _LEAST_FOR_INTERVAL:
        return None, None
    from scipy import stats  # noqa: PLC0415 (half a second that the workers, which only time, do not pay)

    found = stats.bootstrap(
        (np.asarray(values),),
        statistic,
        confidence_level=0.95,
        n_resamples=9999,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return float(found.low), float(found.high)


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Interval:
    """Median ratio of two cells over the rounds that both have, with its interval.

    Raises ValueError where the two share no round.

    >>> paired_ratio([2.0, 4.0, 6.0, 9.0], [1.0, 2.0, 3.0])
    Interval(median=2.0, low=2.0, high=2.0)
    """
    rounds = min(len(numerator), len(denominator))
    if rounds == 0:
        raise ValueError("the two cells share no round; a ratio needs samples of both.")
    return median_interval([a / b for a, b in zip(numerator[:rounds], denominator[:rounds], strict=True)])
