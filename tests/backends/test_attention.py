import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite import backends
from attnsuite.backends import attention, dot_product_attention
from drawn import draw
from landing import swept

# JAX's own attention promotes dtypes and ranks.
pytestmark = [pytest.mark.standard, pytest.mark.foreign_numerics]

BACKENDS = ("standard", "chunked", "auto")
# What chunked computes is held by its conformance suite.
MOST = swept(BACKENDS, ("standard", "auto"))


def qkv(T=24, S=24, N=4, K=2):
    return draw(2, T, N, 16), draw(2, S, K, 16, seed=1), draw(2, S, K, 16, seed=2)


@pytest.mark.parametrize("backend", MOST)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"local_window_size": 5},
        {"local_window_size": (3, 7), "is_causal": True},
        {"key_value_seq_lengths": jnp.array([24, 9])},
        {"mask": draw(2, 1, 24, 24) > -0.5},
        {"mask": draw(1, 4, 24, 24) > -0.5, "is_causal": False},
        {"bias": draw(1, 4, 24, 24)},
        {"bias": draw(2, 1, 1, 24), "mask": draw(1, 1, 24, 24) > -0.5},
        # Their leading axes may be missing.
        *({"mask": draw(*shape) > -0.5, "bias": draw(*shape)} for shape in ((24,), (24, 24), (4, 24, 24), (1, 24, 24))),
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_is_a_drop_in_for_jax(backend, options):
    ours = dot_product_attention(*qkv(), **options, backend=backend)
    np.testing.assert_allclose(ours, jax.nn.dot_product_attention(*qkv(), **options), atol=2e-6)


def test_valid_rows_of_query_seq_lengths_agree_with_jax_and_the_rest_is_zero():
    options = {"query_seq_lengths": jnp.array([24, 7]), "key_value_seq_lengths": jnp.array([24, 9])}
    ours = dot_product_attention(*qkv(), **options)
    theirs = jax.nn.dot_product_attention(*qkv(), **options)
    np.testing.assert_allclose(ours[0], theirs[0], atol=2e-6)
    np.testing.assert_allclose(ours[1, :7], theirs[1, :7], atol=2e-6)
    assert not np.asarray(ours[1, 7:]).any()


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    "options",
    [{}, {"return_residual": True}, {"query_seq_lengths": jnp.array([7]), "key_value_seq_lengths": jnp.array([9])}],
    ids=lambda options: "-".join(options) or "plain",
)
def test_input_without_a_batch_axis(options):
    query, key, value = (x[0] for x in qkv())
    ours = dot_product_attention(query.tolist(), key, value, is_causal=True, **options)
    theirs = jax.nn.dot_product_attention(query, key, value, is_causal=True, **options)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, atol=2e-6)


@pytest.mark.parametrize("backend", MOST)
def test_what_the_query_holds_beyond_its_length_changes_nothing(backend):
    lengths, (query, key, value) = jnp.array([24, 7]), qkv()

    def loss(query, key, value):
        return jnp.sin(dot_product_attention(query, key, value, query_seq_lengths=lengths, backend=backend)).sum()

    for garbage in (jnp.nan, jnp.inf, 1e30):
        dirty = query.at[1, 7:].set(garbage)
        for one, other in zip(
            jax.value_and_grad(loss, (0, 1, 2))(dirty, key, value),
            jax.value_and_grad(loss, (0, 1, 2))(query, key, value),
            strict=True,
        ):
            jax.tree.map(np.testing.assert_array_equal, one, other)


