"""Sums over many keys keep their digits: long ones are made of shorter ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("llvmlite", reason="the kernels are compiled by llvmlite")

from attnsuite.backends import Layout, Target, oracle, plan, registry
from attnsuite.backends.flash_cpu import calls, forward, running_sums
from attnsuite.backends.flash_cpu.backend import natural, of_two
from declared import sized
from emitted import set_apart
from landing import swept

# Batch, queries, keys, KV heads, layout of the cache.
LONG = {
    "decode, each head apart": (1, 1, 32768, 8, "HND"),
    "decode, all heads of a sequence": (8, 1, 32768, 1, "NHD"),
    "prefill behind a cache": (1, 64, 131072, 1, "NHD"),
}


def verdict(shape, rising=False):
    """``rising``: the keys are longer from block to block, and so are the maxima of the rows."""
    batch, queries, length, heads, kv_layout = shape
    spec = sized(queries, length, B=batch, N=heads, needs_grad=False, kv_layout=kv_layout)
    rng, cache = np.random.default_rng(0), (batch, length, heads, 64) if kv_layout == "NHD" else (1, heads, length, 64)
    query, key, value = (rng.standard_normal(x).astype(np.float32) for x in ((batch, queries, heads, 64), cache, cache))
    if rising:
        key *= np.linspace(0.1, 5.0, length, dtype=np.float32)[:, None, None]
    standard, ours = (
        jax.jit(plan(registry.get(backend), spec, Layout(), target=Target.here()).run)(query, key, value)[0]
        for backend in ("standard", "flash_cpu")
    )
    return oracle.judge(ours, oracle.forward(spec, Layout(), query, key, value), standard, spec.dtype)


@pytest.mark.parametrize("name", swept(LONG, ("prefill behind a cache",)))
def test_long_sums_are_as_right_as_those_of_standard(name):
    found = verdict(LONG[name])
    assert found.passed, found


@pytest.mark.thorough
@pytest.mark.parametrize("name", LONG)
def test_sums_of_all_keys_in_turn_fail(name, monkeypatch, tmp_path):
    """In one range, or block after block: the largest errors are about three times the standard backend's."""
    batch, queries, length, *rest = LONG[name]
    verdict(LATE)  # the self-test comes first
    set_apart(monkeypatch, tmp_path, "fault: long sums")
    monkeypatch.setattr(calls, "DECODE_MOST_KEYS", 2**30)
    monkeypatch.setattr(running_sums, "JOINED_BLOCKS", 2**30)
    found = verdict((batch, queries, 2 * length, *rest))
    assert not found.passed
    assert found.max_error > 2 * found.standard_error  # on an Intel Xeon 2.8 to 3.2 times


LATE = (1, 64, 2 * running_sums.JOINED_BLOCKS * forward.BLOCK_KEYS, 1, "NHD")


def test_maxima_may_rise_behind_blocks_that_were_joined():
    found = verdict(LATE, rising=True)
    assert found.passed, found


@pytest.mark.thorough
def test_earlier_sums_that_are_not_rescaled_fail(monkeypatch, tmp_path):
    def latest_alone(self, e, w, block, group, decay):
        e.run(self._rescale, w.at(self._at["out"]).at(group * self._width, 4), decay)

    verdict(LATE)  # the self-test comes first
    set_apart(monkeypatch, tmp_path, "fault: earlier sums are not rescaled")
    monkeypatch.setattr(running_sums.RunningSums, "rescale", latest_alone)
    assert not verdict(LATE, rising=True).passed


# A row's log-sum-exp as two numbers, between the kernels (powers of two) and a ring (natural), with large logits

RNG = np.random.default_rng(0)
TOP = np.concatenate([RNG.uniform(-300, 300, 4096), RNG.uniform(-9e4, 9e4, 4096)]).astype(np.float32)
TOTAL = RNG.uniform(0.5, 5000, TOP.shape).astype(np.float32)


def _exact(top, total):
    """log(total * 2**top) in float64."""
    return np.asarray(top, np.float64) * np.log(2) + np.log(np.asarray(total, np.float64))


def _bound(top):
    """What the logarithm of the sum rounds, and a hundredth of what a float32 of the size of ``top`` would round."""
    return 1e-6 + np.abs(top) * 2.0**-24 / 100


@pytest.mark.parametrize("compile_", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_low_bits_of_the_log_sum_exp_are_kept_on_the_way_to_the_ring(compile_):
    top, rest = (np.asarray(x, np.float64) for x in compile_(natural)(TOP, TOTAL))
    assert (np.abs(top + rest - _exact(TOP, TOTAL)) < _bound(TOP)).all()


@pytest.mark.parametrize("compile_", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_low_bits_of_the_log_sum_exp_are_kept_on_the_way_back(compile_):
    whole, rest = np.round(TOP), np.log(TOTAL)
    expected = whole.astype(np.float64) + rest.astype(np.float64)
    top, total = compile_(of_two)(jnp.asarray(whole), jnp.asarray(rest))
    assert (np.abs(_exact(top, total) - expected) < _bound(TOP)).all()


def test_largest_top_of_two_parts_is_still_an_integer():
    top, _ = natural(jnp.asarray(TOP), jnp.asarray(TOTAL))
    np.testing.assert_array_equal(top, np.round(top))
