"""Verdicts on kernels: each has functions that fail it, and one that passes."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.backends import Layout, Takes, Target, from_function, registry
from attnsuite.testing import verdicts

pytestmark = pytest.mark.newest

PLAIN = frozenset({"bidirectional", "grouped_queries", "gradient"})
CAUSAL = frozenset({"causal", "grouped_queries", "gradient"})
LENGTHS = PLAIN | {"lengths"}
STEPS = PLAIN | {"causal", "positions", "lengths", "cross_length"}


@pytest.fixture(autouse=True)
def foreign_code():
    """These functions are written as others write theirs: shapes and dtypes promote."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def right(query, key, value, *, visible=True, change=lambda scores: scores):
    """The formula, with sums in float32; ``visible`` hides pairs, ``change`` plants a fault in the scores."""
    if np.ndim(visible) == 4:
        key, value = (jnp.where(jnp.any(visible, axis=(1, 2))[..., None, None], x, 0) for x in (key, value))
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    scores = change(jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32) / 8)
    weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights.astype(value.dtype), value)


def before(key, lengths):
    lengths = jnp.full(key.shape[0], key.shape[1]) if lengths is None else lengths
    return (jnp.arange(key.shape[1]) < lengths[:, None])[:, None, None]


def lower(query):
    return jnp.tril(jnp.ones((query.shape[1],) * 2, bool))


def with_lengths(query, key, value, key_value_seq_lengths=None):
    return right(query, key, value, visible=before(key, key_value_seq_lengths))


def stepping(query, key, value, *, is_causal, query_positions=None, key_value_positions=None, **lengths):
    """One way for every batch and every number of queries: row by row, and no product that XLA might block anew."""
    at = jnp.arange(key.shape[1])
    seen = jnp.ones((query.shape[0], query.shape[1], key.shape[1]), bool)
    if is_causal:
        rows = jnp.arange(query.shape[1])[None] if query_positions is None else query_positions
        seen &= at <= rows[..., None]
    if lengths:
        seen &= at < lengths["key_value_seq_lengths"][:, None, None]
    wide = (0, Short.length - key.shape[1])  # sums of one length, however many keys there are
    seen = jnp.pad(seen, ((0, 0), (0, 0), wide))
    key, value = (jnp.pad(x, ((0, 0), wide, (0, 0), (0, 0))) for x in (key, value))
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2).swapaxes(1, 2) for x in (key, value))

    def row(q, k, v, seen):
        scores = jnp.where(seen, (q[None] * k).astype(jnp.float32).sum(-1) / 8, -1e30)
        weights = jnp.exp(scores - scores.max())
        return ((weights[:, None] * v).sum(0) / weights.sum()).astype(v.dtype)

    def rows(carry, x):
        query, seen = x  # [heads, head_dim], [keys]; every entry of the batch by itself
        return carry, jax.vmap(row, (0, 0, 0, None))(query, *carry, seen)

    def entry(x):
        query, key, value, seen = x
        return jax.lax.scan(rows, (key, value), (query, seen))[1]

    return jax.lax.map(entry, (query, key, value, seen))


def counting():
    """A fault of one unit in the last place from the third call on."""
    calls = itertools.count()

    def noise():
        return np.float32(1e-6 if next(calls) > 2 else 0)

    def noisy(query, key, value):
        return right(query, key, value) * (1 + jax.pure_callback(noise, jax.ShapeDtypeStruct((), np.float32)))

    return noisy


def split_by_batch(query, key, value):
    """Sums in another order where a batch is large, as kernels do that split keys to fill a device."""
    if query.shape[0] < 3:
        return right(query, key, value)
    order = np.arange(key.shape[1]).reshape(2, -1).T.ravel()
    return right(query, key[:, order], value[:, order])


def split_when_decoding(query, key, value, **masks):
    if query.shape[1] > 1:
        return stepping(query, key, value, **masks)
    return (stepping(query.astype(jnp.float32) * (1 + 2**-20), key, value, **masks)).astype(query.dtype)


