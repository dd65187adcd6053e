"""Layers of flax, nnx and linen, give with attention_fn what they give with flax's own function, or refuse."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from typing import Any

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


def in_one_program(compute: Callable[..., Any], *operands: Any) -> Any:
    """What layers give, compiled together: uncompiled, each of their steps is a program of its own for every shape."""
    return jax.jit(compute)(*operands)


def nnx_layer(**options: Any) -> nnx.MultiHeadAttention:
    return nnx.MultiHeadAttention(
        **{"num_heads": 4, "in_features": 32, "decode": False, "rngs": nnx.Rngs(0), **options}
    )


def linen_layer(**options: Any) -> Layer:
    layer = linen.MultiHeadDotProductAttention(num_heads=4, **options)
    # Parameters do not depend on attention_fn; initialised without it, since initialising runs the layer.
    parameters = linen.MultiHeadDotProductAttention(num_heads=4).init(jax.random.key(0), draw(2, 12, 32))
    return lambda *args, **kwargs: layer.apply(parameters, *args, **kwargs)


LAYERS = {"nnx": nnx_layer, "linen": linen_layer}
either = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


def padding_mask() -> jax.Array:
    return nnx.make_attention_mask(jnp.ones((2, 12), bool), jnp.arange(12)[None] < jnp.array([[12], [7]]))


MASKS = {
    "no mask": lambda: None,
    "causal mask": lambda: nnx.make_causal_mask(jnp.ones((2, 12))),
    "padding mask": padding_mask,
    "both masks": lambda: nnx.combine_masks(padding_mask(), nnx.make_causal_mask(jnp.ones((2, 12)))),
}


@either
@pytest.mark.parametrize("mask", swept(MASKS, ("no mask", "both masks")))
@pytest.mark.parametrize("backend", BACKENDS)
def test_layer_gives_what_it_gives_by_default(make: Layer, backend: str, mask: str) -> None:
    x, mask_array = draw(2, 12, 32), MASKS[mask]()
    ours = make(attention_fn=attention_fn(backend))(x, mask=mask_array)
    np.testing.assert_allclose(ours, make()(x, mask=mask_array), atol=2e-6)


@pytest.mark.parametrize("function", [nnx.dot_product_attention, linen.dot_product_attention])
def test_every_keyword_of_flax_is_named(function: Callable[..., Any]) -> None:
    """Linen drops a keyword that a signature does not name; a later flax may bring one."""
    named = inspect.signature(attention_fn()).parameters
    assert list(inspect.signature(function).parameters)[:12] == list(named)[:12]  # by position too
    assert set(inspect.signature(function).parameters) <= set(named)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv_length", swept([12, 7, 15], [7, 15]))
def test_causal_keyword_of_nnx_is_causal(backend: str, kv_length: int) -> None:
    x, other = draw(2, 12, 32), draw(2, kv_length, 32, seed=1)
    ours, theirs = nnx_layer(attention_fn=attention_fn(backend)), nnx_layer()
    found, wanted, whole = in_one_program(
        lambda x, other: (ours(x, other, is_causal=True), theirs(x, other, is_causal=True), theirs(x, other)), x, other
    )
    np.testing.assert_allclose(found, wanted, atol=2e-6)
    assert np.abs(found - whole).max() > 1e-2


def test_causal_keyword_and_a_mask_go_together() -> None:
    x, mask = draw(2, 12, 32), padding_mask()
    ours = nnx_layer(attention_fn=attention_fn("standard"))(x, mask=mask, is_causal=True)
    np.testing.assert_allclose(ours, nnx_layer()(x, mask=MASKS["both masks"]()), atol=2e-6)


@either
def test_causal_option_gives_what_a_causal_mask_gives(make: Layer) -> None:
    x = draw(2, 12, 32)
    causal = make(attention_fn=attention_fn("chunked", is_causal=True))(x)
    np.testing.assert_allclose(causal, make()(x, mask=MASKS["causal mask"]()), atol=2e-6)


def test_layer_trains_through_attention_fn() -> None:
    gradients = nnx.grad(lambda m: m(draw(2, 12, 32)).sum())(nnx_layer(attention_fn=attention_fn("chunked")))
    assert all(np.abs(x).max() > 0 for name, x in nnx.to_flat_state(gradients) if name[-1] == "kernel")


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_grouped_heads_of_nnx(num_kv_heads: int) -> None:
    x = draw(2, 12, 32)
    ours = nnx_layer(num_kv_heads=num_kv_heads, attention_fn=attention_fn("auto"))
    theirs = nnx_layer(num_kv_heads=num_kv_heads)
    found, wanted = in_one_program(lambda x: (ours(x, is_causal=True), theirs(x, is_causal=True)), x)
    np.testing.assert_allclose(found, wanted, atol=2e-6)


@either
@pytest.mark.parametrize("dtype", swept([jnp.bfloat16, jnp.float16, jnp.float32], [jnp.bfloat16]))
def test_layer_of_another_dtype(make: Layer, dtype: Any) -> None:
    x = draw(2, 12, 32)
    ours, theirs = make(dtype=dtype, attention_fn=attention_fn("standard"))(x), make(dtype=dtype)(x)
    assert ours.dtype == theirs.dtype == dtype
    np.testing.assert_allclose(ours.astype(jnp.float32), theirs.astype(jnp.float32), atol=8 * jnp.finfo(dtype).eps)


def test_mixed_dtypes_are_promoted_as_in_flax() -> None:
    query, key, value = draw(1, 4, 2, 8).astype(jnp.bfloat16), draw(1, 4, 2, 8, seed=1), draw(1, 4, 2, 8, seed=2)
    for dtype in (None, jnp.bfloat16):
        ours = attention_fn("standard")(query, key, value, dtype=dtype)
        theirs = nnx.dot_product_attention(query, key, value, dtype=dtype)
        assert ours.dtype == theirs.dtype == (jnp.bfloat16 if dtype else jnp.float32)
        np.testing.assert_allclose(ours.astype(jnp.float32), theirs.astype(jnp.float32), atol=2e-2 if dtype else 2e-6)


def test_promotion_of_the_callers_own_is_used() -> None:
    def halve(arrays: tuple[jax.Array, ...], dtype: Any) -> tuple[jax.Array, ...]:
        assert dtype is jnp.float32
        return tuple(x.astype(jnp.float16) for x in arrays)

    x = draw(1, 4, 2, 8)
    assert attention_fn("standard")(x, x, x, dtype=jnp.float32, promote_dtype=halve).dtype == jnp.float16


@either
@pytest.mark.parametrize("lead", [(), (2, 3), pytest.param((2, 1, 3), marks=pytest.mark.thorough)])
def test_any_number_of_batch_axes(make: Layer, lead: tuple[int, ...]) -> None:
    x = draw(*lead, 12, 32)
    masks = [None, draw(*lead, 4, 12, 12) > -0.5]
    if len(lead) > 1:
        masks.append(draw(1, *lead[1:], 1, 12, 12) > -0.5)
    # flax's nnx folds the batch axes of a mask without broadcasting them first; it gets the full mask.
    full = [None if mask is None else jnp.broadcast_to(mask, (*lead, 4, 12, 12)) for mask in masks]
    ours, theirs = make(attention_fn=attention_fn("standard")), make()
    for found, wanted in in_one_program(
        lambda x, *masks: [(ours(x, mask=a), theirs(x, mask=b)) for a, b in zip(*masks, strict=True)], x, masks, full
    ):
        np.testing.assert_allclose(found, wanted, atol=2e-6)


def test_mask_that_broadcasts_over_every_batch_axis() -> None:
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
def test_what_does_not_fit_or_means_something_else_is_refused(
    arrays: list[tuple[int, ...]], keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        attention_fn("standard")(*(draw(*shape) for shape in arrays), **keywords)


@either
def test_active_dropout_is_refused(make: Layer) -> None:
    layer = make(dropout_rate=0.5, attention_fn=attention_fn("standard"))
    rng = {"rngs": nnx.Rngs(0)} if make is nnx_layer else {"rngs": {"dropout": jax.random.key(0)}}
    with pytest.raises(ValueError, match=r"no dropout on attention weights \(dropout_rate=0.5\)"):
        layer(draw(2, 12, 32), deterministic=False, **rng)
    x = draw(2, 12, 32)
    np.testing.assert_allclose(layer(x, deterministic=True), make()(x), atol=2e-6)


@either
def test_sowing_weights_is_refused(make: Layer) -> None:
    with pytest.raises(ValueError, match=r"does not take module: .* leave sow_weights at False"):
        make(attention_fn=attention_fn("standard"))(draw(2, 12, 32), sow_weights=True)


@pytest.mark.parametrize("name", ["qk_attn_weights_einsum", "attn_weights_value_einsum"])
def test_einsum_of_a_linen_layer_is_refused(name: str) -> None:
    layer = linen_layer(attention_fn=attention_fn("standard"), **{f"{name}_cls": lambda: jnp.einsum})
    with pytest.raises(ValueError, match=f"does not take {name}: .* leave {name}_cls at None"):
        layer(draw(2, 12, 32))


@pytest.mark.parametrize("force", [False, True])
def test_softmax_of_a_linen_layer_is_float32(force: bool) -> None:
    x = draw(2, 12, 32)
    options = {"dtype": jnp.bfloat16, "force_fp32_for_softmax": force}
    ours = linen_layer(attention_fn=attention_fn("standard"), **options)(x)
    np.testing.assert_array_equal(ours, linen_layer(attention_fn=attention_fn("standard"), dtype=jnp.bfloat16)(x))
    np.testing.assert_allclose(ours.astype(jnp.float32), linen_layer(**options)(x).astype(jnp.float32), atol=6e-2)


def test_function_of_a_config_is_pickled() -> None:
    x = draw(1, 4, 2, 8)
    function = attention_fn("standard", local_window_size=1)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(function))(x, x, x), function(x, x, x))  # noqa: S301 (our own)


@pytest.mark.parametrize("name", ["is_casual", "mask", "query", "kv_layout"])
def test_unknown_option_is_refused_before_any_call(name: str) -> None:
    with pytest.raises(ValueError, match=f"attention_fn has no option {name}; its options are .*is_causal"):
        attention_fn("standard", **{name: True})


@either
@pytest.mark.parametrize(
    "precision",
    swept([None, "default", lax.Precision.HIGHEST, BOTH_PRECISIONS], [None, BOTH_PRECISIONS]),
)
def test_precision_is_taken_where_it_is_had(make: Layer, precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw(2, 12, 32)
    layer = make(precision=precision, attention_fn=attention_fn("standard"))
    np.testing.assert_allclose(layer(x), make(precision=precision)(x), atol=2e-6)
    monkeypatch.setattr(flax_attention.Target, "here", lambda: backends.Target("cuda", "h100"))
    half = draw(1, 4, 2, 8).astype(jnp.bfloat16)
    flax_attention._check_precision(precision, half.dtype)
    if precision in (None, "default"):
        flax_attention._check_precision(precision, x.dtype)
    else:
        with pytest.raises(ValueError, match=r"does not take precision=.* for float32 on cuda:h100, only DEFAULT"):
            layer(x)


def test_algorithm_for_products_is_refused() -> None:
    layer = nnx_layer(attention_fn=attention_fn("standard"), precision=lax.DotAlgorithmPreset.F32_F32_F32)
    with pytest.raises(ValueError, match="does not take precision="):
        layer(draw(2, 12, 32))


def decoded_by_nnx(x: jax.Array, **options: Any) -> jax.Array:
    layer = nnx_layer(**options)
    layer.init_cache(x.shape)
    return jnp.concatenate([layer(x[:, i : i + 1], decode=True) for i in range(x.shape[1])], 1)


def decoded_by_linen(x: jax.Array, **options: Any) -> jax.Array:
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("api", DECODED)
def test_decoding_step_by_step_gives_the_causal_pass(api: str, backend: str) -> None:
    x = draw(2, 6, 32)
    causal = LAYERS[api](attention_fn=attention_fn(backend, is_causal=True))(x)
    np.testing.assert_allclose(DECODED[api](x, attention_fn=attention_fn(backend)), causal, atol=2e-6)
    np.testing.assert_allclose(DECODED[api](x), causal, atol=2e-6)


@pytest.mark.parametrize("option", [{"is_causal": True}, {"local_window_size": 0}, {"chunk_size": 4}], ids=str)
@pytest.mark.parametrize("api", DECODED)
def test_mask_by_position_is_refused_while_decoding(api: str, option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="with 1 query and 6 keys, where flax counts the query as position 0"):
        DECODED[api](draw(2, 6, 32), attention_fn=attention_fn("standard", **option))


def test_single_query_whose_position_is_given_is_taken() -> None:
    query, keys = draw(2, 1, 4, 8), draw(2, 6, 4, 8)
    given = attention_fn("standard", is_causal=True, query_positions=jnp.full((2, 1), 3))(query, keys, keys)
    np.testing.assert_allclose(given, attention_fn("standard")(query, keys[:, :4], keys[:, :4]), atol=2e-6)
