import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.backends import AttentionSpec, Layout, Terms, masks, oracle
from attnsuite.testing import problems
from attnsuite.testing.cases import leaning
from declared import sized

pytestmark = [pytest.mark.standard, pytest.mark.newest]

SPEC = AttentionSpec(batch=2, query_length=5, key_value_length=7, num_heads=4, num_kv_heads=2, head_dim=3)
EVERYTHING = dataclasses.replace(
    SPEC,
    value_head_dim=2,
    is_causal=True,
    local_window_size=(4, 1),
    chunk_size=6,
    logits_soft_cap=1.5,
    scale=0.7,
    has_segment_ids=True,
    has_positions=True,
    has_seq_lengths=True,
    has_mask=True,
    has_bias=True,
    has_sinks=True,
    has_alibi=True,
    mask_function=~masks.Dilated(3) | masks.Prefix(2),
)
PROBLEMS = {
    "plain": SPEC,
    "causal": dataclasses.replace(SPEC, is_causal=True),
    "window": dataclasses.replace(SPEC, local_window_size=(1, 2)),
    "chunk": dataclasses.replace(SPEC, chunk_size=3),
    "soft cap": dataclasses.replace(SPEC, logits_soft_cap=0.8),
    "segments": dataclasses.replace(SPEC, has_segment_ids=True),
    "positions": dataclasses.replace(SPEC, is_causal=True, has_positions=True),
    "lengths": dataclasses.replace(SPEC, has_seq_lengths=True),
    "mask": dataclasses.replace(SPEC, has_mask=True),
    "bias": dataclasses.replace(SPEC, has_bias=True),
    "sinks": dataclasses.replace(SPEC, is_causal=True, has_positions=True, has_sinks=True),
    "alibi": dataclasses.replace(SPEC, logits_soft_cap=1.5, has_positions=True, has_alibi=True),
    "mask function": dataclasses.replace(SPEC, mask_function=masks.Causal() & masks.Dilated(2)),
    "score function": sized(
        2,
        3,
        B=2,
        K=1,
        H=2,
        logits_soft_cap=1.5,
        score_function=leaning,
        has_positions=True,
        has_bias=True,
        has_alibi=True,
    ),
    "values in the keys": dataclasses.replace(SPEC, is_causal=True, logits_soft_cap=0.8, values_in_keys=True),
    "everything": EVERYTHING,
}
DIRECTIONS = 6  # in which a gradient is compared with differences of the forward pass


def layout_for(spec, rng):
    B, T, S = spec.batch, spec.query_length, spec.key_value_length
    made = {}
    if spec.has_segment_ids:
        made["query_segment_ids"] = rng.integers(-1, 2, (B, T))
        made["key_value_segment_ids"] = rng.integers(-1, 2, (B, S))
    if spec.has_positions:
        made["query_positions"] = rng.integers(-3, 9, (B, T))
        made["key_value_positions"] = rng.integers(-3, 9, (B, S))
    if spec.has_seq_lengths:
        made["key_value_seq_lengths"] = np.array([S - 2, 0])
    if spec.has_mask:
        made["mask"] = rng.random((B, 1, T, S)) < 0.7
    return Layout(**made)


def terms_for(spec):
    T, S, N = spec.query_length, spec.key_value_length, spec.num_heads
    rng = np.random.default_rng(1)
    bias = rng.standard_normal((1, N, T, S)) if spec.has_bias else None
    sinks, alibi = (rng.standard_normal(N) if has else None for has in (spec.has_sinks, spec.has_alibi))
    return Terms(bias=bias, sinks=sinks, alibi=alibi)


def inputs_for(spec, rng):
    B, T, S, N, K = spec.batch, spec.query_length, spec.key_value_length, spec.num_heads, spec.num_kv_heads
    shapes = ((B, T, N, spec.head_dim), (B, S, K, spec.head_dim), (B, S, K, spec.value_head_dim))
    return tuple(rng.standard_normal(shape) for shape in (*shapes, (B, T, N, spec.value_head_dim)))


