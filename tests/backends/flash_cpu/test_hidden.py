"""What nobody sees is not read by the kernels, and what is not finite reaches only the rows that see it."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("llvmlite", reason="the kernels are compiled by llvmlite")

from attnsuite.backends import AttentionSpec, Layout, Target, plan, registry
from attnsuite.backends.flash_cpu import backward_rows, calls, panels, rows
from attnsuite.backends.flash_cpu.visibility import visibility
from emitted import ISAS, everything_finite, set_apart

# Two sequences: 90 of 130 keys exist; padding at both ends, in the middle of a block, and 8 queries that see nothing.
T, S = 60, 130
LAYOUT = Layout(
    query_segment_ids=np.stack([np.zeros(T), np.repeat([-1, 1], [8, T - 8])]).astype(np.int32),
    key_value_segment_ids=np.stack([np.zeros(S), np.repeat([-1, 1, -1, 1, -1], [10, 50, 7, 40, 23])]).astype(np.int32),
    key_value_seq_lengths=np.array([90, S], np.int32),
)
HIDDEN = np.stack([np.arange(S) >= 90, LAYOUT.key_value_segment_ids[1] < 0])
UNSEEING = LAYOUT.query_segment_ids < 0


def _spec(tokens):
    return AttentionSpec(
        batch=2, query_length=tokens, key_value_length=S, num_heads=4, num_kv_heads=2, head_dim=20, value_head_dim=12,
        has_segment_ids=True, has_seq_lengths=True,
    )  # fmt: skip


def _arrays(tokens, spoilt):
    """Query, key, value and the output's cotangent; ``spoilt`` stands in unseen keys and in rows that see nothing."""
    rng = np.random.default_rng(0)
    shapes = (2, tokens, 4, 20), (2, S, 2, 20), (2, S, 2, 12), (2, tokens, 4, 12)
    query, key, value, d_out = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    if spoilt is not None:
        query[UNSEEING[:, :tokens]] = d_out[UNSEEING[:, :tokens]] = spoilt
        key[HIDDEN] = value[HIDDEN] = spoilt
    return tuple(map(jnp.asarray, (query, key, value, d_out)))


def _layout(tokens):
    return dataclasses.replace(LAYOUT, query_segment_ids=LAYOUT.query_segment_ids[:, :tokens])


def _forward_and_backward(isa, spoilt):
    spec = _spec(T)
    call, seen = calls.Calls(spec, isa), visibility(spec, _layout(T))
    query, key, value, d_out = _arrays(T, spoilt)
    out, top, total = call.forward(query, key, value, seen)
    return out, *call.backward(query, key, value, seen, out, top, total, d_out, None)


def _decode(isa, spoilt):
    spec = _spec(12)
    query, key, value, _ = _arrays(12, spoilt)
    return calls.Calls(spec, isa).decode(query, key, value, visibility(spec, _layout(12)))


@pytest.fixture(params=ISAS, ids=lambda isa: isa.name)
def isa(request):
    return request.param


@pytest.mark.parametrize("spoilt", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("compute", [_forward_and_backward, _decode])
def test_what_nobody_sees_changes_no_bit(isa, compute, spoilt):
    for clean, found in zip(compute(isa, None), compute(isa, spoilt), strict=True):
        assert np.isfinite(clean).all()
        np.testing.assert_array_equal(clean, found)


@pytest.mark.parametrize("room", [panels, backward_rows], ids=["forward", "backward"])
def test_padding_that_is_packed_as_it_is_would_be_noticed(room, monkeypatch, tmp_path):
    set_apart(monkeypatch, tmp_path, f"padding packed as it is in {room.__name__}")
    monkeypatch.setattr(room, "NO_KEY", -99)  # what a key is compared with before it is copied
    monkeypatch.setattr(rows, "finite", everything_finite)
    assert not all(np.isfinite(x).all() for x in _forward_and_backward(ISAS[0], np.nan))


STEP = AttentionSpec(
    batch=2, query_length=1, key_value_length=S, num_heads=4, num_kv_heads=2, head_dim=20, needs_grad=False,
    has_seq_lengths=True, logits_soft_cap=5.0,
)  # fmt: skip


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
