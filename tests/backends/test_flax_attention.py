"""Layers of flax, nnx and linen, give with attention_fn what they give with flax's own function, or refuse."""

import inspect
import itertools
import pickle
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax

from attnsuite import backends
from attnsuite.backends import attention_fn, flax_attention
from drawn import draw
from landing import swept

# Flax promotes dtypes and ranks.
pytestmark = pytest.mark.foreign_numerics

BACKENDS = ("standard", "auto")
BOTH_PRECISIONS = (lax.Precision.HIGH, lax.Precision.DEFAULT)
Layer = Callable[..., jax.Array]  # of the call's arguments; the same parameters for every attention_fn


def nnx_layer(**options):
    return nnx.MultiHeadAttention(
        **{"num_heads": 4, "in_features": 32, "decode": False, "rngs": nnx.Rngs(0), **options}
    )


def linen_layer(**options):
    layer = linen.MultiHeadDotProductAttention(num_heads=4, **options)
    # Parameters do not depend on attention_fn; initialised without it, since initialising runs the layer.
    parameters = linen.MultiHeadDotProductAttention(num_heads=4).init(jax.random.key(0), draw(2, 12, 32))
    return lambda *args, **kwargs: layer.apply(parameters, *args, **kwargs)


LAYERS = {"nnx": nnx_layer, "linen": linen_layer}
either = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


def padding_mask():
    return nnx.make_attention_mask(jnp.ones((2, 12), bool), jnp.arange(12)[None] < jnp.array([[12], [7]]))


MASKS = {
    "no mask": lambda: None,
    "causal mask": lambda: nnx.make_causal_mask(jnp.ones((2, 12))),
    "padding mask": padding_mask,
    "both masks": lambda: nnx.combine_masks(padding_mask(), nnx.make_causal_mask(jnp.ones((2, 12)))),
}


def alike(make, *operands, backend="standard", of_layer=(), of_function=(), theirs=None, atol=2e-6, **call):
    """What a layer gives with attention_fn, which has to be what it gives without, called with ``theirs``.

    Compiled together: uncompiled, each of their steps is a program of its own for every shape.
    """
    of_layer = dict(of_layer)
    ours, plain = make(attention_fn=attention_fn(backend, **dict(of_function)), **of_layer), make(**of_layer)
    both = jax.jit(lambda *x: (ours(*x, **call), plain(*x, **(call if theirs is None else theirs))))
    found, wanted = both(*operands)
    assert found.dtype == wanted.dtype
    np.testing.assert_allclose(found.astype(jnp.float32), wanted.astype(jnp.float32), atol=atol)
    return found


@either
@pytest.mark.parametrize(
    ("backend", "mask"),
    swept(itertools.product(BACKENDS, MASKS), (("standard", "both masks"), ("auto", "no mask"))),
)
def test_layer_gives_what_it_gives_by_default(make, backend, mask):
    alike(make, draw(2, 12, 32), backend=backend, mask=MASKS[mask]())


@either
def test_layer_with_options_gives_what_it_gives_by_default(make):
    x, causal = draw(2, 12, 32), {"mask": MASKS["causal mask"]()}
    alike(make, x, of_layer={"dropout_rate": 0.5}, deterministic=True)
    alike(make, x, backend="chunked", of_function={"is_causal": True}, theirs=causal)


@pytest.mark.parametrize("force", swept([False, True], [True]))
def test_softmax_of_a_linen_layer_is_float32(force):
    options, x = {"dtype": jnp.bfloat16, "force_fp32_for_softmax": force}, draw(2, 12, 32)
    found = alike(linen_layer, x, of_layer=options, atol=6e-2)
    np.testing.assert_array_equal(found, alike(linen_layer, x, of_layer={"dtype": jnp.bfloat16}, atol=6e-2))


@pytest.mark.parametrize("function", [nnx.dot_product_attention, linen.dot_product_attention])
def test_every_keyword_of_flax_is_named(function):
    """Linen drops a keyword that a signature does not name; a later flax may bring one."""
    named = inspect.signature(attention_fn()).parameters
    assert list(inspect.signature(function).parameters)[:12] == list(named)[:12]  # by position too
    assert set(inspect.signature(function).parameters) <= set(named)


@pytest.mark.parametrize(
    ("kv_length", "backend"), swept(itertools.product([12, 7, 15], BACKENDS), [(7, "standard"), (15, "auto")])
)
def test_causal_keyword_of_nnx_is_causal(backend, kv_length):
    x, other = draw(2, 12, 32), draw(2, kv_length, 32, seed=1)
    found = alike(nnx_layer, x, other, backend=backend, is_causal=True)
    assert np.abs(found - nnx_layer()(x, other)).max() > 1e-2


def test_layer_trains_through_attention_fn():
    gradients = nnx.grad(lambda m: m(draw(2, 12, 32)).sum())(nnx_layer(attention_fn=attention_fn("chunked")))
    assert all(np.abs(x).max() > 0 for name, x in nnx.to_flat_state(gradients) if name[-1] == "kernel")


