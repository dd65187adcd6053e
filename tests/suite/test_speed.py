from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.suite.cell import Means, Request
from attnsuite.suite.grid.running import Running
from attnsuite.suite.kinds import kind_of
from attnsuite.suite.kinds.attention_call import OpCase
from attnsuite.suite.measure import speed
from attnsuite.suite.measure.execution import Timed
from attnsuite.suite.measure.program import Program
from attnsuite.suite.measure.speed import Sampling, calls_per_sample
from attnsuite.suite.statistics import FEWEST, mean, median, paired_difference, paired_ratio, unpaired_ratio
from command import cell_of
from script import printed


def test_interval_of_too_few_samples_is_left_open():
    assert median([1.0] * (FEWEST - 1)).low is None
    assert median([1.0] * FEWEST).low == 1.0


def test_ratio_is_taken_round_by_round():
    drift = np.linspace(1.0, 5.0, 10)
    ratio = paired_ratio((3.0 * drift).tolist(), drift.tolist())
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((3.0, 3.0, 3.0))


def test_no_ratio_without_a_common_round():
    assert paired_ratio([], [1.0]) is None
    assert mean([]) is None
    assert paired_difference([1.0], [1.0, 2.0]) is None


def test_ratio_of_two_runs_is_wider_than_that_of_shared_rounds():
    drift = np.linspace(1.0, 5.0, 10)
    apart = unpaired_ratio((3.0 * drift).tolist(), drift.tolist())
    assert apart.low < 2.9
    assert apart.high > 3.1


@pytest.mark.parametrize(
    ("samples", "calls", "enough"),
    [
        ([0.01] * 9, 1, False),
        ([0.01] * 10, 1, True),
        ([0.3] * 5, 1, False),
        ([0.3] * 6, 1, True),
        ([0.01] * 6, 20, True),
        ([29.5] * 2, 1, False),
        ([29.5] * 3, 1, True),
        ([70.0], 1, False),
        ([70.0] * 2, 1, True),
    ],
)
def test_ten_samples_or_six_of_a_second_or_two_of_a_minute_are_enough(samples, calls, enough):
    assert Sampling().enough(samples, calls) is enough


def test_a_cell_that_is_to_be_sampled_for_a_while_is_sampled_that_long_however_many_samples_it_has():
    for seconds in (4.0, 90.0):
        asked = Sampling.lasting(seconds)
        assert not asked.enough([0.02] * int(49 * seconds), 1)
        assert asked.enough([0.02] * int(50 * seconds + 1), 1)
        assert asked.enough([0.01] * int(50 * seconds + 1), 2)
    assert not Sampling.lasting(4.0).enough([1.0] * 5, 1), "an interval needs six samples"


def test_short_calls_are_repeated_within_a_sample():
    assert calls_per_sample(1.0) == 1
    assert calls_per_sample(0.001) == 20
    assert calls_per_sample(0.0) == 1000


@pytest.mark.parametrize(
    ("mode", "resolved", "expected"),
    [("native", "chunked", True), ("interpret", "chunked", True), ("fallback", "other", False), (None, None, False)],
)
def test_what_would_run_instead_is_not_measured(mode, resolved, expected):
    case = OpCase(kind="op_forward", sequence=8)
    assert cell_of(case, "asked", resolved=resolved, mode=mode).is_measured is expected


def test_a_cell_with_too_few_samples_for_an_interval_says_so():
    cell = cell_of(OpCase(kind="op_forward", sequence=8))
    slow, quick = (Running(cell, samples=[seconds] * count) for seconds, count in ((29.5, 3), (0.1, FEWEST)))
    slow.note_few_samples()
    quick.note_few_samples()
    assert slow.outcome.notes == ("sampled 3 times, since a sample takes 30 s: no interval.",)
    assert quick.outcome.notes == ()