LENGTHS = (
    (jnp.array(7), r"shape \(\) and dtype int32; expected \(2,\)"),
    (jnp.array([7]), r"shape \(1,\) and dtype int32; expected \(2,\)"),
    (jnp.array([7.0, 9.0]), r"dtype float32; expected \(2,\) and an integer dtype"),
)
BEYOND_INT32 = np.arange(24)[None].repeat(2, 0) + 2**32
REFUSED = [
    *((dot_product_attention, {"query_seq_lengths": x}, f"query_seq_lengths has .*{words}") for x, words in LENGTHS),
    *((dot_product_attention, {"key_value_seq_lengths": x}, "key_value_seq_lengths has") for x, _ in LENGTHS),
    *(
        (dot_product_attention, {"query": draw(*shape)}, r"query has shape .* expected 3 or 4 dimensions")
        for shape in ((16,), (4, 16), (1, 2, 24, 4, 16))
    ),
    (dot_product_attention, {"value": None}, r"value is None; give an array, or .* value_head_dim=r"),
    (
        dot_product_attention,
        {"implementation": "xla", "backend": "chunked"},
        "both say what is to run; give one of them",
    ),
    (dot_product_attention, {"implementation": "mosaic"}, "'mosaic' is not one of JAX's"),
    (dot_product_attention, {"implementation": "chunked"}, "named by backend='chunked'"),
    (attention, {"query_positions": BEYOND_INT32}, "query_positions has numbers from 4294967296 to 4294967319"),
    (
        attention,
        {"query_segment_ids": BEYOND_INT32 - 2**32, "key_value_segment_ids": BEYOND_INT32},
        "key_value_segment_ids has numbers from 4294967296 to",
    ),
    *(
        (call, {"key_value_seq_lengths": BEYOND_INT32[:, 3]}, "key_value_seq_lengths has numbers from 4294967299 to")
        for call in (attention, dot_product_attention)
    ),
    (attention, {"query": None}, "query is a NoneType; give an array"),
    (attention, {"query": np.zeros((2, 24, 4, 16), ">f4")}, "query is a ndarray of dtype >f4, of which JAX makes no"),
    (attention, {"key": jax.ShapeDtypeStruct((2, 24, 2, 16), jnp.float32)}, "key is a ShapeDtypeStruct, of which JAX"),
    (attention, {"key_value_seq_lengths": [2**40, 1]}, "key_value_seq_lengths is a list, of which .*1099511"),
]


@pytest.mark.wrong_types
@pytest.mark.parametrize(("call", "options", "message"), REFUSED)
def test_what_cannot_be_computed_is_refused(call, options, message):
    arrays = dict(zip(("query", "key", "value"), qkv(), strict=True))
    with pytest.raises(ValueError, match=message):
        call(**(arrays | options))


def test_signature_is_jaxs_with_a_backend():
    """Names, order, kinds and defaults."""
    ours = inspect.signature(dot_product_attention).parameters
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    assert [(p.name, p.kind, p.default) for p in ours.values() if p.name != "backend"] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


@pytest.mark.parametrize("backend", MOST)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        pytest.param(jnp.float32, {}, marks=pytest.mark.thorough),
        pytest.param(jnp.float32, {"is_causal": True}, marks=pytest.mark.thorough),
        pytest.param(jnp.float32, {"key_value_seq_lengths": jnp.array([24, 9])}, marks=pytest.mark.thorough),
        (jnp.float32, {"scale": 0.3, "local_window_size": 5}),
        (jnp.bfloat16, {"key_value_seq_lengths": jnp.array([24, 9])}),
    ],
    ids=lambda x: ("-".join(x) or "plain") if isinstance(x, dict) else jnp.dtype(x).name,
)
def test_residual_is_jaxs(backend, dtype, options):
    arrays = [x.astype(dtype) for x in qkv()]
    ours = dot_product_attention(*arrays, **options, return_residual=True, backend=backend)
    theirs = jax.nn.dot_product_attention(*arrays, **options, return_residual=True)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        tolerance = 2e-6 if dtype == jnp.float32 else 2e-2
        np.testing.assert_allclose(one.astype(jnp.float32), other.astype(jnp.float32), rtol=tolerance, atol=tolerance)
    alone = dot_product_attention(*arrays, **options, backend=backend)
    tolerance = 2e-7 if dtype == jnp.float32 else 4e-3  # standard's softmax is one operation of XLA where it is alone
    np.testing.assert_allclose(ours[0].astype(jnp.float32), alone.astype(jnp.float32), rtol=0, atol=tolerance)


def test_residual_is_minus_infinity_in_rows_that_see_nothing_and_beyond_the_query():
    lengths = {"query_seq_lengths": jnp.array([24, 7]), "key_value_seq_lengths": jnp.array([0, 9])}
    out, residual = dot_product_attention(*qkv(), **lengths, return_residual=True)
    seen = np.zeros((2, 24), bool)
    seen[1, :7] = True
    np.testing.assert_array_equal(np.isneginf(residual), np.broadcast_to(~seen[..., None], residual.shape))
    assert np.isfinite(np.asarray(residual)[seen]).all()
    assert not np.asarray(out)[~seen].any()


