"""One deliberately wrong implementation per rule of the contract: the suite must fail each of them."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.backends import AttentionSpec, Layout, Target, masks
from attnsuite.backends.contract import NO_TERMS, may_attend
from attnsuite.backends.standard import STANDARD
from attnsuite.testing import checks, problems
from attnsuite.testing.problems import QUANTITIES
from declared import Asked

pytestmark = [pytest.mark.newest, pytest.mark.thorough]

Attend = Callable[..., Any]  # (query, key, value), and terms where there are some -> output, or (output, log-sum-exp)


def standard(problem, layout=None, **changes):
    """The standard backend with a changed spec or layout."""
    spec = dataclasses.replace(problem.spec, **changes)
    plan = STANDARD.plan(spec, problem.layout if layout is None else layout, target=Target.here())

    def run(q, k, v, terms=NO_TERMS):
        return dataclasses.replace(plan, spec=spec).run(q, k, v, terms=terms)[0]

    return run


def masked_by(problem, mask):
    """The standard backend with nothing but this mask."""
    bare = dataclasses.replace(
        problem.spec,
        is_causal=False,
        local_window_size=None,
        has_segment_ids=False,
        has_positions=False,
        has_seq_lengths=False,
        has_mask=True,
    )
    plan = STANDARD.plan(bare, Layout(mask=mask), target=Target.here())
    return lambda q, k, v: plan.run(q, k, v)[0]


def changed(**spec):
    """A field of the spec is another."""
    return lambda problem: standard(problem, **spec)


def without(*arrays, **spec):
    """These arrays of the layout are ignored."""
    return lambda problem: standard(problem, dataclasses.replace(problem.layout, **dict.fromkeys(arrays)), **spec)


positions_ignored = without("query_positions", "key_value_positions")


def window(change):
    """Another window."""
    return lambda problem: standard(problem, local_window_size=change(*problem.spec.window))


def term(name, change):
    """A term changed, and with it its gradient."""

    def wrong(problem):
        attend = standard(problem)

        def run(q, k, v, terms):
            other = change(problem.spec, getattr(terms, name))
            return attend(q, k, v, dataclasses.replace(terms, **{name: other}))

        return run

    return wrong


def padding_matches_padding(problem):
    ids = (problem.layout.query_segment_ids, problem.layout.key_value_segment_ids)
    unsigned = [jnp.where(x < 0, jnp.full_like(x, 99), x) for x in ids]
    return standard(problem, Layout(query_segment_ids=unsigned[0], key_value_segment_ids=unsigned[1]))


def rows_without_keys_averaged(problem):
    mask = may_attend(problem.spec, problem.layout)
    return masked_by(problem, mask | ~mask.any(-1, keepdims=True))


def heads_interleaved(problem):
    """Query head n reads KV head n % K instead of n // G."""
    attend, K, G = standard(problem), problem.spec.num_kv_heads, problem.spec.group_size

    def run(q, k, v):
        b, t, n, h = q.shape
        out = attend(q.reshape(b, t, G, K, h).swapaxes(2, 3).reshape(b, t, n, h), k, v)
        return out.reshape(b, t, K, G, -1).swapaxes(2, 3).reshape(b, t, n, -1)

    return run


def group_not_summed(problem):
    """dk and dv come from the first query head of each group alone."""
    attend, G = standard(problem), problem.spec.group_size

    def run(q, k, v):
        first = (jnp.arange(q.shape[2]) % G == 0)[None, None, :, None]
        return jnp.where(first, attend(q, k, v), attend(q, jax.lax.stop_gradient(k), jax.lax.stop_gradient(v)))

    return run


def softmax_in_bfloat16(problem):
    """Scores, exponentials and their sum are held in bfloat16."""
    mask, G = may_attend(problem.spec, problem.layout), problem.spec.group_size

    def run(q, k, v):
        k, v = (jnp.repeat(x, G, axis=2) for x in (k, v))
        logits = (jnp.einsum("btnh,bsnh->bnts", q, k) * problem.spec.softmax_scale).astype(jnp.bfloat16)
        logits = logits if mask is None else jnp.where(mask, logits, jnp.asarray(-1e9, logits.dtype))
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits, axis=-1).astype(v.dtype), v)

    return run


