"""A helper that Linux has woken on the calling thread's processor goes elsewhere, and may run anywhere afterwards."""

import ctypes
import os
import sys

import numpy as np
import pytest

pytest.importorskip("llvmlite", reason="the kernels are compiled by llvmlite")
if sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2:
    pytest.skip("needs Linux and two processors", allow_module_level=True)

from attnsuite.backends.flash_cpu import affinity
from attnsuite.backends.flash_cpu.emit import Function, i64, ptr
from attnsuite.backends.flash_cpu.handler import State, _emit_helper
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
        return _emit_helper(module, State(OFFSETS), e.function, "end0")

    run = compiled(ISAS[0], build)

    def helper(state, processor):
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {processor})
        os.sched_setaffinity(0, allowed)
        run(state)
        return int(state[2])

    return helper


def test_a_helper_leaves_the_processor_of_the_calling_thread(helper, allowed):
    for processor in sorted(allowed)[:2] * 20:
        assert helper(np.array([1, 4, processor]), processor) != processor
        assert os.sched_getaffinity(0) == allowed


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


def test_the_current_processor_is_the_systems():
    def build(module):
        with Function(module, "here", [], i64) as (e, _):
            e.ret(affinity.current(e))
        return e.function

    assert compiled(ISAS[0], build, ctypes.c_int64)() in os.sched_getaffinity(0)