def test_residual_has_no_gradient_as_in_jax():
    def gradients(attend):
        def loss(*arrays):
            out, residual = attend(*arrays, is_causal=True, return_residual=True)
            return jnp.sin(out).sum() + jnp.sin(residual).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2)))(*qkv())

    for one, other in zip(gradients(dot_product_attention), gradients(jax.nn.dot_product_attention), strict=True):
        np.testing.assert_allclose(one, other, atol=5e-6)


def test_implementation_of_jax_names_a_backend():
    np.testing.assert_array_equal(
        dot_product_attention(*qkv(), implementation="xla"), dot_product_attention(*qkv(), backend="standard")
    )
    with pytest.raises(backends.BackendUnavailableError, match="cudnn cannot run this"):  # an error in JAX too
        dot_product_attention(*qkv(), implementation="cudnn")


def test_numpy_input_is_taken():
    arrays = [np.asarray(x) for x in qkv()]
    np.testing.assert_array_equal(attention(*arrays, backend="standard"), attention(*qkv(), backend="standard"))


def test_symbolic_shapes_are_refused_in_a_sentence():
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 8, 2, 16"), jnp.float32)
    with pytest.raises(ValueError, match=r"query has the symbolic shape \(b, 8, 2, 16\); a backend is chosen"):
        jax.eval_shape(attention, x, x, x)


def test_nothing_is_traced_before_a_refusal():
    with pytest.raises(backends.BackendUnavailableError, match="cudnn cannot run this"):
        jax.eval_shape(functools.partial(attention, backend="cudnn", on_unavailable="raise"), *qkv())


UNSIGNED = np.arange(32, dtype=np.uint32)[None]
INTEGERS = {
    "lengths of bytes": ({"key_value_seq_lengths": np.array([200], np.uint8)}, 400),
    "lengths with a sign": ({"key_value_seq_lengths": np.array([100], np.int8)}, 400),
    "unsigned positions": (
        {"query_positions": UNSIGNED, "key_value_positions": UNSIGNED, "local_window_size": (5, 0)},
        32,
    ),
    "pages": ({"page_table": np.array([[2, 20, 0, 1]], np.uint8), "needs_grad": False}, 16),
}


@pytest.mark.wrong_types
@pytest.mark.parametrize("backend", MOST)
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_of_any_dtype_mean_what_they_say(backend, name):
    options, S = INTEGERS[name]
    rows = 30 if name == "pages" else 1
    arrays = draw(1, 32, 2, 8), draw(rows, S, 2, 8, seed=1), draw(rows, S, 2, 8, seed=2)

    def called(convert):
        given = {key: convert(x) if isinstance(x, np.ndarray) else x for key, x in options.items()}
        return attention(*arrays, **given, backend=backend)

    expected = called(lambda x: x.astype(np.int32))
    for convert in (np.asarray, jnp.asarray):
        np.testing.assert_array_equal(called(convert), expected)


@pytest.mark.wrong_types
def test_segment_ids_that_int32_would_make_one_are_refused():
    x, ids = draw(1, 8, 2, 8), np.arange(8, dtype=np.uint32)[None]

    def call(ids):
        return attention(x, x, x, query_segment_ids=ids, key_value_segment_ids=ids, backend="standard")

    np.testing.assert_array_equal(call(jnp.asarray(ids)), call(ids.astype(np.int32)))
    with pytest.raises(ValueError, match="query_segment_ids has numbers from 2147483648 to 2147483655"):
        call(jnp.asarray(ids + 2**31))
    with pytest.raises(ValueError, match=r"query_segment_ids is uint32 and traced.* give .*astype\(jnp.int32\)"):
        jax.jit(call)(ids)


@pytest.mark.wrong_types
def test_lengths_in_int64_beyond_int32_mean_all_slots():
    with jax.enable_x64(new_val=True):
        found = attention(*qkv(), key_value_seq_lengths=jnp.array([2**33, 2], jnp.int64), backend="standard")
    expected = attention(*qkv(), key_value_seq_lengths=np.array([24, 2]), backend="standard")
    np.testing.assert_array_equal(found, expected)


@pytest.mark.wrong_types
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bias_in_float64_beside_inputs_in_float32_is_taken(backend):
    x, bias = draw(1, 8, 2, 8), np.random.default_rng(3).standard_normal((1, 2, 8, 8))
    expected = attention(x, x, x, bias=bias.astype(np.float32), backend=backend)
    with jax.enable_x64(new_val=True):
        found = attention(x, x, x, bias=bias, backend=backend)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sinks_in_half_precision_are_computed_with_in_float32(dtype: str) -> None:
    sinks = jnp.array([-jnp.inf, 0.5, 1.0, -2.0], dtype)
    with jax.numpy_dtype_promotion("strict"):
        found = attention(*qkv(), sinks=sinks, backend="standard")
    np.testing.assert_array_equal(found, attention(*qkv(), sinks=sinks.astype(jnp.float32), backend="standard"))


