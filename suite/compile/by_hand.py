"""The library's own call for a backend, written by hand: what the interface adds to it is its tax.

A row of :data:`BY_HAND` is a function of an op case that returns ``(query, key, value) -> output`` in the contract's
layout, or None for a case that the library's call cannot say.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from attnsuite.backends import AttentionSpec, Target, pallas_flash, registry

from ..kinds.attention_call import OpCase, spec_of
from ..measure.program import Program, with_gradients
from .programs import op_program

Attend = Callable[[Any, Any, Any], Any]


def by_hand(case: OpCase, backend: str, target: Target) -> Program | None:
    """The program of the case by the library's own call, with the arrays of the backend's program.

    None for a backend without a library behind it, and for a case with a named mask, whose layout holds arrays or
    whose query is one token: the call would need a mask made by hand.
    """
    spec = spec_of(case)
    make = BY_HAND.get(backend)
    plain = case.documents == 1 and not (case.mask or case.is_decode) and case.kv_layout == "NHD"
    attend = make(spec, target) if make is not None and plain else None
    if attend is None:
        return None
    _, *arguments = op_program(case, registry.get(backend), target).arguments
    return Program(with_gradients(attend) if case.needs_grad else attend, tuple(arguments))


def _jax_nn(spec: AttentionSpec, target: Target) -> Attend | None:
    if spec.chunk_size is not None or spec.logits_soft_cap is not None or spec.value_head_dim != spec.head_dim:
        return None

    def attend(query: Any, key: Any, value: Any) -> Any:
        return jax.nn.dot_product_attention(
            query, key, value, is_causal=spec.is_causal, local_window_size=spec.window, implementation="xla"
        )

    return attend


def _splash(spec: AttentionSpec, target: Target) -> Attend | None:
    from jax.experimental.pallas.ops.tpu import splash_attention as kernel  # noqa: PLC0415 (Pallas)

    from attnsuite.backends.splash import block_sizes  # noqa: PLC0415 (as above)
    from attnsuite.backends.splash_operands import blocks_of  # noqa: PLC0415 (as above)

    lengths = (spec.query_length, spec.key_value_length)
    if spec.window is not None or spec.chunk_size is not None or any(length % 128 for length in lengths):
        return None
    masks = [kernel.CausalMask(lengths) if spec.is_causal else kernel.FullMask(lengths)] * spec.num_heads
    made = kernel.make_splash_mha_single_device(
        kernel.MultiHeadMask(masks),
        block_sizes=block_sizes(blocks_of("splash", spec, target, {})),
        attn_logits_soft_cap=spec.logits_soft_cap,
    )

    def attend(query: Any, key: Any, value: Any) -> Any:
        query, key, value = (x.swapaxes(1, 2) for x in (query * spec.softmax_scale, key, value))
        # The workers ask for full products, which the kernel's compiler refuses for bfloat16.
        with jax.default_matmul_precision("highest" if spec.dtype == "float32" else "default"):
            out: Any = jax.vmap(made)(query, key, value)
        return out.swapaxes(1, 2)

    return attend


def _of_equal_heads(spec: AttentionSpec, target: Target, *, backend: str) -> Attend | None:
    """JAX's own Pallas kernels without masks of positions; for TPUs heads come before the length, for GPUs not."""
    tpu = backend == "tpu_flash_attention"
    block = 512 if tpu else 128
    if spec.window or spec.chunk_size or spec.logits_soft_cap or spec.query_length % block or spec.head_dim > 128:
        return None
    how: dict[str, Any] = {"causal": spec.is_causal, "sm_scale": spec.softmax_scale}
    if tpu:
        module = importlib.import_module("jax.experimental.pallas.ops.tpu.flash_attention")
        names = [field.name for field in dataclasses.fields(module.BlockSizes) if field.name != "block_b"]
        how["block_sizes"] = module.BlockSizes(block_b=1, **dict.fromkeys(names, block))
        kernel = functools.partial(module.flash_attention, **how)
    else:
        kernel = functools.partial(pallas_flash.kernel_module().mha, segment_ids=None, **how)

    def attend(query: Any, key: Any, value: Any) -> Any:
        operands = query, *(jnp.repeat(x, spec.group_size, axis=2) for x in (key, value))
        with jax.default_matmul_precision("highest" if spec.dtype == "float32" else "default"):
            if not tpu:
                return kernel(*operands)
            return kernel(*(x.swapaxes(1, 2) for x in operands)).swapaxes(1, 2)

    return attend


BY_HAND: Mapping[str, Callable[[AttentionSpec, Target], Attend | None]] = {
    "standard": _jax_nn,
    "splash": _splash,
    **{name: functools.partial(_of_equal_heads, backend=name) for name in ("tpu_flash_attention", "pallas_flash")},
}