def literal(spec, layout, terms, q, k, v):
    """The contract, one query and one key at a time: output and log-sum-exp."""
    v = k[..., : spec.value_head_dim] if spec.values_in_keys else v
    out, lse = np.zeros((*q.shape[:3], v.shape[3])), np.full(q.shape[:3], -np.inf)
    for b, t, n in np.ndindex(*q.shape[:3]):
        head, weights = n // spec.group_size, {}
        for s in range(k.shape[1]):
            if sees(spec, layout, b, t, s):
                score = spec.softmax_scale * float(q[b, t, n] @ k[b, s, head])
                if spec.logits_soft_cap is not None:
                    score = spec.logits_soft_cap * np.tanh(score / spec.logits_soft_cap)
                if spec.score_function is not None:
                    score = scored(spec, layout, b, n, t, s, score)
                if terms.alibi is not None:
                    score -= terms.alibi[n] * abs(int(np.subtract(*places(layout, b, t, s))))
                weights[s] = np.exp(score if terms.bias is None else score + terms.bias[0, n, t, s])
        sink = 0.0 if terms.sinks is None else np.exp(terms.sinks[n])
        total = sink + sum(weights.values())
        for s, weight in weights.items():
            out[b, t, n] += weight / total * v[b, s, head]
        if total:
            lse[b, t, n] = np.log(total)
    return out, lse


def places(layout, b, t, s):
    """The positions of a query and of a key."""
    p = t if layout.query_positions is None else layout.query_positions[b, t]
    return p, s if layout.key_value_positions is None else layout.key_value_positions[b, s]


def scored(spec, layout, b, n, t, s, score):
    with jax.enable_x64(new_val=True):
        return float(spec.score_function(np.float64(score), *map(np.int64, (b, n, *places(layout, b, t, s)))))