def one_gradient_off(scales):
    """Gradients multiplied by these factors."""

    def wrong(problem):
        attend = standard(problem)

        @jax.custom_vjp
        def run(q, k, v):
            return attend(q, k, v)

        def backward(residuals, cotangent):
            gradients = jax.vjp(attend, *residuals)[1](cotangent)
            return tuple((x * scale).astype(x.dtype) for x, scale in zip(gradients, scales, strict=True))

        run.defvjp(lambda *inputs: (attend(*inputs), inputs), backward)
        return run

    return wrong


def unseen_rows_leak_gradients(problem):
    """Rows that see nothing give zero, but as an average multiplied by a mask whose gradient is not stopped."""
    averaged, unseen = rows_without_keys_averaged(problem), jnp.asarray(problem.unseen_rows[..., None])

    def run(q, k, v):
        out = averaged(q, k, v)
        return jnp.where(unseen, out - jax.lax.stop_gradient(out), out)

    return run


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def with_gradient(x, change):
    """``x``, whose gradient arrives changed."""
    return x


with_gradient.defvjp(lambda x, _: (x, None), lambda change, _, cotangent: (change(cotangent),))


def term_gradient(name, change):
    """The gradient of a term changed, and nothing else."""
    return term(name, lambda _, x: with_gradient(x, change))


def gradient_of_the_first_row(spec, bias):
    """A bias that all rows share, with the gradient of the first row alone."""
    first = jnp.arange(spec.query_length)[:, None] == 0
    return jnp.where(first, bias, jax.lax.stop_gradient(bias))


def log_sum_exp(change):
    """The log-sum-exp changed, the output not."""

    def wrong(problem):
        attend = standard(problem)

        def run(*operands):
            out, lse = attend(*operands)
            return out, change(lse)

        return run

    return wrong


def log_sum_exp_of(**changes):
    """The log-sum-exp of the standard backend with a changed spec."""

    def wrong(problem):
        right, other = standard(problem), standard(problem, **changes)
        return lambda *operands: (right(*operands)[0], other(*operands)[1])

    return wrong


def mask_function(change):
    """Another mask function."""
    return lambda problem: standard(problem, mask_function=change(problem.spec.mask_function))


def blocks_by_corners(problem):
    """The pairs of a block of 32 by 32 are all visible if its four corners are, and none of them if no corner is."""
    sees = problem.spec.mask_function

    def by_corner(q, k):
        q0, k0 = q - q % 32, k - k % 32
        corners = [sees(q0 + i, k0 + j) for i in (0, 31) for j in (0, 31)]
        some, every = (functools.reduce(merge, corners) for merge in (operator.or_, operator.and_))
        return every | (some & sees(q, k))

    return standard(problem, mask_function=masks.Where(by_corner))


def score_function(change, **others):
    """``change(function, score, batch, head, query, key)`` in place of the problem's function."""
    return lambda problem: standard(
        problem, score_function=functools.partial(change, problem.spec.score_function), **others
    )


def score_after_the_bias(problem):
    """The function of the score with the bias, in place of the function of the score."""
    spec = problem.spec
    G, f, cap = spec.group_size, spec.score_function, spec.logits_soft_cap

    def run(q, k, v, terms):
        k, v = (jnp.repeat(x, G, axis=2) for x in (k, v))
        logits = cap * jnp.tanh(jnp.einsum("btnh,bsnh->bnts", q, k) * spec.softmax_scale / cap) + terms.bias
        at = (jnp.arange(x).reshape([-1 if i == axis else 1 for i in range(4)]) for axis, x in enumerate(logits.shape))
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(f(logits, *at), axis=-1), v)

    return run


def log_sum_exp_of_the_keys_alone(problem):
    right, bare = standard(problem), standard(problem, has_sinks=False)
    return lambda q, k, v, terms: (right(q, k, v, terms)[0], bare(q, k, v)[1])


def values_in_the_last_numbers(problem):
    """The values are the last numbers of the keys."""
    attend = standard(problem, values_in_keys=False)
    return lambda q, k, _: attend(q, k, k[..., -problem.spec.value_head_dim :])


def gradient_of_the_values_dropped(problem):
    """dk is that of the scores alone."""
    attend = standard(problem, values_in_keys=False)
    return lambda q, k, _: attend(q, k, jax.lax.stop_gradient(k[..., : problem.spec.value_head_dim]))


