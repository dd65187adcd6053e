"""The guide's direct use of Kvax, with ``kvax.ops`` and ``kvax.utils`` replaced by one import."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.backends.kvax import interpreted_ops, ops
from script import printed

NAMES = (
    "flash_attention",
    "create_attention_mask",
    "attention_specs",
    "permute_tokens_context_parallelism",
    "unpermute_tokens_context_parallelism",
)

# As in Kvax's README. With a context axis the queries, keys and values come from permuted tokens.
GUIDE = """
import jax, jax.numpy as jnp, numpy as np
from attnsuite.backends import attention
from attnsuite.backends.kvax.interpreted_ops import (
    attention_specs, create_attention_mask, flash_attention,
    permute_tokens_context_parallelism, unpermute_tokens_context_parallelism,
)

LENGTH, HEAD_DIM = 256, 32
rng = np.random.default_rng(0)
inputs = [jnp.asarray(rng.standard_normal((1, LENGTH, heads, HEAD_DIM)), jnp.float32) for heads in (2, 1, 1)]
positions = jnp.arange(LENGTH, dtype=jnp.int32)[None]
segment_ids = (positions >= LENGTH // 3).astype(jnp.int32)

def with_kvax(mesh, context, *inputs):
    with mesh, attention_specs(query_specs=("data", context, None, None), kv_specs=("data", None, None, None)):
        query_positions, query_segment_ids = positions, segment_ids
        if context:
            *inputs, query_positions, query_segment_ids = permute_tokens_context_parallelism(
                (*inputs, positions, segment_ids)
            )
        query, key, value = inputs
        attention_mask = create_attention_mask(
            query_positions, query_segment_ids, positions, segment_ids, calc_bwd_mask=True
        )
        out = flash_attention(
            query=query, key=key, value=value,
            query_positions=query_positions, query_segment_ids=query_segment_ids,
            kv_positions=positions, kv_segment_ids=segment_ids,
            mask=attention_mask, scale=HEAD_DIM**-0.5,
        )
        return unpermute_tokens_context_parallelism(out) if context else out

def reference(*inputs):
    ids = {"query_segment_ids": segment_ids, "key_value_segment_ids": segment_ids}
    return attention(*inputs, is_causal=True, backend="standard", **ids)

def with_gradients(attend):
    out, pull = jax.vjp(attend, *inputs)
    return out, *pull(out)

expected = jax.jit(lambda: with_gradients(reference))()
for context, devices in (None, 1), ("context", 2):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]).reshape(1, devices), ("data", "context"))
    found = with_gradients(lambda *x: with_kvax(mesh, context, *x))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
    print(context)
"""


@pytest.mark.needs_kvax
def test_the_guides_code_runs_forward_and_backward_on_one_device_and_two():
    # NPROC: threads enough for devices that wait in callbacks.
    assert printed(GUIDE, JAX_NUM_CPU_DEVICES="2", NPROC="16").split() == ["None", "context"]


def attend(query, key, calc_bwd_mask=True):
    """Causal attention of one document, on one device."""
    rows, keys = (jnp.arange(x.shape[1], dtype=jnp.int32)[None] for x in (query, key))
    tokens = rows, jnp.zeros_like(rows), keys, jnp.zeros_like(keys)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    axes = ("data", None, None, None)
    with interpreted_ops.attention_specs(axes, axes):
        mask = interpreted_ops.create_attention_mask(*tokens, calc_bwd_mask=calc_bwd_mask, mesh=mesh)
        return interpreted_ops.flash_attention(query, key, key, *tokens, mask, mesh=mesh)


@pytest.mark.needs_kvax
@pytest.mark.parametrize(
    ("rows", "keys", "calc_bwd_mask", "message"),
    [
        (192, 192, True, "192 queries and 192 keys"),
        (128, 256, True, "128 queries and 256 keys"),
        (128, 128, False, "calc_bwd_mask=True"),
    ],
)
def test_a_gradient_that_kvax_computes_wrongly_is_an_error(rows, keys, calc_bwd_mask, message):
    query, key = (jnp.ones((1, length, 1, 16)) for length in (rows, keys))
    assert jax.eval_shape(lambda x: attend(x, key, calc_bwd_mask), query).shape == query.shape
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(jax.grad(lambda x: attend(x, key, calc_bwd_mask).sum()), query)


@pytest.mark.needs_kvax
@pytest.mark.parametrize("name", NAMES)
def test_the_signatures_are_those_of_kvax(name):
    from attnsuite.backends.kvax.interpret import interpreted

    kvax = interpreted()
    renamed = {
        "permute_tokens_context_parallelism": kvax.permute_tokens,
        "unpermute_tokens_context_parallelism": kvax.unpermute_tokens,
    }
    theirs = inspect.signature(renamed.get(name) or getattr(kvax, name)).parameters
    ours = inspect.signature(getattr(ops, name)).parameters
    assert {key: x.default for key, x in ours.items()} == {key: x.default for key, x in theirs.items()}


def test_without_a_gpu_the_error_names_the_other_import():
    axes = (None, None, None, None)
    with pytest.raises(RuntimeError, match=r"attnsuite\.backends\.kvax\.interpreted_ops"):
        ops.attention_specs(axes, axes)


def test_importing_loads_neither_kvax_nor_triton():
    printed("import sys, attnsuite.backends.kvax.ops; assert not {'kvax', 'triton', 'jax_triton'} & set(sys.modules)")
