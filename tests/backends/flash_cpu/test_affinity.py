"""A helper that Linux has woken on the calling thread's processor goes elsewhere, and may run anywhere afterwards."""

import ctypes
import os
import sys
import time

import numpy as np
import pytest

pytest.importorskip("llvmlite", reason="the kernels are compiled by llvmlite")
if sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2:
    pytest.skip("needs Linux and two processors", allow_module_level=True)

from attnsuite.backends.flash_cpu import affinity
from attnsuite.backends.flash_cpu.emit import Function, Value, i64, ptr
from attnsuite.backends.flash_cpu.handler import State, emit_helper
from emitted import ISAS, compiled

OFFSETS = {"next": 0, "end0": 8, "processor": 16}


@pytest.fixture
def allowed():
    allowed = os.sched_getaffinity(0)
    yield allowed
    os.sched_setaffinity(0, allowed)


@pytest.fixture(scope="module")
def helper():
    """``helper(state, processor)``: where its work begins, on a thread that was on ``processor`` before."""

    def build(module):
        with Function(module, "worker", [ptr]) as (e, (s,)):
            s.at(OFFSETS["processor"]).store(affinity.current(e), 8)
        return emit_helper(module, State(OFFSETS), e.function, "end0")

    run = compiled(ISAS[0], build)

    def helper(state, processor):
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {processor})
        os.sched_setaffinity(0, allowed)
        run(state)
        return int(state[2])

    return helper


def test_a_helper_leaves_the_processor_of_the_calling_thread(helper, allowed):
    """Where the other processor is busy, Linux may move the thread back before it says where it is, but seldom."""
    left = 0
    for processor in sorted(allowed)[:2] * 20:
        left += helper(np.array([1, 4, processor]), processor) != processor
        assert os.sched_getaffinity(0) == allowed
    assert left > 30


@pytest.mark.parametrize("state", [(1, 4, -1), (4, 4, None)], ids=["the caller is elsewhere", "no work is left"])
def test_a_helper_stays_where_it_is_if(state, helper, allowed):
    """Linux itself may move a thread, but not each time."""
    processor = min(allowed)
    given = [processor if x is None else x for x in state]
    assert processor in {helper(np.array(given), processor) for _ in range(20)}


def test_a_thread_that_is_bound_stays_bound(allowed):
    leave, processor = compiled(ISAS[0], affinity.emit_leave), max(allowed)
    os.sched_setaffinity(0, {processor})
    leave(processor)
    assert os.sched_getaffinity(0) == {processor}


@pytest.mark.parametrize("processor", [-1, affinity.CPUS])
def test_a_processor_without_a_bit_in_the_mask_changes_nothing(processor, allowed):
    compiled(ISAS[0], affinity.emit_leave)(processor)
    assert os.sched_getaffinity(0) == allowed


@pytest.mark.parametrize(("last", "quiet"), [(2 * affinity.SHORT, 100), (affinity.SHORT, None)])
def test_yields_cost_a_hundredth_of_the_time_at_most_and_short_calls_none(last, quiet):
    """A yield of one second behind a call that took ``last`` is the last one for a hundred; then there is no other."""

    def build(module):
        neighbours = affinity.Neighbours.of(module)
        with Function(module, "probe", [i64, i64], i64) as (e, (took, of_last)):
            until = Value(e, module.globals["quiet_until"])
            Value(e, neighbours.last).store(of_last, 8)
            began = e.run(neighbours.now) - took
            e.run(neighbours.give_way, began)
            first = e.atomic_load(until)
            e.run(neighbours.give_way, began)
            e.ret(e.select(first.equals(e.atomic_load(until)), first, e.const(i64, -1)))
        return e.function

    until = compiled(ISAS[0], build, ctypes.c_int64)(1_000_000_000, last)
    if quiet is None:
        assert until == 0
    else:
        assert quiet - 2 < (until - time.monotonic_ns()) / 1e9 < quiet + 20