@pytest.mark.parametrize("num_kv_heads", swept([1, 2], [2]))
def test_grouped_heads_of_nnx(num_kv_heads):
    alike(nnx_layer, draw(2, 12, 32), backend="auto", of_layer={"num_kv_heads": num_kv_heads}, is_causal=True)


@either
@pytest.mark.parametrize("dtype", swept([jnp.bfloat16, jnp.float16, jnp.float32], [jnp.bfloat16]))
def test_layer_of_another_dtype(make, dtype):
    assert alike(make, draw(2, 12, 32), of_layer={"dtype": dtype}, atol=8 * float(jnp.finfo(dtype).eps)).dtype == dtype


def test_mixed_dtypes_are_promoted_as_in_flax():
    query, key, value = draw(1, 4, 2, 8).astype(jnp.bfloat16), draw(1, 4, 2, 8, seed=1), draw(1, 4, 2, 8, seed=2)
    for dtype in (None, jnp.bfloat16):
        ours = attention_fn("standard")(query, key, value, dtype=dtype)
        theirs = nnx.dot_product_attention(query, key, value, dtype=dtype)
        assert ours.dtype == theirs.dtype == (jnp.bfloat16 if dtype else jnp.float32)
        np.testing.assert_allclose(ours.astype(jnp.float32), theirs.astype(jnp.float32), atol=2e-2 if dtype else 2e-6)


def test_promotion_of_the_callers_own_is_used():
    def halve(arrays, dtype):
        assert dtype is jnp.float32
        return tuple(x.astype(jnp.float16) for x in arrays)

    x = draw(1, 4, 2, 8)
    assert attention_fn("standard")(x, x, x, dtype=jnp.float32, promote_dtype=halve).dtype == jnp.float16


@pytest.mark.parametrize(
    ("lead", "make"), swept(itertools.product([(), (2, 3), (2, 1, 3)], LAYERS), [((), "nnx"), ((2, 3), "linen")])
)
def test_any_number_of_batch_axes(make, lead):
    masks = [None, draw(*lead, 4, 12, 12) > -0.5]
    if len(lead) > 1:
        masks.append(draw(1, *lead[1:], 1, 12, 12) > -0.5)
    for mask in masks:
        # flax's nnx folds the batch axes of a mask without broadcasting them first; it gets the full mask.
        full = None if mask is None else jnp.broadcast_to(mask, (*lead, 4, 12, 12))
        alike(LAYERS[make], draw(*lead, 12, 32), mask=mask, theirs={"mask": full})


def test_mask_that_broadcasts_over_every_batch_axis():
    query, mask = draw(2, 3, 12, 4, 8), draw(12, 12) > -0.5
    ours = attention_fn("standard")(query, query, query, mask=mask)
    full = jnp.broadcast_to(mask, (2, 3, 4, 12, 12))
    np.testing.assert_allclose(ours, nnx.dot_product_attention(query, query, query, mask=full), atol=2e-6)


@pytest.mark.parametrize(
    ("arrays", "keywords", "message"),
    [
        ([(2, 3, 4, 2, 8), (3, 2, 4, 2, 8), (3, 2, 4, 2, 8)], {}, "batch dims must match"),  # 6 sequences each
        ([(2, 4, 2, 8), (4, 2, 8), (4, 2, 8)], {}, "expected the same rank"),
        ([(4, 8), (4, 8), (4, 8)], {}, "expected the same rank"),
        ([(4, 2, 8), (5, 2, 8), (6, 2, 8)], {}, "key and value lengths must match"),
        ([(4, 2, 8), (4, 2, 6), (4, 2, 8)], {}, "query and key depths must match"),
        (
            [(4, 2, 8)] * 3,
            {"mask": jnp.ones((1, 2, 4, 4), bool)},
            r"mask has shape \(1, 2, 4, 4\); expected at most 3 dimensions",
        ),
        ([(1, 4, 2, 8)] * 3, {"input_positions": jnp.arange(4)}, "does not take input_positions"),
        ([(1, 4, 2, 8)] * 3, {"einsum_dot_general": jnp.arange(4)}, "does not take einsum_dot_general"),
        ([(1, 4, 2, 8)] * 3, {"temperature": 2.0}, "does not know the keyword temperature"),
    ],
)
def test_what_does_not_fit_or_means_something_else_is_refused(arrays, keywords, message):
    with pytest.raises(ValueError, match=message):
        attention_fn("standard")(*(draw(*shape) for shape in arrays), **keywords)


NNX_DROPOUT = {"deterministic": False, "rngs": nnx.Rngs(0)}
LINEN_DROPOUT = {"deterministic": False, "rngs": {"dropout": jax.random.key(0)}}
EINSUMS = ("qk_attn_weights_einsum", "attn_weights_value_einsum")