# With an option chunked takes its blocks, however few the scores.
BY_BLOCKS = [*((backend, {}) for backend in BACKENDS), ("chunked", {"block_q": 8})]


@pytest.mark.parametrize(("backend", "options"), BY_BLOCKS)
@pytest.mark.parametrize(("size", "sink"), [(1e4, None), (3e9, None), (3e9, 0.0), (1e20, 0.0), (-3e9, -jnp.inf)])
def test_logits_may_be_large(backend, options, size, sink):
    """They grow with the key, so that each query has the whole of its last key, or of its first."""
    query, key, value = qkv(40, 40, 2)
    rising = jnp.sign(size) * jnp.broadcast_to(jnp.arange(1.0, 41)[None, :, None, None], key.shape)
    sinks = None if sink is None else jnp.full(2, sink)

    def loss(value):
        how = {"scale": 0.3, "sinks": sinks, "backend": backend, "backend_options": options}
        out = attention(jnp.full_like(query, abs(size)), rising, value, is_causal=True, **how)
        return (out * query).sum(), out

    slopes, out = jax.grad(loss, has_aux=True)(value)
    seen = value if size > 0 else jnp.broadcast_to(value[:, :1], value.shape)
    np.testing.assert_allclose(out, seen, rtol=1e-6)
    expected = query if size > 0 else jnp.zeros_like(query).at[:, 0].set(query.sum(1))
    np.testing.assert_allclose(slopes, expected, atol=1e-5)


@pytest.mark.wrong_types  # JAX builds the tree of traced lengths from placeholders
@pytest.mark.parametrize(("backend", "options"), BY_BLOCKS)
@pytest.mark.parametrize("queries", [24, 1])
def test_a_sink_of_minus_infinity_is_none_and_a_large_one_is_the_log_sum_exp(backend, options, queries):
    sinks, visible = jnp.array([-jnp.inf, 1e10, 1e30, jnp.inf]), jnp.array([24, 0])

    def loss(query, sinks):
        lengths = {"key_value_seq_lengths": visible, "backend": backend, "backend_options": options}
        out, lse = attention(query, *qkv()[1:], sinks=sinks, return_log_sum_exp=True, **lengths)
        return (out**2).sum() + jnp.where(jnp.abs(lse) < 1e3, lse, 0).sum(), (out, lse)

    query = qkv()[0][:, :queries]
    (for_query, for_sinks), (out, lse) = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(query, sinks)
    alone, (bare, without) = jax.jit(jax.grad(loss, has_aux=True))(query, None)
    np.testing.assert_allclose(out[:, :, 0], bare[:, :, 0], atol=1e-6)
    np.testing.assert_allclose(lse[0, :, 0], without[0, :, 0], rtol=1e-6)
    assert jnp.isneginf(lse[1, :, 0]).all()  # sees neither a key nor a sink
    np.testing.assert_allclose(lse[:, :, 1:3], np.broadcast_to(sinks[1:3], (2, queries, 2)), rtol=1e-6)
    assert not out[1].any()
    assert not out[:, :, 3].any()  # a sink of infinity takes all
    assert jnp.isfinite(lse[:, :, 3]).all()
    np.testing.assert_allclose(for_query[:, :, 0], alone[:, :, 0], atol=1e-5)
    assert for_sinks[0] == 0
    assert jnp.isfinite(for_sinks).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_soft_cap_may_be_large(backend):
    """A row has the whole of its largest key, in the backward pass too: its maximum is a rounded product there."""
    query, key, value = qkv(40, 40, 2)
    wide, scores = jnp.full_like(query, 1e6), jnp.zeros_like(key).at[..., 0].set(key[..., 0])

    def loss(value):
        how = {"scale": 0.7, "logits_soft_cap": 1e6, "backend": backend}
        return (attention(wide, scores, value, **how) * query).sum()

    largest = jax.nn.one_hot(scores[..., 0].argmax(1), 40, axis=1)
    expected = largest[..., None] * query.sum(1, keepdims=True)
    np.testing.assert_allclose(jax.grad(loss)(value), expected, atol=1e-5)