def sees(spec, layout, b, t, s):
    p, r = places(layout, b, t, s)
    if layout.query_segment_ids is not None:
        ids = layout.query_segment_ids[b, t], layout.key_value_segment_ids[b, s]
        if ids[0] != ids[1] or min(ids) < 0:
            return False
    return bool(
        (not spec.is_causal or r <= p)
        and (spec.window is None or p - spec.window[0] <= r <= p + spec.window[1])
        and (spec.chunk_size is None or p // spec.chunk_size == r // spec.chunk_size)
        and (spec.mask_function is None or spec.mask_function(p, r))
        and (layout.key_value_seq_lengths is None or s < layout.key_value_seq_lengths[b])
        and (layout.mask is None or layout.mask[b, 0, t, s])
    )


@pytest.mark.parametrize("name", PROBLEMS)
def test_forward_and_log_sum_exp_are_those_of_the_literal_loop(name):
    spec, rng = PROBLEMS[name], np.random.default_rng(0)
    layout, terms, (q, k, v, _) = layout_for(spec, rng), terms_for(spec), inputs_for(spec, rng)
    out, lse = literal(spec, layout, terms, q, k, v)
    np.testing.assert_allclose(oracle.forward(spec, layout, q, k, v, terms), out, atol=1e-14)
    np.testing.assert_allclose(oracle.log_sum_exp(spec, layout, q, k, terms), lse, atol=1e-14)


@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_are_finite_differences_of_the_forward(name):
    spec, rng, step = PROBLEMS[name], np.random.default_rng(0), 1e-6
    layout, terms, (q, k, v, cotangent) = layout_for(spec, rng), terms_for(spec), inputs_for(spec, rng)
    d_lse = rng.standard_normal(q.shape[:3])

    def weighted(inputs):
        moved = Terms(**{name: inputs[f"d{name}"] for name in terms.given()})
        lse = oracle.log_sum_exp(spec, layout, inputs["dq"], inputs["dk"], moved)
        out = oracle.forward(spec, layout, inputs["dq"], inputs["dk"], inputs.get("dv"), moved)
        return float((out * cotangent).sum() + (np.where(np.isneginf(lse), 0.0, lse) * d_lse).sum())

    found = oracle.gradients(spec, layout, q, k, v, cotangent, d_log_sum_exp=d_lse, terms=terms)
    inputs = {"dq": q, "dk": k} if spec.values_in_keys else {"dq": q, "dk": k, "dv": v}
    inputs |= {f"d{name}": getattr(terms, name) for name in terms.given()}
    assert set(found) == set(inputs)
    for which, gradient in found.items():
        # Every entry of a gradient is in every direction. Entry by entry would take a hundred times as many passes.
        along, numeric = [], []
        for direction in rng.standard_normal((DIRECTIONS, *gradient.shape)):
            ends = [weighted(inputs | {which: inputs[which] + sign * step * direction}) for sign in (1, -1)]
            numeric.append((ends[0] - ends[1]) / (2 * step))
            along.append((gradient * direction).sum())
        np.testing.assert_allclose(along, numeric, atol=1e-7, err_msg=which)


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (3,), (0, 2), (1, 2, 3), (0, 1, 2, 3)], ids=str)
def test_gradient_of_a_bias_is_summed_over_the_axes_that_it_broadcasts(axes):
    spec, rng = dataclasses.replace(SPEC, has_bias=True), np.random.default_rng(0)
    shape = (spec.batch, spec.num_heads, spec.query_length, spec.key_value_length)
    narrow = rng.standard_normal([1 if axis in axes else size for axis, size in enumerate(shape)])
    layout, inputs = Layout(), inputs_for(spec, rng)
    narrow_gradient = oracle.gradients(spec, layout, *inputs, terms=Terms(bias=narrow))["dbias"]
    full = oracle.gradients(spec, layout, *inputs, terms=Terms(bias=np.broadcast_to(narrow, shape)))["dbias"]
    assert narrow_gradient.shape == narrow.shape
    np.testing.assert_allclose(narrow_gradient, full.sum(axes, keepdims=True), atol=1e-13)
    assert np.abs(full).max() > 1e-3


