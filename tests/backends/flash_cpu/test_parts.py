"""A row's log-sum-exp as two numbers, between the kernels (powers of two) and a ring (natural), with large logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("llvmlite", reason="the kernels are compiled by llvmlite")

from attnsuite.backends.flash_cpu.backend import natural, of_two

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
