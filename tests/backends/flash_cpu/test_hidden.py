"""What is not finite reaches only the rows of a decode step that see it."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("llvmlite", reason="the kernels are compiled by llvmlite")

from attnsuite.backends import Layout, Target, plan, registry
from declared import sized

S = 130
STEP = sized(1, S, B=2, N=4, K=2, H=20, needs_grad=False, has_seq_lengths=True, logits_soft_cap=5.0)


def _arrays_of_a_step():
    rng = np.random.default_rng(0)
    return [rng.standard_normal((2, n, heads, 20)).astype(np.float32) for n, heads in ((1, 4), (S, 2), (S, 2))]


def _step(spec, lengths, query, key, value):
    layout = Layout(key_value_seq_lengths=jnp.asarray(lengths, jnp.int32))
    made = plan(registry.get("flash_cpu"), spec, layout, target=Target.here())
    return np.array(made.run(*map(jnp.asarray, (query, key, value)))[0])


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_decode_step_is_nan_where_it_sees_what_is_not_finite_and_only_there(soft_cap, number):
    spec = dataclasses.replace(STEP, logits_soft_cap=soft_cap)
    query, key, value = _arrays_of_a_step()
    lengths = [100, 1]
    expected = _step(spec, lengths, query, key, value)
    for place in (0, 1, 64, 99, 100, S - 1):
        for spoilt in (0, 1):
            arrays = [key.copy(), value.copy()]
            arrays[spoilt][:, place, 1, 3] = number
            out, sees = _step(spec, lengths, query, *arrays), np.array(lengths) > place
            assert np.isnan(out[sees][:, :, 2:]).all()
            np.testing.assert_array_equal(out[~sees], expected[~sees])
            np.testing.assert_array_equal(out[:, :, :2], expected[:, :, :2])


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_query_of_a_decode_step_that_is_not_finite_spoils_its_own_row(soft_cap, number):
    spec = dataclasses.replace(STEP, logits_soft_cap=soft_cap)
    query, key, value = _arrays_of_a_step()
    lengths = [100, 0]  # the second sequence has no key: its rows stay zero
    expected = _step(spec, lengths, query, key, value)
    query[:, 0, 2, 3] = number
    out = _step(spec, lengths, query, key, value)
    assert np.isnan(out[0, 0, 2]).all()
    out[0, 0, 2] = expected[0, 0, 2]
    np.testing.assert_array_equal(out, expected)
