from __future__ import annotations

import numpy as np
import pytest

from suite.cases import OpCase
from suite.formulas import visible_pairs
from suite.probe import CellPlan
from suite.runner import measured
from suite.speed import Sampling, calls_per_sample, median_interval, paired_ratio


def test_interval_holds_the_median_and_repeats_itself():
    values = np.random.default_rng(0).gamma(4.0, size=20).tolist()
    first, second = median_interval(values), median_interval(values)
    assert first == second
    assert first.low <= np.median(values) == first.median <= first.high


def test_interval_of_two_samples_is_left_open():
    assert median_interval([1.0, 2.0]).low is None


def test_ratio_is_taken_round_by_round():
    drift = np.linspace(1.0, 5.0, 10)
    ratio = paired_ratio((3.0 * drift).tolist(), drift.tolist())
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((3.0, 3.0, 3.0))


def test_ratio_without_a_common_round_is_refused():
    with pytest.raises(ValueError, match="no round"):
        paired_ratio([], [1.0])


@pytest.mark.parametrize(
    ("samples", "calls", "enough"),
    [
        ([0.01] * 9, 1, False),
        ([0.01] * 10, 1, True),
        ([0.3] * 5, 1, False),
        ([0.3] * 6, 1, True),
        ([0.01] * 6, 20, True),
    ],
)
def test_ten_samples_or_one_second_are_enough(samples, calls, enough):
    assert Sampling().enough(samples, calls) is enough


def test_short_calls_are_repeated_within_a_sample():
    assert calls_per_sample(1.0) == 1
    assert calls_per_sample(0.001) == 20
    assert calls_per_sample(0.0) == 1000


@pytest.mark.parametrize(
    ("mode", "resolved", "expected"),
    [("native", "chunked", True), ("fallback", "chunked", False), ("fallback", "other", True), (None, None, False)],
)
def test_fallback_to_a_cell_of_the_case_is_not_measured_twice(mode, resolved, expected):
    case = OpCase(kind="op_forward", sequence=8)
    assert visible_pairs(case) == 36
    plan = CellPlan(case.name, "asked", resolved, mode, exact=True, reasons=())
    assert measured(case, plan, ("asked", "chunked")) is expected
