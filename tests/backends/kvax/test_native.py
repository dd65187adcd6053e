"""The native path up to the launch, where jax-triton imports; its numbers on a GPU are ``test_conformance.py``'s.

jax-triton needs JAX's CUDA plugin to import, but no GPU: with the wheel of jax-cuda12-plugin alone (installed without
its dependencies) the launches are lowered for CUDA on any machine.
"""

import os

import pytest

from attnsuite.backends.kvax import availability
from script import printed

LOWERED = """
import collections
import os
import jax
import jax.numpy as jnp
from attnsuite.backends import AttentionSpec, Layout, Target
from attnsuite.backends.kvax import KVAX, upstream

B, T = 2, 1000
spec = AttentionSpec(batch=B, query_length=T, key_value_length=T, num_heads=8, num_kv_heads=2, head_dim=128,
                     dtype="bfloat16", is_causal=True, has_segment_ids=True)

def run(ids, query, key, value):
    def forward(query, key, value):
        layout = Layout(query_segment_ids=ids, key_value_segment_ids=ids)
        return KVAX.plan(spec, layout, target=Target("cuda", "h100"), mode="compile").run(query, key, value)[0]
    out, pullback = jax.vjp(forward, query, key, value)
    return out, *pullback(out)

ids = jax.ShapeDtypeStruct((B, T), jnp.int32)
shapes = [(B, T, 8, 128), (B, T, 2, 128), (B, T, 2, 128)]
plain = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
batched = [jax.ShapeDtypeStruct((3, *shape), jnp.bfloat16) for shape in shapes]
for function, arrays in ((run, plain), (jax.vmap(run, in_axes=(None, 0, 0, 0)), batched)):
    lowered = jax.jit(function).trace(ids, *arrays).lower(lowering_platforms=("cuda",))
    print(lowered.as_text().count("@triton_kernel_call("), {str(x.dtype) for x in jax.tree.leaves(lowered.out_info)})

print(os.environ.get("TRITON_CACHE_DIR"))  # which jax-triton empties
launch = upstream.native((9, 0)).create_attention_mask.__globals__["jt"].triton_call.args[0]
for kernel, signature, specialization, *_ in launch.func.__globals__["_COMPILED_KERNEL_CACHE"]:
    strides = [how for (name, _), how in zip(signature, specialization) if "stride" in name and "dims" not in name]
    print(kernel.fn.__name__, collections.Counter(strides).most_common())
"""


@pytest.mark.needs_kvax
def test_launches_are_lowered_for_cuda_with_the_stride_hint():
    if reasons := availability.missing("native"):
        (pytest.fail if os.environ.get("ATTNSUITE_REQUIRE_KVAX") else pytest.skip)(" ".join(reasons))
    plain, batched, triton_cache, *kernels = printed(LOWERED).splitlines()
    assert plain == batched == "6 {'bfloat16'}"
    assert triton_cache == str(os.environ.get("TRITON_CACHE_DIR"))
    assert [line for line in kernels if "mask" not in line] == [
        "flash_attention_forward_kernel [(('i32', 'D'), 12)]",
        "attn_bwd_preprocess [(('i32', 'D'), 3)]",
        "flash_attention_backward_kernel [(('i32', 'D'), 20), (('*i32', ''), 1)]",
    ]
