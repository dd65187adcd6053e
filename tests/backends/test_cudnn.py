import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as stablehlo

from attnsuite.backends import Layout, Target, Terms, support
from attnsuite.backends.cudnn import CUDNN
from attnsuite.testing import Conformance
from declared import sized

H100, A100, B200 = Target("cuda", "h100"), Target("cuda", "a100"), Target("cuda", "b200")


# jax.nn.dot_product_attention promotes bfloat16 and float32 by itself.
pytestmark = pytest.mark.foreign_numerics


@pytest.mark.newest  # what is refused is the same with every JAX
class TestCudnn(Conformance):
    """Support is judged for an H100 everywhere; the numbers need an NVIDIA GPU."""

    backend = "cudnn"
    target = H100
    dtype = "bfloat16"
    refuses = frozenset(
        (
            *("head-dim-33", "value-dim-*", "length-1", "length-127", "length-129", "few-queries-17", "one-key"),
            *("*-keys-causal", "more-queries-causal", "decode-*", "positions-*", "rows-before-every-key"),
            *("chunk-*", "window-int", "window-asymmetric", "window-right-only", "window-wider-than-all"),
            *("window-1300", "window-more-queries", "window-*float16", "soft-cap*", "segments*", "padding-*"),
            *("combination*", "bias-*", "mask-and-bias", "log-sum-exp*", "sinks*", "alibi*", "function-*", "score*"),
            *("pages*", "kv-*", "values-in-keys*"),
        )
    )


def spec(**changes):
    plain = sized(64, B=2, N=4, K=2, dtype="bfloat16")
    return dataclasses.replace(plain, value_head_dim=changes.pop("value_head_dim", changes.get("head_dim")), **changes)


@pytest.mark.parametrize(
    ("changes", "target"),
    [
        ({}, A100),
        ({"head_dim": 256, "needs_grad": False}, B200),
        ({"query_length": 32}, H100),
        ({"local_window_size": (8, 0)}, H100),
        ({"local_window_size": (8, 3), "is_causal": True}, H100),
        ({"has_mask": True, "has_bias": True, "needs_grad": False}, H100),
        ({"query_length": 33, "has_mask": True, "needs_grad": False}, H100),
    ],
)
def test_takes_what_the_library_has(changes, target):
    assert support(CUDNN, spec(**changes), target)


def test_compiles_only_where_the_device_is():
    present = dataclasses.replace(H100, present=True)
    assert "from here" in support(CUDNN, spec(), H100, "compile").reasons[0]
    assert support(CUDNN, spec(), present, "compile")


@pytest.fixture
def calls(monkeypatch):
    """JAX's function in its XLA form, which writes garbage where cuDNN is free to; records its arguments.

    A mask is added to the scores, as it is for cuDNN.
    """
    seen = []
    real = jax.nn.dot_product_attention

    def recorded(query, key, value, **options):
        seen.append(options)
        bias = stablehlo.combine_bias_and_mask(options.get("bias"), options.get("mask"), query.dtype)
        return real(query, key, value, **{**options, "bias": bias, "mask": None, "implementation": "xla"})

    monkeypatch.setattr(jax.nn, "dot_product_attention", recorded)
    return seen


@pytest.mark.parametrize("window", [(8, 0), (8, 5)])
def test_asks_jax_for_cudnn_with_the_causal_mask_where_there_is_a_window(calls, window):
    """The window has no right side then."""
    windowed = spec(num_kv_heads=4, scale=0.5, local_window_size=window, is_causal=window[1] > 0)
    CUDNN.plan(windowed, Layout(), target=H100).run(*drawn())
    wanted = {"implementation": "cudnn", "scale": 0.5, "is_causal": True, "local_window_size": (8, 0)}
    assert calls[0] | wanted == calls[0]


def drawn(kv_heads=4):
    """Query, key and value."""
    rng = np.random.default_rng(0)
    shapes = ((2, 64, heads, 64) for heads in (4, kv_heads, kv_heads))
    return [jnp.asarray(rng.standard_normal(shape).astype(jnp.bfloat16)) for shape in shapes]


def results(asked, layout, arrays, **terms):
    """Output, dq, dk and dv."""
    plan = dataclasses.replace(CUDNN.plan(asked, layout, target=H100), spec=asked)

    @jax.jit  # uncompiled, each step is a program
    def run(*arrays):
        out, pullback = jax.vjp(lambda q, k, v: plan.run(q, k, v, terms=Terms(**terms))[0], *arrays)
        return [out, *pullback(jnp.ones_like(out))]

    return [np.asarray(x, np.float32) for x in run(*arrays)]


