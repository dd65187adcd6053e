"""Kvax's kernels compiled for GPUs that are not here."""

import dataclasses
import os

import pytest

from attnsuite.backends import Target
from attnsuite.backends.kvax import KVAX, availability
from attnsuite.backends.kvax.block_sizes import FlashAttentionParamsConfig, Passes, choose
from attnsuite.backends.tunable import CompilesKernels
from declared import sized
from landing import swept
from script import printed

pytestmark = pytest.mark.needs_kvax

H100 = Target("cuda", "h100")
MASKS = ["compute_attention_mask_kernel"] * 3
BACKWARD = ["attn_bwd_preprocess", "flash_attention_backward_kernel"]


def spec(head_dim=128, **changes):
    return sized(2048, N=8, K=2, H=head_dim, **{"dtype": "bfloat16", "is_causal": True, **changes})


# The wide head where shared memory is least and where it is most.
@pytest.mark.parametrize(("kind", "head_dim"), swept([("a100", 256), ("h100", 128), ("b200", 256)], [("h100", 128)]))
def test_every_kernel_fits_every_generation(kind, head_dim):
    target = Target("cuda", kind)
    builds = KVAX.compile_kernels(spec(head_dim), target)
    assert [build.name for build in builds] == [*MASKS, "flash_attention_forward_kernel", *BACKWARD]
    chosen = choose(spec(head_dim), target, {})
    forward, backward = (
        dict(build.configuration) for build in builds if build.name.endswith(("ward_kernel", "forward_kernel"))
    )
    assert forward == dataclasses.asdict(chosen.forward)
    assert backward["kv_block_size_dkdv"] == backward["query_block_size_dq"] == chosen.backward.kv_block_size
    for build in builds:
        assert build.error is None, build
        assert 16 <= build.registers <= 255
        assert 0 < build.shared_bytes <= build.shared_limit_bytes
        assert build.vector_loads or build.name in MASKS


def test_blocks_are_those_of_the_grid_that_the_block_sizes_give():
    from attnsuite.backends.kvax import build

    blocks = Passes(FlashAttentionParamsConfig(64, 128, 4, 2), FlashAttentionParamsConfig(64, 32, 4, 2))
    launches = build.record_launches(spec(B=2), blocks)
    assert [(launch.kernel.fn.__name__, launch.blocks) for launch in launches] == [
        (MASKS[0], 2 * 2048 // 64),
        (MASKS[1], 2 * 2048 // 32),  # in the backward pass queries and keys swap their sizes
        (MASKS[2], 2 * 2048 // 32),
        ("flash_attention_forward_kernel", 2 * 8 * 2048 // 64),
        (BACKWARD[0], 2 * 8 * 2048 // 128),
        (BACKWARD[1], 2 * 8 * 2048 // 32),
    ]


def test_blocks_of_a_b200_take_tensor_memory():
    (*_, forward) = KVAX.compile_kernels(spec(needs_grad=False), Target("cuda", "b200"))
    assert (forward.blocks, forward.tensor_columns) == (8 * 2048 // 64, 256)


def test_newest_assembler_reads_the_code_that_xla_writes():
    from attnsuite.backends.kvax import build

    ptx = ".version 9.0\n.target sm_90a\n.address_size 64\n.visible .entry attend()\n{ ret; }\n"
    assert "registers" in build.assemble(ptx, 90, 100)
    with pytest.raises(RuntimeError, match=r"version"):
        build.assemble(ptx, 90)


def test_stride_hint_removes_spills_and_widens_loads():
    from attnsuite.backends.kvax import build

    blocks = choose(spec(), H100, {})

    def forward(*, stride_hint):
        built = build.compile_kernels(spec(needs_grad=False), H100, blocks, stride_hint=stride_hint)
        return next(x for x in built if x.name == "flash_attention_forward_kernel")

    hinted, plain = forward(stride_hint=True), forward(stride_hint=False)
    assert hinted.spilled_bytes == 0
    assert hinted.vector_loads > 100
    assert plain.spilled_bytes > 500
    assert plain.vector_loads == 0
    assert plain.scalar_loads > 400


def test_kernel_that_does_not_fit_says_so_and_the_others_are_there():
    builds = KVAX.compile_kernels(
        spec(256, needs_grad=False), H100, {"query_block_size": 128, "kv_block_size": 128, "num_stages": 3}
    )
    errors = {build.name: build.error for build in builds if build.error}
    assert list(errors) == ["flash_attention_forward_kernel"]
    assert "bytes of shared memory of 232448" in errors["flash_attention_forward_kernel"]


def test_kernel_that_does_not_compile_is_a_result(monkeypatch):
    from attnsuite.backends.kvax import build

    def refuse(*_, **__):
        raise RuntimeError("\n  no such instruction\nmore")

    monkeypatch.setattr(build.triton, "compile", refuse)
    built = KVAX.compile_kernels(spec(needs_grad=False), H100)
    assert {x.error for x in built} == {"RuntimeError: no such instruction"}
    assert {x.registers for x in built} == {None}


def test_float32_would_be_multiplied_as_tf32():
    """What ``supports`` refuses float32 for."""
    from attnsuite.backends.kvax import build

    blocks = Passes(FlashAttentionParamsConfig(64, 64, 4, 2), FlashAttentionParamsConfig(64, 64, 4, 2))
    launches = build.record_launches(spec(64, dtype="float32", needs_grad=False), blocks)
    ptx = build.compile_launch(launches[-1], H100).asm["ptx"]
    assert ".tf32" in ptx
    assert "fma.rn.f32" not in ptx.split("mma")[0]


def test_refused_spec_and_option_raise_with_the_reason():
    assert isinstance(KVAX, CompilesKernels)
    with pytest.raises(ValueError, match="head_dim=80"):
        KVAX.compile_kernels(spec(80), H100)
    with pytest.raises(ValueError, match="NVIDIA"):
        KVAX.compile_kernels(spec(), Target("cpu"))
    with pytest.raises(ValueError, match="no_such_option"):
        KVAX.compile_kernels(spec(), H100, {"no_such_option": 1})


# The native path up to the launch, where jax-triton imports. It needs JAX's CUDA plugin, but no GPU.

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