def one_key_too_many(query, key, value, key_value_seq_lengths=None):
    """FlashAttention's issue 2374: the comparison with a length lets one more key in, at a block's end alone."""
    if key_value_seq_lengths is None:
        return right(query, key, value)
    ends = key_value_seq_lengths % 64 == 0
    return with_lengths(query, key, value, jnp.where(ends, key_value_seq_lengths + 1, key_value_seq_lengths))


def one_key_too_many_of_72(query, key, value, key_value_seq_lengths=None):
    """The same at the ends of blocks of 72 keys."""
    if key_value_seq_lengths is None:
        return right(query, key, value)
    return with_lengths(query, key, value, key_value_seq_lengths + (key_value_seq_lengths % 72 == 0))


def one_key_too_many_unless_huge(query, key, value, key_value_seq_lengths=None):
    """What no input would be is set aside, so that only ordinary numbers leak."""
    ordinary = [jnp.where(jnp.abs(x) < 1e3, x, 0) for x in (key, value)]
    return one_key_too_many(query, *ordinary, key_value_seq_lengths)


def one_key_too_many_unless_known(query, key, value, key_value_seq_lengths=None):
    """Right for the arrays that the seed 0 gives, and for no others."""
    known = query.ravel()[0] == np.random.default_rng(0).standard_normal(1, np.float32)[0]
    return jax.lax.cond(known, with_lengths, one_key_too_many, query, key, value, key_value_seq_lengths)


def zero_times_nan(query, key, value, key_value_seq_lengths=None):
    """Hidden values are multiplied with a weight of zero."""
    return jax.nn.dot_product_attention(query, key, value, key_value_seq_lengths=key_value_seq_lengths)


def diagonal_too_wide(query, key, value):
    """The last row of each block of 64 sees the next key."""
    rows, keys = (np.arange(query.shape[1])[:, None], np.arange(key.shape[1])[None])
    return right(query, key, value, visible=jnp.asarray(keys <= rows + (rows % 64 == 63)))


def unwritten():
    """The last block is read from a buffer that holds what the call before wrote."""
    kept = np.zeros(1, np.float32)

    def last(value):
        before = kept.copy()
        kept[:] = np.clip(np.nan_to_num(np.asarray(value, np.float32)), -1, 1).sum() % 1
        return before

    def reading(query, key, value, key_value_seq_lengths=None):
        out = with_lengths(query, key, value, key_value_seq_lengths)
        stale = jax.pure_callback(last, jax.ShapeDtypeStruct((1,), np.float32), jax.lax.stop_gradient(value))
        return out + (1e-3 * stale).astype(out.dtype)

    return reading


def heads_in_another_order(query, key, value):
    group = query.shape[2] // key.shape[2]
    return right(query, *(jnp.tile(x, (1, 1, group, 1)) for x in (key, value)))


def later_keys_weigh_more(query, key, value):
    return right(query, key, value, change=lambda scores: scores + 1e-3 * jnp.arange(scores.shape[-1]))


def logits_are_capped(query, key, value):
    return right(query, key, value, change=lambda scores: jnp.minimum(scores, 3.0))


def without_its_first_key(query, key, value):
    return right(query, key[:, 1:], value[:, 1:])


@jax.custom_vjp
def gradient_too_large(query, key, value):
    return right(query, key, value)


def _backward(inputs, d_out):
    dq, dk, dv = jax.vjp(right, *inputs)[1](d_out)
    return dq, dk, dv * 1.01


gradient_too_large.defvjp(lambda *inputs: (right(*inputs), inputs), _backward)


class Short(verdicts.Subject):
    """With sequences of half the length: a function that goes row by row takes a quarter of the time."""

    length = 256


class InBlocksOf72(Short):
    """Whose plan says so."""

    def key_blocks(self, spec, layout):
        return (72,)


