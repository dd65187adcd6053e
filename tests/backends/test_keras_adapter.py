"""Keras's own layers and function give inside keras_attention what they give without it, or refuse."""

import importlib
import inspect
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.backends import LayerStack
from attnsuite.backends.adapters import keras as adapter
from drawn import draw

# Keras promotes dtypes and ranks.
pytestmark = [pytest.mark.llama, pytest.mark.foreign_numerics]

os.environ.setdefault("KERAS_BACKEND", "jax")
if os.environ.get("ATTNSUITE_REQUIRE_TRANSFORMERS"):  # set by tox -e llama
    keras = importlib.import_module("keras")
else:
    keras = pytest.importorskip("keras", reason="Keras is not installed; tox -e llama")


QUERY, KEY, VALUE = draw(2, 12, 4, 8), draw(2, 12, 2, 8, seed=1), draw(2, 12, 2, 8, seed=2)
CALLS = {
    "causal": {"is_causal": True},
    "causal, fewer keys": {"is_causal": True, "keys": 7},
    "scale": {"scale": 0.5},
    "mask": {"mask": draw(2, 1, 12, 12) > -0.5},
    "bias": {"bias": draw(1, 4, 12, 12)},
    "all": {
        "is_causal": True,
        "mask": (draw(2, 4, 12, 12) > -0.5) | jnp.eye(12, dtype=bool),
        "bias": draw(1, 4, 12, 12),
    },
    "flash off": {"flash_attention": False},
}


@pytest.mark.parametrize("call", CALLS)
def test_function_gives_what_keras_gives(call):
    options = dict(CALLS[call])
    keys = options.pop("keys", 12)
    arrays = QUERY, KEY[:, :keys], VALUE[:, :keys]
    with adapter.keras_attention("standard"):
        ours = keras.ops.dot_product_attention(*arrays, **options)
    np.testing.assert_allclose(ours, keras.ops.dot_product_attention(*arrays, **options), atol=2e-6)


LAYERS = {
    "MultiHeadAttention": lambda **o: keras.layers.MultiHeadAttention(num_heads=4, key_dim=8, **o),
    "GroupQueryAttention": lambda **o: keras.layers.GroupQueryAttention(
        head_dim=8, num_query_heads=4, num_key_value_heads=2, **o
    ),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_layer_gives_what_it_gives_without_and_its_gradient(layer):
    made, x = LAYERS[layer](), draw(2, 12, 32)
    theirs = made(x, x, use_causal_mask=True)
    state = [v.value for v in made.trainable_variables]

    def loss(state):
        return (made.stateless_call(state, [], x, x, use_causal_mask=True)[0] ** 2).sum()

    theirs_grad = jax.jit(jax.grad(loss))(state)
    with adapter.keras_attention("chunked", on_unavailable="raise"):
        np.testing.assert_allclose(made(x, x, use_causal_mask=True), theirs, atol=2e-6)
        ours_grad = jax.jit(jax.grad(loss))(state)  # a program of its own
    for ours, expected in zip(ours_grad, theirs_grad, strict=True):
        np.testing.assert_allclose(ours, expected, atol=2e-5)


def test_half_precision_and_mixed_dtypes_come_out_as_from_keras():
    for key_dtype in (jnp.bfloat16, jnp.float32):
        arrays = QUERY.astype(jnp.bfloat16), KEY.astype(key_dtype), VALUE.astype(key_dtype)
        theirs = keras.ops.dot_product_attention(*arrays)
        with adapter.keras_attention("standard"):
            ours = keras.ops.dot_product_attention(*arrays)
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours.astype(jnp.float32), theirs.astype(jnp.float32), atol=3e-2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flash_attention": True}, "asks for Keras's own kernel"),
        ({"mask": jnp.ones((12, 12), bool)}, r"mask has shape \(12, 12\); expected four axes"),
        ({"attn_logits_soft_cap": 5.0}, r"attn_logits_soft_cap=5.0 is not taken"),
    ],
    ids=["flash", "mask", "soft cap"],
)
def test_what_means_something_else_is_refused(options, message):
    """Through the function of Keras's backend: ``keras.ops`` refuses the cap itself where there is no TPU."""
    with adapter.keras_attention("standard"), pytest.raises(ValueError, match=message):
        adapter._module().dot_product_attention(QUERY, KEY, VALUE, **options)


def test_block_in_which_no_attention_runs_through_the_backend_is_an_error():
    made, x = LAYERS["MultiHeadAttention"](dropout=0.5), draw(2, 12, 32)
    with pytest.raises(RuntimeError, match="no attention ran through chunked"), adapter.keras_attention("chunked"):
        made(x, x)


def test_keras_has_its_own_function_after_the_block_and_after_an_error():
    before = adapter._module().dot_product_attention
    with pytest.raises(ZeroDivisionError), adapter.keras_attention():
        raise ZeroDivisionError
    assert adapter._module().dot_product_attention is before


def test_recorded_parameters_are_those_of_the_installed_keras():
    assert tuple(inspect.signature(adapter._module().dot_product_attention).parameters) == adapter.PARAMETERS


def test_keras_on_another_framework_is_refused(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    with pytest.raises(ValueError, match="Keras computes with torch, not with JAX"), adapter.keras_attention():
        pass


def test_example_of_the_page_runs():
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "adapters.md").read_text(encoding="utf-8")
    block = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "import keras" in block)
    namespace = {}
    exec(block, namespace)  # noqa: S102 (our own page)
    assert namespace["out"].shape == (2, 32, 64)


def test_layers_of_a_stack_have_their_numbers():
    """What a stack does with them: test_layer_stack.py."""
    made, x, stack = LAYERS["MultiHeadAttention"](), draw(2, 12, 32), LayerStack(2)
    with (
        adapter.keras_attention("standard", layer=stack[1]),
        pytest.raises(ValueError, match="layer 1 ran where layer 0 was expected"),
    ):
        stack.run(lambda: made(x, x, use_causal_mask=True))