def test_batch_entry_without_a_valid_key_gives_zero_forward_and_backward(calls):
    layout = Layout(key_value_seq_lengths=jnp.array([0, 20], jnp.int32))
    arrays = [x.at[0].set(jnp.nan) for x in drawn()]
    with jax.disable_jit():  # what the kernel is called with can be read
        out, dq, dk, dv = results(spec(num_kv_heads=4, has_seq_lengths=True), layout, arrays)
    for x in (out, dq, dk, dv):
        assert not x[0].any()
    assert not dk[1, 20:].any()
    assert not dv[1, 20:].any()
    assert out[1].all()
    assert np.asarray(calls[0]["key_value_seq_lengths"]).tolist() == [1, 20]


def lowered_for_cuda(monkeypatch, function, *arguments):
    """The program for an H100 as XLA is given it. JAX asks the present device what it is; here it is told."""
    monkeypatch.setattr(stablehlo, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(stablehlo, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(stablehlo, "is_cuda_compute_capability_equal", lambda capability: capability == "9.0")
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("shape", [(1, 1, 1, 64), (2, 1, 1, 64), (2, 1, 64, 64), (1, 4, 64, 64), (2, 4, 64, 64)])
def test_mask_and_bias_of_every_form_reach_the_kernel_and_a_mask_its_backward_pass(monkeypatch, shape):
    x, mask, bias = jnp.ones((2, 64, 4, 64), jnp.bfloat16), jnp.ones(shape, bool), jnp.ones(shape, jnp.bfloat16)
    masked = spec(num_kv_heads=4, has_mask=True, is_causal=True)
    both = dataclasses.replace(masked, has_bias=True, needs_grad=False)

    def attend(of, q, k, v, mask, bias):
        plan = dataclasses.replace(CUDNN.plan(of, Layout(mask=mask), target=H100), spec=of)
        return plan.run(q, k, v, terms=Terms(bias=bias))[0].astype(jnp.float32).sum()

    for text in (
        lowered_for_cuda(monkeypatch, functools.partial(attend, both), x, x, x, mask, bias),
        lowered_for_cuda(
            monkeypatch, jax.grad(functools.partial(attend, masked, bias=None), argnums=(0, 1, 2)), x, x, x, mask
        ),
    ):
        assert "__cudnn$fmhaScaleBiasSoftmax(" in text or '__cudnn$fmhaScaleBiasSoftmax"' in text
    assert "__cudnn$fmhaScaleBiasSoftmaxBackward" in text


def test_keys_that_a_mask_hides_from_all_queries_of_a_head_do_not_matter(calls):
    """On an H200 scores of the largest bfloat16 overflowed past the number that JAX adds for a mask."""
    query, *rest = drawn(kv_heads=2)
    visible = np.random.default_rng(1).random((1, 4, 64, 64)) < 0.5
    visible[:, 2:, :, 9] = False  # of the second KV head
    huge = [x.at[:, 9, 1].set(jnp.finfo(jnp.bfloat16).max) for x in rest]
    ours, theirs = (
        results(spec(has_mask=True), Layout(mask=jnp.asarray(visible)), [query, *others]) for others in (rest, huge)
    )
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(calls) == 2


@pytest.mark.parametrize("hidden_by", ["mask", "bias", "mask and causal"])
def test_row_that_arrays_hide_everything_from_gives_zero(calls, hidden_by):
    hidden = np.zeros((1, 1, 64, 64), bool)
    hidden[:, :, 5] = True
    if hidden_by == "mask and causal":
        hidden[:, :, 5, 6:] = False  # visible by the mask alone
    if hidden_by == "bias":
        layout, terms = Layout(), {"bias": jnp.where(hidden, -jnp.inf, 0.5).astype(jnp.bfloat16)}
    else:
        layout, terms = Layout(mask=jnp.asarray(~hidden)), {}
    arrays = {"has_mask": not terms, "has_bias": bool(terms)}
    asked = spec(num_kv_heads=4, is_causal=hidden_by == "mask and causal", **arrays)
    out, *gradients = results(asked, layout, drawn(), **terms)
    assert not out[:, 5].any()
    assert out[:, 7].all()
    assert not gradients[0][:, 5].any()
    assert all(np.isfinite(x).all() for x in gradients)