def cache_changed(layout=lambda _: {}, terms=lambda _: {}, **changes):
    """The standard backend on a cache whose layout or scales are others."""

    def wrong(problem):
        spec = dataclasses.replace(problem.spec, **changes)
        changed = dataclasses.replace(problem.layout, **layout(problem.layout))
        made = dataclasses.replace(STANDARD.plan(spec, changed, target=Target.here()), spec=spec)
        return lambda q, k, v, given: made.run(q, k, v, terms=dataclasses.replace(given, **terms(given)))[0]

    return wrong


WRONG = {
    "causal mask missing": (changed(is_causal=False), "causal"),
    "window off by one": (window(lambda left, right: (left + 1, right)), "window-asymmetric"),
    "window off by one in 1300": (window(lambda left, right: (left + 1, right)), "window-1300"),
    "window sides swapped": (window(lambda left, right: (right, left)), "window-asymmetric"),
    "padding matches padding": (padding_matches_padding, "padding-both-ends"),
    "rows without keys averaged": (rows_without_keys_averaged, "padding-both-ends"),
    "rows without keys averaged, lengths": (rows_without_keys_averaged, "ragged"),
    "unseen rows leak gradients": (unseen_rows_leak_gradients, "ragged"),
    "scale missing": (changed(scale=1.0), "causal"),
    "heads interleaved": (heads_interleaved, "gqa-4"),
    "soft cap ignored": (changed(logits_soft_cap=None), "soft-cap"),
    "positions ignored": (positions_ignored, "positions-reversed"),
    "positions ignored in decoding": (positions_ignored, "decode-1"),
    "lengths ignored": (without("key_value_seq_lengths", has_seq_lengths=False), "ragged"),
    "segments ignored": (without("query_segment_ids", "key_value_segment_ids", has_segment_ids=False), "segments"),
    "chunks ignored": (changed(chunk_size=None), "chunk-causal"),
    "group not summed": (group_not_summed, "gqa-4"),
    "softmax in bfloat16 for float32": (softmax_in_bfloat16, "causal"),
    "softmax in bfloat16 for bfloat16": (softmax_in_bfloat16, "window-bfloat16"),
    "softmax in bfloat16 for float16": (softmax_in_bfloat16, "causal-float16"),
    "dq off by 1%": (one_gradient_off((1.01, 1.0, 1.0)), "causal"),
    "dk off by 1%": (one_gradient_off((1.0, 0.99, 1.0)), "gqa-4"),
    "dv off by 1%": (one_gradient_off((1.0, 1.0, 1.01)), "segments"),
    "dq off by 2% in bfloat16": (one_gradient_off((1.02, 1.0, 1.0)), "cross-bfloat16"),
    "dk off by 2% in float16": (one_gradient_off((1.0, 1.02, 1.0)), "cross-float16"),
    "bias ignored": (term("bias", lambda _, x: 0 * x), "bias-per-head"),
    "dbias off by 1%": (term_gradient("bias", lambda x: 1.01 * x), "bias-per-head"),
    "dbias off by 1%, with a mask": (term_gradient("bias", lambda x: 0.99 * x), "mask-and-bias"),
    "dbias off by 2% in bfloat16": (term_gradient("bias", lambda x: 1.02 * x), "bias-bfloat16"),
    "dbias not finite where the bias is not": (
        term_gradient("bias", lambda x: jnp.where(x == 0, jnp.nan, x)),
        "bias-of-minus-infinity",
    ),
    "dbias not summed over rows": (term("bias", gradient_of_the_first_row), "bias-broadcast"),
    "dbias of a log-sum-exp off by 1%": (term_gradient("bias", lambda x: 1.01 * x), "log-sum-exp-and-bias"),
    "sinks ignored": (term("sinks", lambda _, x: x - 1e4), "sinks"),
    "sink of another head": (term("sinks", lambda _, x: jnp.roll(x, 1)), "sinks"),
    "sink added by each of two devices": (term("sinks", lambda _, x: x + np.log(2)), "sinks"),
    "sinks scaled": (term("sinks", lambda spec, x: x * spec.softmax_scale), "sinks-of-nothing"),
    "sinks capped": (
        term("sinks", lambda spec, x: spec.logits_soft_cap * jnp.tanh(x / spec.logits_soft_cap)),
        "sinks-of-nothing",
    ),
    "dsinks off by 1%": (term_gradient("sinks", lambda x: 1.01 * x), "sinks"),
    "mask function ignored": (mask_function(lambda _: None), "function-dilated"),
    "mask function transposed": (mask_function(lambda sees: masks.Where(lambda q, k: sees(k, q))), "function-prefix"),
    "mask function of slots": (positions_ignored, "function-positions"),
    "blocks judged by their corners": (blocks_by_corners, "function-dilated"),
    "score function ignored": (score_function(lambda _, score, *__: score), "score"),
    "score function of KV heads": (score_function(lambda f, score, b, n, q, k: f(score, b, n // 4, q, k)), "score"),
    "score function of the first batch entry": (score_function(lambda f, s, b, n, q, k: f(s, 0 * b, n, q, k)), "score"),
    "score function of keys by queries": (score_function(lambda f, s, b, n, q, k: f(s, b, n, k, q + 1)), "score"),
    "score function of slots": (positions_ignored, "score-soft-cap"),
    "score function without its derivative": (
        score_function(lambda f, score, *at: score + jax.lax.stop_gradient(f(score, *at) - score)),
        "score",
    ),
    "score function before the soft cap": (
        score_function(lambda f, score, *at: 3.0 * jnp.tanh(f(score, *at) / 3.0), logits_soft_cap=None),
        "score-soft-cap",
    ),
    "score function after the bias": (score_after_the_bias, "bias-and-score"),
    "alibi ignored": (term("alibi", lambda _, x: 0 * x), "alibi"),
    "alibi added": (term("alibi", lambda _, x: -x), "alibi"),
    "slopes of other heads": (term("alibi", lambda _, x: x[::-1]), "alibi"),
    "alibi by slot": (positions_ignored, "alibi-soft-cap"),
    "dalibi off by 1%": (term_gradient("alibi", lambda x: 1.01 * x), "alibi"),
    "values in the last numbers of the keys": (values_in_the_last_numbers, "values-in-keys"),
    "dk without the part of the values": (gradient_of_the_values_dropped, "values-in-keys"),
    "log-sum-exp without the sink": (log_sum_exp_of_the_keys_alone, "sinks-log-sum-exp"),
    "log-sum-exp off by 1e-4": (log_sum_exp(lambda x: x + 1e-4), "log-sum-exp"),
    "log-sum-exp rounded to bfloat16": (
        log_sum_exp(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32)),
        "log-sum-exp-bfloat16",
    ),
    "log-sum-exp of all keys": (log_sum_exp_of(is_causal=False), "log-sum-exp"),
    "log-sum-exp before the soft cap": (log_sum_exp_of(logits_soft_cap=None), "log-sum-exp-soft-cap"),
    "log-sum-exp of nothing finite": (
        log_sum_exp(lambda x: jnp.where(jnp.isneginf(x), np.finfo(np.float32).min, x)),
        "log-sum-exp-of-nothing",
    ),
    "log-sum-exp with its gradient off by 1%": (
        log_sum_exp(lambda x: with_gradient(x, lambda cotangent: 1.01 * cotangent)),
        "log-sum-exp",
    ),
    "page table off by one": (cache_changed(lambda x: {"page_table": x.page_table - 1}), "pages-ragged"),
    "page table of the next sequence": (
        cache_changed(lambda x: {"page_table": jnp.roll(x.page_table, 1, axis=0)}),
        "pages-decode",
    ),
    "pages in the order of the pool": (
        cache_changed(lambda x: {"page_table": jnp.arange(x.page_table.size).reshape(x.page_table.shape)}),
        "pages",
    ),
    "slots behind the length in the last page seen": (
        cache_changed(lambda x: {"key_value_seq_lengths": -(-x.key_value_seq_lengths // 16) * 16}, is_causal=False),
        "pages-decode",
    ),
    "stale pages seen": (
        cache_changed(lambda _: {"key_value_seq_lengths": None}, is_causal=False, has_seq_lengths=False),
        "pages-decode",
    ),
    "sequences of a ragged batch mixed": (
        cache_changed(lambda x: {"query_segment_ids": (x.query_segment_ids + 1) % 4}),
        "pages-ragged",
    ),
    "scales of another head": (cache_changed(terms=lambda x: {"key_scales": x.key_scales[..., ::-1]}), "kv-int8"),
    "scales of another page": (
        cache_changed(terms=lambda x: {"value_scales": jnp.roll(x.value_scales, 1, axis=0)}),
        "pages-float8",
    ),
    "scales of keys for values": (cache_changed(terms=lambda x: {"value_scales": x.key_scales}), "kv-int8"),
    "scales off by 1%": (cache_changed(terms=lambda x: {"value_scales": 1.01 * x.value_scales}), "kv-int8"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_implementation_fails(name):
    wrong, case = WRONG[name]
    problem = problems.problem(case)
    results = problems.compiled(wrong(problem), problem)(*problem.inputs)
    with pytest.raises(AssertionError, match="passed=False"):
        checks.check_accuracy(results, problem)


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_nondeterministic_wider_or_nan_result_fails(quantity):
    plain, half = problems.problem("causal"), problems.problem("causal-bfloat16")
    results, widened = ({name: np.array(x) for name, x in of.standard_run(*of.inputs).items()} for of in (plain, half))
    again = {**results, quantity: np.nextafter(results[quantity], np.float32(0.0))}
    with pytest.raises(AssertionError, match=quantity):
        checks.check_same(results, again)
    widened[quantity] = widened[quantity].astype(np.float32)
    results[quantity][-1, -1, -1, -1] = np.nan
    for found, problem in ((widened, half), (results, plain)):
        with pytest.raises(AssertionError, match=f"{quantity}: .*passed=False"):
            checks.check_accuracy(found, problem)


def test_padding_that_leaks_by_zero_weights_times_values_fails():
    """A mask that only subtracts a large number lets huge padded keys through."""
    problem = problems.problem("padding-both-ends")
    mask = may_attend(problem.spec, problem.layout)

    def attend(q, k, v):
        k, v = (jnp.repeat(x, problem.spec.group_size, axis=2) for x in (k, v))
        logits = jnp.einsum("btnh,bsnh->bnts", q, k) * problem.spec.softmax_scale - jnp.where(mask, 0.0, 1e6)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits, axis=-1), v)

    with pytest.raises(AssertionError):
        checks.check_unseen_does_not_matter(problems.forward_and_backward(attend), problem, rows=False)


def test_gradients_that_leak_from_rows_that_see_nothing_fail():
    problem = problems.problem("padding-both-ends")
    run = problems.forward_and_backward(unseen_rows_leak_gradients(problem))
    with pytest.raises(AssertionError):
        checks.check_unseen_does_not_matter(run, problem, keys=False)


@pytest.mark.parametrize("case", ["ragged", "padding-both-ends"])
def test_backend_that_lets_nan_of_an_unseen_key_through_fails(case):
    problem = problems.problem(case)
    run = problems.forward_and_backward(functools.partial(masked_by_the_formula, problem))
    # Right in everything else: its results, and huge numbers where nobody looks.
    results = run(*problem.inputs)
    checks.check_accuracy(results, problem)
    checks.check_unseen_does_not_matter(run, problem, results, rows=False, finite=True)
    with pytest.raises(AssertionError, match="location mismatch"):
        checks.check_unseen_does_not_matter(run, problem, results, rows=False)
    assert checks.keeps_nan_out(run, problem, results) is False
    own = checks.compiled(STANDARD, problem, Target.here())
    assert checks.keeps_nan_out(own, problem, own(*problem.inputs)) is True


def masked_by_the_formula(problem, q, k, v):
    """Hidden pairs have a probability of exactly zero, which times NaN is NaN; rows that see nothing are zero."""
    mask = may_attend(problem.spec, problem.layout)
    k, v = (jnp.repeat(x, problem.spec.group_size, axis=2) for x in (k, v))
    logits = jnp.einsum("btnh,bsnh->bnts", q, k) * problem.spec.softmax_scale
    probs = jax.nn.softmax(jnp.where(mask, logits, -1e30), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", jnp.where(mask, probs, 0.0), v)


@pytest.mark.parametrize(
    ("reasons", "refused"),
    [((), True), (("The head dimension 33 is not taken by this backend.",), False), (("no",), True)],
    ids=["unexpected acceptance", "unexpected refusal", "refusal without a sentence"],
)
def test_undeclared_support_fails(reasons, refused):
    spec = AttentionSpec(batch=1, query_length=1, key_value_length=1, num_heads=1, num_kv_heads=1, head_dim=33)
    with pytest.raises(AssertionError):
        checks.check_support(Asked(answer=lambda *_: reasons), spec, Target("cpu"), "native", refused=refused)
