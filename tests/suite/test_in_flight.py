"""Calls in flight: each waits for the one before, the slope leaves out what is paid once, and the profile is read."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

from attnsuite.backends import Target
from attnsuite.suite.errors import CellFailure
from attnsuite.suite.measure import in_flight, speed
from attnsuite.suite.measure.in_flight import Chain, Flight, compile_chain
from attnsuite.suite.measure.profile import read_call_times

H100 = Target("cuda", "h100")


def product(x, y):
    return jax.nn.softmax(x @ y, axis=-1) @ y


def flight(size=256, calls=6, sets=8, cache=0):
    x = jax.random.normal(jax.random.key(0), (size, size))
    compiled = compile_chain(product, (x, x))
    return Flight(compiled.call, calls, sets, cache), lambda number: (x + number, x)


def test_token_is_there_when_the_call_is_done_and_adds_no_operation():
    x = jnp.ones((1024, 1024))
    plain, linked = speed.compile_program(product, (x, x)).call, compile_chain(product, (x, x)).call
    assert linked.memory_analysis().temp_size_in_bytes == plain.memory_analysis().temp_size_in_bytes
    assert linked.as_text().count(" copy(") == plain.as_text().count(" copy(")
    outputs = linked(x, x)
    linked.wait()
    assert outputs.is_ready()
    assert (outputs == plain(x, x)).all()


def test_sample_is_the_slope_on_inputs_of_its_own(monkeypatch):
    timed, arguments = flight()
    started, now = [], itertools.count()
    call = Chain.__call__
    monkeypatch.setattr(
        Chain, "__call__", lambda self, *given: started.append(float(given[0][0, 0])) or call(self, *given)
    )
    monkeypatch.setattr(speed, "clock", lambda: [0, 0.1, 1, 1.5, 2, 5.5][next(now)])
    found = timed.sample(arguments, choice=11)
    assert found.seconds == pytest.approx((3.5 - 0.5) / 6)  # what both lengths pay is in neither
    first = float(arguments(0)[0][0, 0])
    assert [round(x - first) for x in started] == [0, 0, 1, *range(8)]
    assert found.call == 3
    assert jnp.allclose(found.outputs, product(*arguments(3)), atol=1e-5)


@pytest.mark.parametrize(
    ("ticks", "seconds"),
    [
        ([0, 0.1, 1, 5, 6, 7, 8, 8.5, 9, 12.5], (3.5 - 0.5) / 6),  # the first pair of lengths was disturbed
        (range(100), 1.0),  # a call that is long enough
    ],
    ids=["disturbed", "long"],
)
def test_sample_is_taken_again_or_is_one_call(monkeypatch, ticks, seconds):
    timed, arguments = flight()
    now = iter(ticks)
    monkeypatch.setattr(speed, "clock", lambda: float(next(now)))
    assert timed.sample(arguments, choice=0).seconds == pytest.approx(seconds)
    monkeypatch.setattr(speed, "clock", lambda: 1.0)
    with pytest.raises(CellFailure, match="6 more calls took no more time in 5 attempts"):
        timed.sample(arguments, choice=0)


def test_inputs_are_new_in_each_call_where_memory_allows():
    chain = compile_chain(product, (jnp.ones((8, 8)), jnp.ones((8, 8)))).call
    assert Flight.of(chain, 30, 2**20, H100) == Flight(chain, 30, 40, 50 * 2**20)
    assert Flight.of(chain, 30, 2**32, H100).sets == 5  # of 80 GiB a quarter: far more than the cache
    assert Flight.of(chain, 30, 2**40, H100).sets == 1
    assert Flight.of(chain, 30, 2**20, Target("tpu", "v5e")).cache == 0
    assert Flight.of(chain, 30, 2**20, Target("cuda", "NVIDIA L4", 2**34)).cache == 126 * 2**20


@pytest.mark.parametrize(("cache", "cached"), [(0, 0), (2**10, 10)])
def test_profile_tells_cold_calls_from_those_whose_inputs_are_in_the_cache(cache, cached):
    timed, arguments = flight(cache=cache)
    cold, warm = timed.on_device(arguments)
    assert (len(cold), len(warm)) == (in_flight.PROFILED, cached)
    assert all(seconds > 0 for seconds in (*cold, *warm))


def test_cache_is_evicted_before_each_length(monkeypatch):
    timed, arguments = flight(cache=2**10)
    evicted, ticks = [], itertools.accumulate(itertools.count())  # each run takes longer than the one before
    monkeypatch.setattr(in_flight.jnp, "zeros", lambda size, _: evicted.append(size))
    monkeypatch.setattr(speed, "clock", lambda: next(ticks) * 1e-6)
    timed.sample(arguments, choice=0)
    assert evicted == [2**11] * 3


def test_time_of_a_call_is_its_module_on_a_tpu():
    modules = ("XLA Modules", [("jit_f(1)", 0, 10), ("jit_f(1)", 20, 12)])
    ops = ("XLA Ops", [("fusion.1", 0, 4), ("fusion.2", 4, 6), ("fusion.1", 20, 12)])
    xplane = profile_of("/device:TPU:0", modules, ops)
    assert read_call_times(xplane, 2) == pytest.approx((10e-6, 12e-6))


def test_time_of_a_call_is_the_union_of_its_kernels_on_a_gpu():
    compute = ("Stream #13(Compute)", [("gemm", 0, 10), ("softmax", 12, 4), ("gemm", 30, 11), ("softmax", 43, 4)])
    copies = ("Stream #14(MemcpyD2D)", [("copy", 5, 6), ("copy", 35, 6)])
    again = ("XLA Modules", [("jit_f", 0, 16), ("jit_f", 30, 17)])
    xplane = profile_of("/device:GPU:0", compute, copies, again)
    assert read_call_times(xplane, 2) == pytest.approx((15e-6, 15e-6))  # the gaps are in neither


@pytest.mark.parametrize(
    "events",
    [
        [],
        [("gemm", 0, 10), ("softmax", 12, 4), ("gemm", 30, 11)],
        [("gemm", 0, 10), ("softmax", 12, 4), ("gemm", 30, 11), ("copy", 43, 4)],
    ],
)
def test_profile_that_holds_other_work_than_equal_calls_is_a_failure(events):
    with pytest.raises(CellFailure, match="not 2 equal calls"):
        read_call_times(profile_of("/device:GPU:0", ("Stream #13(Compute)", events)), 2)


def profile_of(plane, *lines):
    """A profile of lines (name, events) and an event of the host. An event is (name, start, length in microseconds)."""
    names = sorted({name for _, events in lines for name, _, _ in events})
    numbers = {name: number for number, name in enumerate(names, start=1)}
    metadata = "".join(f'event_metadata {{ key: {i} value {{ id: {i} name: "{n}" }} }}' for n, i in numbers.items())
    written = "".join(
        f'lines {{ name: "{name}" '
        + "".join(
            f"events {{ metadata_id: {numbers[each]} offset_ps: {start * 10**6} duration_ps: {length * 10**6} }}"
            for each, start, length in events
        )
        + "}"
        for name, events in lines
    )
    host = 'planes { name: "/host:CPU" lines { name: "tf_XLAEigen/1" events { metadata_id: 1 duration_ps: 9 } } }'
    return ProfileData.text_proto_to_serialized_xspace(f'{host} planes {{ name: "{plane}" {metadata} {written} }}')
