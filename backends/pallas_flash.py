"""JAX's Pallas flash attention for GPUs (``jax.experimental.pallas.ops.gpu.attention``), behind the contract.

The kernel is FlashAttention-2 (arXiv 2307.08691) in Pallas' Triton dialect and needs no package but JAX. It computes
self-attention, causal or full, forward. Everything else is refused. Segments are refused because the kernel has one
array of ids and the contract two. This file adds odd lengths (padded behind the last token) and grouped queries (keys
and values repeated). JAX has deprecated the module in favour of tokamax and may remove it; the backend then refuses. It
ran on an H200.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from .contract import Plan
from .devices import Target
from .features import Mode, Takes, refusal
from .layout import Layout
from .operands import Terms
from .spec import AttentionSpec
from .vendor_kernel import VendorKernel, padded, round_up

_MODULE = "jax.experimental.pallas.ops.gpu.attention"
# Lengths are padded to multiples of this. Blocks of 128 are the kernel's default; at head dim 256 they need more shared
# memory than any GPU has, blocks of 64 do not (`attnsuite compile --backends pallas_flash`).
_BLOCK = 128
_PADDING = -1


def _plan(spec: AttentionSpec, layout: Layout, target: Target, mode: Mode, options: Mapping[str, Any]) -> Plan:
    length, ids = round_up(spec.query_length, _BLOCK), None
    if not spec.is_causal and length > spec.query_length:  # under a causal mask no token sees the padding behind it
        ids = padded(jnp.zeros((spec.batch, spec.query_length), jnp.int32), length, fill=_PADDING)
    kernel, block = kernel_module(), 128 if spec.head_dim <= 128 else 64
    sizes = kernel.BlockSizes(block_q=block, block_k=block)
    run = functools.partial(kernel.mha, sm_scale=spec.softmax_scale, causal=spec.is_causal, block_sizes=sizes)

    def attend(
        query: Float[Array, "b t n h"], key: Float[Array, "b t k h"], value: Float[Array, "b t k h"], terms: Terms
    ) -> Float[Array, "b t n h"]:
        key, value = (jnp.repeat(x, spec.group_size, axis=2) for x in (key, value))
        operands = (padded(x, length) for x in (query, key, value))
        return run(*operands, ids, interpret=mode == "interpret")[:, : spec.query_length]

    return Plan.stateless(attend, gradient=False, key_blocks=(block,))


def kernel_module() -> Any:
    """JAX's module, without the warning of its import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # see the module's docstring
        from jax.experimental.pallas.ops.gpu import attention  # noqa: PLC0415
    return attention


def _position_reasons(spec: AttentionSpec, target: Target, mode: Mode, options: Mapping[str, Any]) -> Iterator[str]:
    if spec.has_positions and spec.is_causal:
        requested = "an array of explicit positions with is_causal=True"
        yield refusal("pallas_flash", requested, "which masks by slot", "arange, or is_causal=False")


PALLAS_FLASH = VendorKernel(
    name="pallas_flash",
    allowed=Takes(
        features=frozenset({"causal", "bidirectional", "scale", "positions", "grouped_queries"}),
        dtypes=("bfloat16", "float16"),
        head_dims=range(1, 257),
        because={
            "dtype": "whose products of float32 may be TF32",
            "gradient": (
                "whose backward pass rounds rowsum(dO * O) to half precision: with large logits dq fails the judge"
            ),
            "cross_length": "which is for self-attention",
            "segments": "whose kernel has one array of them for queries and keys",
            "lengths": "which masks by slot",
        },
    ),
    platform="cuda",
    module=_MODULE,
    reasons=_position_reasons,
    make=_plan,
)
