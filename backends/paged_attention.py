"""JAX's Pallas kernel for TPUs that decodes, ``jax.experimental.pallas.ops.tpu.paged_attention``.

The kernel attends from one query token per sequence to the leading slots of the sequence's pages (vLLM, arXiv
2309.06180), which it copies from a pool in HBM by a page table. It has no scale, no positions and no window. This file
gives it each KV head of a sequence as a sequence of its own, and a contiguous cache as pages in a row. A cache with
heads before length, as ``models.KVCache`` holds it, paged or not, is then read where it lies. The kernel rounds keys
and values to bfloat16. Nothing of this project has run it on a TPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from .contract import Plan, is_whole, may_attend
from .devices import KIB, Target
from .features import Mode, Takes, refusal
from .kv_cache import pages_in_pool
from .layout import Layout
from .operands import Terms
from .spec import AttentionSpec
from .vendor_kernel import VendorKernel

_MODULE = "jax.experimental.pallas.ops.tpu.paged_attention"
_PAGES = (128, 64, 32, 16)  # slots per page of a contiguous cache: the first that divides its length
_SLOTS = 512  # per block, about as many as the block of a contiguous kernel has keys; not tuned on a TPU
_TABLE_BYTES = 1008 * KIB  # of scalar memory; 16 KiB more do not compile for a v5e and a v6e
OPTIONS = {"pages_per_block": "pages that the kernel copies and computes together, an integer from 1"}


def _reasons(spec: AttentionSpec, target: Target, mode: Mode, options: Mapping[str, Any]) -> Iterator[str]:
    if spec.query_length != 1:
        yield refusal("paged_attention", f"query_length={spec.query_length}", "which decodes", "1")
    size = _page_size(spec)
    if size is None:
        accepted = f"a page table, or multiples of {_PAGES[-1]}"
        yield refusal("paged_attention", f"key_value_length={spec.key_value_length}", "which reads pages", accepted)
    elif 4 * spec.batch * spec.num_kv_heads * spec.key_value_length // size > _TABLE_BYTES:
        yield (
            f"batch={spec.batch}, num_kv_heads={spec.num_kv_heads} and key_value_length={spec.key_value_length} in "
            f"pages of {size} slots are not supported by paged_attention, whose page table has 4 bytes of scalar "
            f"memory for each page of each KV head (accepted: {_TABLE_BYTES} bytes in all); use larger pages, or "
            "backend='chunked'."
        )


def _plan(spec: AttentionSpec, layout: Layout, target: Target, mode: Mode, options: Mapping[str, Any]) -> Plan:
    """Count the slots that each sequence sees, and make the table. Options: see :data:`OPTIONS`.

    Slots that are not seen are copied with their page. If the output is not finite, or if the kernel cannot read
    the pool as it is, the slots that are seen are gathered, and the kernel runs on these. It cannot read the pool
    where a sequence sees a page outside of it, or a slot behind one that it does not see (by key positions).
    """
    per_block = _pages_per_block(spec, options)
    table, outside = pages_in_pool(spec, layout)
    heads = jnp.arange(spec.num_kv_heads, dtype=jnp.int32)[None, :, None]
    pages = _contiguous(spec) if table is None else table[:, None] * spec.num_kv_heads + heads
    mask = may_attend(spec, layout)
    seen = jnp.ones((1, 1), bool) if mask is None else mask[:, 0, 0]
    seen = jnp.broadcast_to(seen, (spec.batch, spec.key_value_length))
    lengths = seen.sum(1, dtype=jnp.int32)
    leading = jnp.arange(spec.key_value_length) < lengths[:, None]
    nowhere = jnp.zeros(spec.batch, bool) if outside is None else (outside & seen).any(1)
    readable = (leading == seen).all() & ~nowhere.any()
    interpreted = pltpu.force_tpu_interpret_mode if mode == "interpret" else contextlib.nullcontext
    decode = functools.partial(_decode, per_block=per_block, interpreted=interpreted)

    def attend(
        query: Float[Array, "b 1 n h"],
        key: Float[Array, "rows slots k h"],
        value: Float[Array, "rows slots k h"],
        terms: Terms,
    ) -> Float[Array, "b 1 n h"]:
        pools = [x.swapaxes(1, 2).reshape(-1, _page_size(spec), spec.head_dim) for x in (key, value)]
        out = decode(spec, lengths, pages, query, *pools)
        finite = readable & jnp.isfinite(out).all()
        return lax.cond(finite, lambda: out, lambda: _gathered(spec, decode, pages, seen, nowhere, query, pools))

    page = _page_size(spec) or 1
    return Plan.stateless(attend, key_blocks=(page, page * per_block))


def _gathered(
    spec: AttentionSpec,
    decode: Callable[..., Array],
    pages: Int[Array, "b k pages_per_sequence"],
    seen: Bool[Array, "b slots"],
    nowhere: Bool[Array, " b"],
    query: Float[Array, "b 1 n h"],
    pools: list[Float[Array, "pages page_size h"]],
) -> Float[Array, "b 1 n h"]:
    """``decode`` of the slots that are seen, moved to the front; NaN in the heads that see one that is not finite.

    One sequence after the other, so that the slots of one are in memory twice. ``nowhere``: which of them see a slot
    that is not in the pool.
    """
    alone = dataclasses.replace(spec, batch=1)

    def of_one(one: tuple[Array, ...]) -> Float[Array, "1 n h"]:
        pages, seen, nowhere, query = one
        rows = [x[pages].reshape(spec.num_kv_heads, -1, spec.head_dim) for x in pools]
        finite = functools.reduce(jnp.logical_and, (jnp.isfinite(x).all(-1) for x in rows))
        order = jnp.argsort(~seen, stable=True)
        ordered = (jnp.where((finite & seen)[..., None], x, 0)[:, order] for x in rows)
        ordered = (x.reshape(-1, _page_size(spec), spec.head_dim) for x in ordered)
        good = jnp.isfinite(query).all(-1, keepdims=True)
        lengths = seen.sum(dtype=jnp.int32)[None]
        out = decode(alone, lengths, _contiguous(alone), jnp.where(good, query, 0)[None], *ordered)[0]
        spoilt = jnp.repeat((seen & ~finite).any(1) | nowhere, spec.group_size)[None, :, None]
        return jnp.where(spoilt | (~good & seen.any()), jnp.nan, out)

    return lax.map(of_one, (pages, seen, nowhere, query))


def _decode(
    spec: AttentionSpec,
    lengths: Int[Array, " b"],
    pages: Int[Array, "b k pages_per_sequence"],
    query: Float[Array, "b 1 n h"],
    key: Float[Array, "pages page_size h"],
    value: Float[Array, "pages page_size h"],
    *,
    per_block: int,
    interpreted: Callable[[], Any],
) -> Float[Array, "b 1 n h"]:
    """The kernel on float32 queries: it then keeps the output in float32 from block to block."""
    from jax.experimental.pallas.ops.tpu import paged_attention as kernel  # noqa: PLC0415 (JAX may drop it)

    query = query.astype(jnp.float32).reshape(-1, spec.group_size, spec.head_dim) * spec.softmax_scale
    table = pages.reshape(-1, pages.shape[-1])
    with interpreted(), jax.default_matmul_precision("default"):
        out = kernel.paged_attention(
            query,
            key[None],
            value[None],
            jnp.repeat(lengths, spec.num_kv_heads),
            jnp.pad(table, ((0, 0), (0, -table.shape[1] % per_block))),
            pages_per_compute_block=per_block,
            attn_logits_soft_cap=spec.logits_soft_cap,
        )
    return out.reshape(spec.batch, 1, spec.num_heads, -1).astype(spec.dtype)


def _page_size(spec: AttentionSpec) -> int | None:
    """Slots of a page; None for contiguous keys that are no whole number of pages."""
    whole = (size for size in _PAGES if spec.key_value_length % size == 0)
    return spec.page_size or next(whole, None)


def _contiguous(spec: AttentionSpec) -> Int[Array, "b k pages_per_sequence"]:
    """The pages of keys ``[batch, kv_heads, length, head_dim]``."""
    count = spec.batch * spec.num_kv_heads * spec.key_value_length // (_page_size(spec) or 1)
    return jnp.arange(count, dtype=jnp.int32).reshape(spec.batch, spec.num_kv_heads, -1)


def _pages_per_block(spec: AttentionSpec, options: Mapping[str, Any]) -> int:
    size = _page_size(spec) or 1
    pages = options.get("pages_per_block", max(1, _SLOTS // size))
    if not is_whole(pages):
        raise ValueError(
            f"paged_attention: pages_per_block={pages!r} is not accepted; it is {OPTIONS['pages_per_block']}."
        )
    return min(pages, spec.key_value_length // size)


PAGED_ATTENTION = VendorKernel(
    name="paged_attention",
    allowed=Takes(
        features=frozenset({
            "causal", "bidirectional", "soft_cap", "scale", "positions", "lengths", "grouped_queries", "cross_length",
            "pages",
        }),
        dtypes=("bfloat16",),
        head_dims=(128, 256),
        because={
            "dtype": "which rounds keys and values to bfloat16",
            "head_dims": "whose blocks are whole lanes",
            "window": "which reads the leading slots of a sequence",
            "kv_dtype": "whose scales have the size of the numbers that they belong to",
        },
    ),
    platform="tpu",
    module=_MODULE,
    reasons=_reasons,
    options=OPTIONS,
    make=_plan,
)  # fmt: skip
