"""JAX's Pallas flash attention for TPUs (``jax.experimental.pallas.ops.tpu.flash_attention``), behind the contract.

The kernel is FlashAttention-2 (arXiv 2307.08691) with gradients, that of a bias too, which splash has not. A bias is
held whole: float32 numbers in the number of batch entries, heads, queries and keys, and as many again for the gradient.
Gradients are taken in float32 only: the backward pass reads the output as it was rounded.
This file adds lengths that are no multiple of a block (padded), key lengths and padding (as segment ids), grouped
queries (keys and values repeated), a bias that broadcasts or hides keys, and zero output for rows that see nothing,
where the kernel gives an average. Nothing of this project has run the kernel on a TPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from .contract import Plan, may_attend
from .devices import Target
from .features import Mode, Takes, refusal
from .layout import Layout
from .operands import EitherArray, Terms
from .spec import AttentionSpec
from .splash_operands import LANES, default_precision, in_context, one_key_is_seen, rows_that_see, segment_ids
from .vendor_kernel import VendorKernel, padded, round_up

_MODULE = "jax.experimental.pallas.ops.tpu.flash_attention"
_BLOCKS = (512, 384, 256, 128)  # rows and keys: the first that divides the padded length; not tuned on a TPU
# In place of a bias of minus infinity, of which the kernel makes NaN where it fills a block. The kernel's mask adds
# -2.4e38, so that a key that it hides stays behind one with this bias.
_LOWEST = -1e30


def _gradient_reasons(spec: AttentionSpec, target: Target, mode: Mode, options: Mapping[str, Any]) -> Iterator[str]:
    if spec.needs_grad and spec.dtype == "bfloat16":
        why = "whose backward pass reads the output as rounded: dbias, and with large logits dk, fail the judge"
        yield refusal("tpu_flash_attention", "needs_grad=True with dtype=bfloat16", why, "float32")


def _plan(spec: AttentionSpec, layout: Layout, target: Target, mode: Mode, options: Mapping[str, Any]) -> Plan:
    """Make the segment ids, and find the rows that see nothing; there are no options."""
    lengths = round_up(spec.query_length, LANES), round_up(spec.key_value_length, LANES)
    ids = segment_ids(spec, layout, lengths)
    hides = spec.has_segment_ids or spec.has_seq_lengths  # else every row sees the first key
    rows = rows_that_see(ids, spec.query_length, causal=spec.is_causal) if hides and ids is not None else None
    mask = may_attend(spec, layout) if spec.has_bias else None
    alone = one_key_is_seen(ids) if spec.needs_grad else None
    kernel, sizes = importlib.import_module(_MODULE).flash_attention, _block_sizes(*lengths)
    how = {"causal": spec.is_causal, "sm_scale": spec.softmax_scale, "block_sizes": sizes}
    call = in_context(
        lambda q, k, v, ids, bias: kernel(q, k, v, bias, ids, **how),
        functools.partial(_context, exact=spec.dtype == "float32", interpret=mode == "interpret"),
        one_by_one=mode == "interpret",
    )

    def attend(
        query: Float[Array, "b t n h"], key: Float[Array, "b s k h"], value: Float[Array, "b s k h"], terms: Terms
    ) -> Float[Array, "b t n h"]:
        if alone is not None:
            query, key = (jnp.where(alone, jax.lax.stop_gradient(x), x) for x in (query, key))
        bias, seen = None, jnp.ones((), bool) if rows is None else rows[:, :, None, None]
        if terms.bias is not None:  # which may hide keys too, and is quadratic itself
            bias, seen = _bias(spec, lengths, mask, terms.bias)
        key, value = (jnp.repeat(x, spec.group_size, axis=2) for x in (key, value))
        q, k, v = (
            padded(x.swapaxes(1, 2), length, 2)
            for x, length in ((jnp.where(seen, query, 0), lengths[0]), (key, lengths[1]), (value, lengths[1]))
        )
        out = call(q, k, v, ids, bias)[:, :, : spec.query_length].swapaxes(1, 2)
        return jnp.where(seen, out, 0)

    return Plan.stateless(attend, gradient=spec.needs_grad, key_blocks=(sizes.block_k,))


def _bias(
    spec: AttentionSpec,
    lengths: tuple[int, int],
    mask: Bool[Array, "#b #n t s"] | None,
    bias: Float[EitherArray, "#b #n #t #s"],
) -> tuple[Float[Array, "b n padded_t padded_s"], Bool[Array, "#b #t #n 1"]]:
    """What the kernel adds to scores that it scales afterwards, and the rows that see a key.

    Each row is less the largest bias that it sees, which changes no softmax: the kernel's gradient computes the
    exponentials again, and rounds another way. Of logits near -1e9 they would be off by any factor.
    """
    wide = jnp.asarray(bias, jnp.float32)
    seen = jax.lax.stop_gradient(wide)
    largest = (seen if mask is None else jnp.where(mask, seen, -jnp.inf)).max(-1, keepdims=True)
    blind = jnp.isneginf(largest)
    wide = jnp.where(blind, 0, wide - jnp.where(blind, 0, largest))
    wide = jnp.maximum(wide / spec.softmax_scale, _LOWEST)
    shape = spec.batch, spec.num_heads, spec.query_length, spec.key_value_length
    return padded(padded(jnp.broadcast_to(wide, shape), lengths[0], 2), lengths[1], 3), ~blind.swapaxes(1, 2)


def _block_sizes(rows: int, keys: int) -> Any:
    q, k = (next(block for block in _BLOCKS if length % block == 0) for length in (rows, keys))
    module = importlib.import_module(_MODULE)
    return module.BlockSizes(
        block_b=1,
        **dict.fromkeys(("block_q", "block_q_major_dkv", "block_q_dkv", "block_q_dq"), q),
        **dict.fromkeys(("block_k_major", "block_k", "block_k_major_dkv", "block_k_dkv"), k),
        **dict.fromkeys(("block_k_major_dq", "block_k_dq"), k),
    )


@contextlib.contextmanager
def _context(*, exact: bool, interpret: bool) -> Iterator[None]:
    """What the kernel is traced in. Mosaic knows no higher precision for products of bfloat16."""
    interpreter = pltpu.force_tpu_interpret_mode if interpret else contextlib.nullcontext
    with contextlib.nullcontext() if exact else default_precision(), interpreter():
        yield


TPU_FLASH_ATTENTION = VendorKernel(
    name="tpu_flash_attention",
    allowed=Takes(
        features=frozenset({
            "causal", "bidirectional", "scale", "segments", "lengths", "bias", "gradient", "grouped_queries",
            "cross_length",
        }),
        dtypes=("float32", "bfloat16"),
        head_dims=(*range(8, LANES + 1, 8), 2 * LANES),
        because={"positions": "which masks by slot", "value_head_dim": "whose keys and values have one shape"},
    ),
    platform="tpu",
    module=_MODULE,
    reasons=_gradient_reasons,
    make=_plan,
)  # fmt: skip