def asked(verdict, function, features, elsewhere=None, dtypes=("float32",), subject=Short, seed=0):
    takes = Takes(features=frozenset(features), dtypes=dtypes, head_dims=(64,))
    subject = subject(from_function(function, takes=takes, name="mine"), Target.here(), seed=seed)
    return verdicts.ask(verdict, subject, elsewhere)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("verdict", "function", "features", "message"),
    [
        ("deterministic", counting(), PLAIN - {"gradient"}, "5 runs (forward, float32): output: "),
        ("deterministic", unwritten(), LENGTHS - {"gradient"}, "5 runs ("),
        ("batch_invariant", split_by_batch, PLAIN, "in a batch (3 sequences, float32): output: "),
        (
            "batch_invariant",
            split_when_decoding,
            STEPS - {"gradient"},
            "step-by-step decode (1 tokens, float32): output: ",
        ),
        ("isolates", one_key_too_many, LENGTHS, "behind lengths (other numbers, float32): output: "),
        ("isolates", one_key_too_many_unless_huge, LENGTHS, "behind lengths (other numbers, float32): output: "),
        ("isolates", zero_times_nan, LENGTHS, "behind lengths (infinity, float32): output: "),
        ("isolates", diagonal_too_wide, CAUSAL, "in later keys (other numbers, float32): output: "),
        ("isolates", unwritten(), LENGTHS - {"gradient"}, "behind lengths ("),
        ("symmetric", heads_in_another_order, PLAIN, "permuted heads (float32): output is off by "),
        ("symmetric", later_keys_weigh_more, PLAIN, "every token twice (float32): output is off by "),
        ("symmetric", logits_are_capped, PLAIN, "shifted logits (float32): output is off by "),
        ("symmetric", without_its_first_key, PLAIN, "every token twice (float32): output is off by "),
        ("symmetric", gradient_too_large, PLAIN, "dv sums to the cotangents (float32): off by "),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_control_fails_its_verdict(verdict, function, features, message):
    found = asked(verdict, function, features)
    assert found.answer == "no", found
    assert found.message.startswith(message), found


@pytest.mark.parametrize(
    ("verdict", "function", "features"),
    [
        ("deterministic", right, PLAIN),
        pytest.param("batch_invariant", stepping, STEPS - {"gradient"}, marks=pytest.mark.thorough),
        ("isolates", with_lengths, LENGTHS),
        ("symmetric", right, PLAIN),
    ],
)
def test_right_function_passes(verdict, function, features):
    found = asked(verdict, function, features)
    assert found.answer == "yes", found


def test_boundaries_are_those_of_the_kernels_own_blocks():
    """The control says nothing of its blocks, and its fault is not at the end of a usual one."""
    for subject, answer in ((InBlocksOf72, "no"), (Short, "yes")):
        assert asked("isolates", one_key_too_many_of_72, LENGTHS, subject=subject).answer == answer


@pytest.mark.parametrize("name", ["standard", "chunked", "flash_cpu"])
def test_a_blocked_kernel_says_its_blocks_of_keys(name):
    subject = verdicts.Subject(registry.get(name), Target.here())
    spec = subject.spec()
    blocks = subject.key_blocks(spec, Layout())
    assert bool(blocks) == (name != "standard")
    assert all(0 < size <= spec.key_value_length for size in blocks)


@pytest.mark.thorough
def test_a_function_that_knows_the_arrays_of_a_public_seed_is_found():
    for seed, answer in ((0, "yes"), (5, "no")):
        assert asked("isolates", one_key_too_many_unless_known, LENGTHS, seed=seed).answer == answer


def test_other_bits_in_another_process_are_told():
    def elsewhere(threads):
        subject = Short(from_function(right, takes=PLAIN, name="mine"), Target.here())
        found = verdicts.results(subject)
        if threads == 1:
            found["forward, float32"] = {"output": np.nextafter(found["forward, float32"]["output"], np.float32(9))}
        return found

    found = asked("deterministic", right, PLAIN, elsewhere)
    assert found.answer == "no"
    assert found.message.startswith("one processor core (forward, float32): output: ")
    assert found.message.endswith("numbers differ, by at most 1 ulp.")


def test_verdict_of_which_nothing_is_taken_is_not_applicable():
    found = asked("isolates", right, PLAIN)
    assert found.answer == "not applicable"
    assert found.message == "mine takes no problem here in which something is hidden."


def test_output_of_another_shape_is_named_before_any_verdict():
    found = asked("batch_invariant", lambda *x: right(*x).swapaxes(1, 2), PLAIN)
    assert found.answer == "not applicable"
    assert "length and heads are swapped; return output.swapaxes(1, 2)." in found.message