class Clock:
    """Stands in for the module ``time``: threads of this process work until ``busy_until``."""

    def __init__(self, busy_until):
        self.now, self.busy_until = 0.0, busy_until

    def replaces(self, monkeypatch):
        monkeypatch.setattr(speed, "time", self)
        monkeypatch.setattr(speed, "clock", self.perf_counter)
        monkeypatch.setattr(speed, "used", self.process_time)

    def perf_counter(self):
        return self.now

    def process_time(self):
        return min(self.now, self.busy_until)

    def sleep(self, seconds):
        self.now += seconds


@pytest.mark.parametrize(("first", "later", "sampled"), [(0.05, 0.03, 0.03), (0.19, 0.1, 0.1), (0.3, 0.2, 0.3)])
def test_first_call_is_not_counted_unless_it_is_long(monkeypatch, first, later, sampled):
    clock = Clock(busy_until=0.0)
    clock.replaces(monkeypatch)
    times = iter((first, later, later))
    found = speed.sample(lambda: clock.sleep(next(times)), lambda _: (), 1)
    assert found.seconds == pytest.approx(sampled)


@pytest.mark.parametrize(("busy_until", "ends"), [(0.0, 0.065), (0.2, 0.235), (60.0, 2.06)])
def test_sample_ends_when_its_process_is_at_rest_or_after_a_second(monkeypatch, busy_until, ends):
    """What a call leaves to other threads does not run beside the next cell, and is in no time."""
    clock = Clock(busy_until)
    clock.replaces(monkeypatch)
    assert speed.sample(lambda: clock.sleep(0.03), lambda _: (), 1).seconds == pytest.approx(0.03)
    assert ends <= clock.now <= ends + 0.011


@pytest.mark.parametrize(("rows", "rests"), [(2**13, True), (2**13 - 8, False)])
def test_a_call_on_new_inputs_that_the_system_is_given_back_is_timed_when_the_process_is_at_rest(
    monkeypatch, rows, rests
):
    waited = []
    monkeypatch.setattr(speed, "come_to_rest", lambda: waited.append("rest"))
    program = Program(
        lambda _: waited.append("call"), (jnp.zeros((rows, 2**10)),), arrays=lambda found: found, renewed=(0,)
    )
    Timed(speed.Compiled(program.function), program).sample(seed=0)
    assert waited[: waited.index("call")] == ["rest"] * rests


@pytest.mark.parametrize(("kind", "plain"), [("op_decode", True), ("op_forward", False)])
def test_a_record_says_where_its_backend_takes_the_plain_formula(kind, plain):
    case = OpCase(kind=kind, sequence=136, heads=2, kv_heads=2, head_dim=16)
    (cell,) = kind_of(kind).cells(case, Request(rows=("chunked",), cases=(case,)))
    notes = kind_of(kind).prepare(cell, case, Means(reference=None, memory_limit=2**33)).outcome.notes
    assert any("chunked takes XLA's plain formula" in note for note in notes) is plain


SHARED = """
import jax
from attnsuite.backends import Target, registry
from attnsuite.suite.kinds.attention_call import OpCase, op_program
from attnsuite.suite.measure import program as measured

for kv_layout in ("NHD", "HND"):
    case = OpCase(kind="op_decode", sequence=256, head_dim=16, kv_layout=kv_layout)
    program = op_program(case, registry.get("chunked"), "native", Target.here(), 2)
    chosen = tuple(program.arguments[i] for i in program.renewed)
    renew = jax.jit(measured._renew, out_shardings=tuple(x.sharding for x in chosen))
    drawn = measured._choices(chosen, measured.Draw(0))
    for made in (jax.jit(program.function).lower(*program.arguments), renew.lower(chosen, *drawn)):
        text = made.compile().as_text()
        print([name for name in ("all-gather", "all-to-all", "all-reduce", "collective-permute") if name in text])
"""


def test_heads_that_two_devices_share_stay_where_they_are_in_either_layout():
    """Neither the call nor what makes its inputs new moves them: what was moved is freed while the call is timed."""
    assert printed(SHARED, JAX_NUM_CPU_DEVICES="2").splitlines() == ["[]"] * 4
