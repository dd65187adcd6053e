"""Estimates with 95% bootstrap intervals: of one cell, of two that share rounds, and of two that do not.

All are percentile intervals (Efron and Tibshirani, 1993, chapter 13) with a fixed seed, so that a report is the same
each time it is made. Ratios of cells that share rounds are taken round by round, so that drift of the machine cancels.
Fewer than six values get no interval: even the range from the smallest to the largest of five samples covers the true
median in only 1 - 2/2^5 = 94% of cases.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

FEWEST = 6
_RESAMPLES = 9999
_CACHE_SIZE = 2**14  # estimates: tables, terminal and pictures of a page ask for the same ones


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95% interval; ``low`` and ``high`` are None where ``count`` is below six."""

    value: float
    low: float | None
    high: float | None
    count: int

    def excludes(self, point: float) -> bool | None:
        """Whether ``point`` lies outside the interval; None where there is no interval."""
        if self.low is None or self.high is None:
            return None
        return not self.low <= point <= self.high


def median(samples: Sequence[float]) -> Interval:
    """The median of the samples (at least one).

    >>> median([3.0, 1.0, 2.0])
    Interval(value=2.0, low=None, high=None, count=3)
    """
    return _estimate(tuple(samples), _median)


def mean(values: Sequence[float]) -> Interval | None:
    """The mean of the values; None where there is none."""
    return _estimate(tuple(values), np.mean) if values else None


def paired_ratio(samples: Sequence[float], baseline: Sequence[float]) -> Interval | None:
    """The median over rounds of ``samples[i] / baseline[i]``; None where no round holds both.

    Sample i of both was taken in the same round, so that a slow round cancels.
    """
    rounds = min(len(samples), len(baseline))
    ratios = [above / below for above, below in zip(samples[:rounds], baseline[:rounds], strict=True)]
    return median(ratios) if ratios else None


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> Interval | None:
    """The mean over sequences of ``values[i] - baseline[i]``; None if the two differ in length."""
    if len(values) != len(baseline):
        return None
    return mean([value - reference for value, reference in zip(values, baseline, strict=True)])


def unpaired_ratio(samples: Sequence[float], baseline: Sequence[float]) -> Interval:
    """Ratio of the two medians, each resampled separately: for samples of different runs."""

    def ratio(above: NDArray[np.float64], below: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
        return _median(above, axis) / _median(below, axis)

    return _interval((samples, baseline), ratio)


def quick_ratio(*data: Sequence[float]) -> float:
    """As that of :func:`unpaired_ratio`, of the first deciles; divided by the same ratio of a control, if it is given.

    What else happens on a machine only makes a sample longer, and in one run more than in another: the quickest tenth
    of the samples tells more about the program than their median.
    """
    return float(_quick_ratio(*map(np.asarray, data), axis=0))


def quick_interval(*data: Sequence[float], level: float = 0.95) -> Interval:
    """:func:`quick_ratio` of the same arguments with its interval, each resampled separately."""
    return _interval(data, _quick_ratio, level)


def _quick_ratio(*data: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    above, below, *control = (np.quantile(each, 0.1, axis=axis) for each in data)
    return above / below / (control[0] / control[1] if control else 1.0)


def _median(values: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """As ``np.median``, of values without NaN. A bootstrap has many short rows, which are sorted sooner than that."""
    length = values.shape[axis]
    middle = [(length - 1) // 2, length // 2]
    return np.take(np.sort(values, axis), middle, axis).mean(axis)


def wilson(successes: int, count: int) -> Interval:
    """A share with its 95% Wilson score interval (Wilson, 1927), at least one trial.

    >>> found = wilson(8, 8)
    >>> found.value, round(found.low, 3), found.high
    (1.0, 0.676, 1.0)
    """
    from scipy import stats  # noqa: PLC0415 (takes longer than JAX)

    found = stats.binomtest(successes, count).proportion_ci(method="wilson")
    return Interval(successes / count, float(found.low), float(found.high), count)


@functools.lru_cache(_CACHE_SIZE)
def _estimate(values: tuple[float, ...], statistic: Callable[..., Any]) -> Interval:
    return _interval((values,), statistic)


def _interval(data: Sequence[Sequence[float]], statistic: Callable[..., Any], level: float = 0.95) -> Interval:
    value, count = float(statistic(*map(np.asarray, data), axis=0)), min(map(len, data))
    return Interval(value, *((None, None) if count < FEWEST else _bootstrap(data, statistic, level)), count)


def _bootstrap(data: Sequence[Sequence[float]], statistic: Callable[..., Any], level: float) -> tuple[float, float]:
    """As ``scipy.stats.bootstrap(method="percentile")`` to the last digits; to import that takes longer than JAX."""
    rng = np.random.default_rng(0)
    resampled = (x[rng.integers(0, len(x), (_RESAMPLES, len(x)))] for x in map(np.asarray, data))
    low, high = np.quantile(statistic(*resampled, axis=-1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