@pytest.mark.parametrize("rows", [1, 3])
def test_blocks_of_rows_change_nothing(monkeypatch, rows):
    spec, rng = EVERYTHING, np.random.default_rng(0)
    layout, inputs = layout_for(spec, rng), inputs_for(spec, rng)
    terms, d_lse = terms_for(spec), rng.standard_normal(inputs[0].shape[:3])

    def everything():
        lse = oracle.log_sum_exp(spec, layout, *inputs[:2], terms)
        return oracle.gradients(spec, layout, *inputs, d_log_sum_exp=d_lse, terms=terms) | {"lse": lse}

    whole = everything()
    monkeypatch.setattr(oracle, "_BLOCK_ELEMENTS", rows * spec.group_size * spec.key_value_length)
    for one, other in zip(whole.values(), everything().values(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-14)


def test_unseen_rows_and_keys_are_those_the_loop_never_meets():
    spec, rng = EVERYTHING, np.random.default_rng(0)
    layout = layout_for(spec, rng)
    seen = np.array([[[sees(spec, layout, b, t, s) for s in range(7)] for t in range(5)] for b in range(2)])
    assert (oracle.unseen_rows(spec, layout) == ~seen.any(2)[..., None]).all()
    assert (oracle.unseen_keys(spec, layout) == ~seen.any(1)[..., None]).all()


def test_half_precision_input_is_widened_before_anything_else():
    rng = np.random.default_rng(0)
    q, k, v, _ = (jnp.asarray(x.astype(jnp.bfloat16)) for x in inputs_for(SPEC, rng))
    wide = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    assert (oracle.forward(SPEC, Layout(), q, k, v) == oracle.forward(SPEC, Layout(), *wide)).all()


def test_huge_logits_give_no_nan():
    q, k, v, cotangent = (x * 1e150 for x in inputs_for(SPEC, np.random.default_rng(0)))
    assert np.isfinite(oracle.forward(SPEC, Layout(), q, k, v)).all()
    assert np.isfinite(oracle.gradients(SPEC, Layout(), q * 1e-140, k * 1e-140, v, cotangent)["dv"]).all()


def verdict(actual, *, standard=None, zero=None):
    return oracle.judge(actual, np.ones((4, 4)), standard, str(actual.dtype), zero=zero)


def test_exact_result_passes():
    assert verdict(np.ones((4, 4), np.float32)) == oracle.Verdict(0.0, 0.0, None, 128 * 2.0**-23, passed=True)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_number_that_is_not_finite_fails(bad):
    actual = np.ones((4, 4), np.float32)
    actual[3, 3] = bad
    assert not verdict(actual).passed
    assert verdict(actual).max_error == np.inf


def test_wrong_shape_and_wrong_dtype_fail():
    assert not verdict(np.ones((4, 1), np.float32)).passed
    assert not oracle.judge(np.ones((4, 4), np.float64), np.ones((4, 4)), None, "float32").passed


def test_a_broken_standard_hides_nobody():
    wrong = np.full((4, 4), 1.01, np.float32)
    assert not verdict(wrong, standard=wrong).passed
    assert not verdict(wrong, standard=1.0).passed


@pytest.mark.parametrize("dtype", oracle.EPSILON)
@pytest.mark.parametrize("kind", ["forward", "gradient"])
def test_the_bound_is_between_one_and_three_times_itself(dtype, kind):
    rng = np.random.default_rng(0)
    expected = rng.standard_normal((64, 64))
    rounded = expected.astype(jnp.dtype(dtype))
    allowed = oracle.judge(rounded, expected, rounded, dtype, kind).allowed
    assert oracle.judge(rounded, expected, rounded, dtype, kind).passed
    moved = expected.copy()
    moved[5, 5] += 3 * allowed * np.abs(expected).max()
    assert not oracle.judge(moved.astype(rounded.dtype), expected, rounded, dtype, kind).passed


@pytest.mark.parametrize("case", ["causal", "cross-bfloat16", "cross-float16"])
@pytest.mark.parametrize("quantity", problems.QUANTITIES)
def test_noise_of_three_times_the_standard_error_everywhere_fails(case, quantity):
    problem, rng = problems.problem(case), np.random.default_rng(0)
    expected, standard = problem.expected[quantity], problem.standard[quantity]
    dtype, kind = problem.spec.dtype, "forward" if quantity == "output" else "gradient"
    noise = rng.choice([-1.0, 1.0], expected.shape) * 3 * standard.max_error * np.abs(expected).max()
    noisy = (expected + noise).astype(jnp.dtype(dtype))
    assert not oracle.judge(noisy, expected, standard, dtype, kind).passed


def test_standard_may_be_given_as_array_verdict_or_number():
    actual = np.full((4, 4), 1 + 2e-6, np.float32)
    as_array, as_verdict = (verdict(actual, standard=x) for x in (actual, verdict(actual)))
    assert as_array == as_verdict
    assert verdict(actual, standard=as_array.max_error).allowed == as_array.allowed


def test_rows_without_keys_must_be_exactly_zero():
    expected, actual = np.zeros((4, 4)), np.zeros((4, 4), np.float32)
    expected[0], actual[0], actual[3, 3] = 1.0, 1.0, 1e-30
    unseen = np.array([False, False, False, True])
    assert oracle.judge(actual, expected, None, "float32").passed
    assert not oracle.judge(actual, expected, None, "float32", zero=unseen).passed


def test_zero_everywhere_is_judged_absolutely():
    assert oracle.judge(np.full(3, 1e-6, np.float32), np.zeros(3), 0.0, "float32").passed
    assert not oracle.judge(np.full(3, 1e-4, np.float32), np.zeros(3), 0.0, "float32").passed