@pytest.mark.parametrize(
    ("make", "options", "call", "message"),
    [
        (nnx_layer, {"dropout_rate": 0.5}, NNX_DROPOUT, r"no dropout on attention weights \(dropout_rate=0.5\)"),
        (linen_layer, {"dropout_rate": 0.5}, LINEN_DROPOUT, r"no dropout on attention weights \(dropout_rate=0.5\)"),
        *((make, {}, {"sow_weights": True}, "not take module: .* leave sow_weights at") for make in LAYERS.values()),
        (nnx_layer, {"precision": lax.DotAlgorithmPreset.F32_F32_F32}, {}, "does not take precision="),
        *((linen_layer, {f"{x}_cls": lambda: jnp.einsum}, {}, f"{x}: .* leave {x}_cls at None") for x in EINSUMS),
    ],
)
def test_what_a_layer_asks_beyond_attention_is_refused(make, options, call, message):
    layer = make(attention_fn=attention_fn("standard"), **options)
    with pytest.raises(ValueError, match=message):
        layer(draw(2, 12, 32), **call)


def test_function_of_a_config_is_pickled():
    x = draw(1, 4, 2, 8)
    function = attention_fn("standard", local_window_size=1)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(function))(x, x, x), function(x, x, x))  # noqa: S301 (our own)


@pytest.mark.parametrize("name", ["is_casual", "mask", "query", "kv_layout", "return_log_sum_exp"])
def test_unknown_option_is_refused_before_any_call(name):
    words = (
        "does not take return_log_sum_exp: a flax layer" if name == "return_log_sum_exp" else f"has no option {name}"
    )
    with pytest.raises(ValueError, match=f"attention_fn {words}"):
        attention_fn("standard", **{name: True})


@either
@pytest.mark.parametrize(
    "precision", swept([None, "default", lax.Precision.HIGHEST, BOTH_PRECISIONS], [None, BOTH_PRECISIONS])
)
def test_precision_is_taken_where_it_is_had(make, precision, monkeypatch):
    x = draw(2, 12, 32)
    alike(make, x, of_layer={"precision": precision})
    layer = make(precision=precision, attention_fn=attention_fn("standard"))
    monkeypatch.setattr(flax_attention.Target, "here", lambda: backends.Target("cuda", "h100"))
    half = draw(1, 4, 2, 8).astype(jnp.bfloat16)
    flax_attention._check_precision(precision, half.dtype)
    if precision in (None, "default"):
        flax_attention._check_precision(precision, x.dtype)
    else:
        with pytest.raises(ValueError, match=r"does not take precision=.* for float32 on cuda:h100, only DEFAULT"):
            layer(x)


def decoded_by_nnx(x, **options):
    layer = nnx_layer(**options)
    layer.init_cache(x.shape)
    return jnp.concatenate([layer(x[:, i : i + 1], decode=True) for i in range(x.shape[1])], 1)


def decoded_by_linen(x, **options):
    layer = linen.MultiHeadDotProductAttention(num_heads=4, decode=True, **options)
    cache = linen.MultiHeadDotProductAttention(num_heads=4, decode=True).init(jax.random.key(1), x)["cache"]
    parameters = linen.MultiHeadDotProductAttention(num_heads=4).init(jax.random.key(0), draw(2, 12, 32))
    steps = []
    for i in range(x.shape[1]):
        out, changed = layer.apply({**parameters, "cache": cache}, x[:, i : i + 1], mutable=["cache"])
        cache = changed["cache"]
        steps.append(out)
    return jnp.concatenate(steps, 1)


DECODED = {"nnx": decoded_by_nnx, "linen": decoded_by_linen}


@pytest.mark.parametrize("backend", swept(BACKENDS, ("standard",)))
@pytest.mark.parametrize("api", DECODED)
def test_decoding_step_by_step_gives_the_causal_pass(api, backend):
    x = draw(2, 6, 32)
    causal = LAYERS[api](attention_fn=attention_fn(backend, is_causal=True))(x)
    np.testing.assert_allclose(DECODED[api](x, attention_fn=attention_fn(backend)), causal, atol=2e-6)


@pytest.mark.parametrize("option", [{"is_causal": True}, {"local_window_size": 0}, {"chunk_size": 4}], ids=str)
@pytest.mark.parametrize("api", DECODED)
def test_mask_by_position_is_refused_while_decoding(api, option):
    with pytest.raises(ValueError, match="with 1 query and 6 keys, where flax counts the query as position 0"):
        DECODED[api](draw(2, 6, 32), attention_fn=attention_fn("standard", **option))


def test_single_query_whose_position_is_given_is_taken():
    query, keys = draw(2, 1, 4, 8), draw(2, 6, 4, 8)
    given = attention_fn("standard", is_causal=True, query_positions=jnp.full((2, 1), 3))(query, keys, keys)
    np.testing.assert_allclose(given, attention_fn("standard")(query, keys[:, :4], keys[:, :4]), atol=2e-6)
