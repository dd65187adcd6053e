import numpy as np
import pytest
from scipy.stats import bootstrap

from attnsuite.reports import formatting
from attnsuite.suite import statistics
from attnsuite.suite.statistics import Interval


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0"), (999.6, "1000"), (1234567.0, "1230000"), (0.00012345, "0.000123"), (1e-7, "1.00e-07"),
     (-2.0, "-2.00"), (float("inf"), formatting.DASH), (None, formatting.DASH), (12, "12"), (True, "yes")],
)  # fmt: skip
def test_numbers_have_three_significant_digits(value, shown):
    assert formatting.show(value) == shown


def test_interval_that_excludes_one_does_not_show_one():
    assert formatting.bounds(Interval(1.002, 1.0012, 1.003, 20)) == "[1.001, 1.003]"


def test_intervals_are_the_same_each_time():
    samples = [1.0, 1.2, 0.9, 1.1, 1.05, 0.95]
    first = statistics.median(samples)
    statistics._estimate.cache_clear()
    assert statistics.median(samples) == first
    assert statistics.unpaired_ratio(samples, samples) == statistics.unpaired_ratio(samples, samples)


@pytest.mark.parametrize("count", [6, 31])
def test_intervals_are_scipys(count):
    above, below = np.random.default_rng(0).gamma(2.0, size=(2, count))

    def ratio(x, y, axis):
        return np.median(x, axis) / np.median(y, axis)

    expected = bootstrap((above, below), ratio, method="percentile", rng=np.random.default_rng(0)).confidence_interval
    found = statistics.unpaired_ratio(above, below)
    assert (found.low, found.high) == pytest.approx(tuple(expected), rel=1e-14)
