"""A few query rows against many keys: the decode step on a CPU, without gradients.

It is the plain formula of ``standard``: with so few rows the scores are linear in the key length, and the time is that
of reading the keys and values. The two products are written in the form that XLA computes at the memory's rate on a
CPU; other forms run at a tenth of it. Keys and values should lie in memory as a cache holds them, heads before length
(``models.KVCache``). Values that no row sees, behind the lengths or in other documents, are read as zeros, block by
block, so that NaN in them reaches no row: a select over all values would write and read them once more.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from . import standard
from .contract import NO_TERMS, AttentionSpec, Carry, Layout, Plan, Terms, may_attend
from .devices import Target
from .manual_axes import varying

_SLOTS = 512  # of a block of values that is copied with zeros where nobody looks, inside a core's cache


def plan(spec: AttentionSpec, layout: Layout, target: Target) -> Plan:
    """Plan a decode step; ``spec`` needs no gradient and announces no terms but sinks."""
    if spec.has_segment_ids and spec.query_length > 1:  # its rows may be of different documents
        return standard.STANDARD.plan(spec, layout, target=target)
    mask, read = may_attend(spec, layout), None
    if mask is not None and (spec.has_segment_ids or spec.has_seq_lengths):
        read = mask.any((1, 2))
    return Plan(functools.partial(_attend, spec, mask, read))


def _attend(
    spec: AttentionSpec,
    mask: Bool[Array, "#b #n #t #s"] | None,
    read: Bool[Array, "#b s"] | None,
    query: Float[Array, "b t n h"],
    key: Float[Array, "b s k h"],
    value: Float[Array, "b s k v"] | None,
    layer: int | None,
    carry: Carry,
    terms: Terms = NO_TERMS,
) -> tuple[Any, Carry]:
    b, t, n, h = query.shape
    kv_heads, rows = spec.num_kv_heads, spec.group_size * t
    grouped = query.reshape(b, t, kv_heads, -1, h).transpose(0, 2, 3, 1, 4).reshape(b, kv_heads, rows, h)
    key = key.swapaxes(1, 2)  # cancels the transpose of a cache
    value = key if value is None else value.swapaxes(1, 2)
    logits = scores(grouped, key).reshape(b, n, t, -1) * spec.softmax_scale
    if spec.logits_soft_cap is not None:
        logits = spec.logits_soft_cap * jnp.tanh(logits / spec.logits_soft_cap)
    sinks = None if terms.sinks is None else jnp.asarray(terms.sinks, jnp.float32)[None, :, None, None]
    weights, total, top = standard.exponentials(logits, mask, sinks)
    out = weigh(weights.reshape(b, kv_heads, rows, -1), value, read, spec.value_head_dim)
    out = out.reshape(b, kv_heads, -1, t, spec.value_head_dim)
    # The outputs are divided, not the weights, because there are fewer of them.
    out = out / total.reshape(b, kv_heads, -1, t, 1)
    out = out.transpose(0, 3, 1, 2, 4).reshape(b, t, n, -1).astype(query.dtype)
    return ((out, standard.log_sum_exp(total, top)) if spec.return_log_sum_exp else out), carry


def scores(query: Float[Array, "b k r h"], key: Float[Array, "b k s h"]) -> Float[Array, "b k r s"]:
    """Products of each KV head's query rows with its keys, float32, in a cache's layout (heads before length).

    The keys are the left operand: as the right operand, with several rows, XLA's kernel packs every key anew.

    The barrier keeps XLA's simplifier from swapping the operands again to save the small transpose.
    """
    rows = query.shape[2]
    if query.dtype != jnp.float32:
        query = _two_rows(query)
    turned = jnp.einsum("bksh,bkrh->bksr", key, query, preferred_element_type=jnp.float32)
    return lax.optimization_barrier(turned)[..., :rows].swapaxes(2, 3)


def weigh(
    weights: Float[Array, "b k r s"],
    value: Float[Array, "b k s d"],
    read: Bool[Array, "#b s"] | None = None,
    value_head_dim: int | None = None,
) -> Float[Array, "b k r v"]:
    """Sums of values weighted by float32 ``weights``, which are rounded to the values' dtype; float32.

    The values are the first ``value_head_dim`` numbers of ``value``; None: all. Those that are not ``read`` count as
    zero, whatever they are.
    """
    rows, slots = weights.shape[2], weights.shape[3]
    weights = _two_rows(weights.astype(value.dtype))
    if read is None:
        return _weighted(weights, value)[:, :, :rows, :value_head_dim]  # the fewer outputs are cut
    dims = value.shape[3] if value_head_dim is None else value_head_dim

    def of_block(start: Any, width: int) -> Array:
        some = (lax.dynamic_slice_in_dim(x, start, width, axis) for x, axis in ((weights, 3), (value, 2), (read, 1)))
        of_weights, of_values, mask = some
        return _weighted(of_weights, jnp.where(mask[:, None, :, None], of_values[..., :dims], 0))

    blocks, rest = divmod(slots, _SLOTS)
    total = of_block(blocks * _SLOTS, rest) if rest else jnp.zeros((*weights.shape[:3], dims), jnp.float32)
    if blocks:
        total = varying(total, (weights, value, read))
        total = lax.fori_loop(0, blocks, lambda i, total: total + of_block(i * _SLOTS, _SLOTS), total)
    return total[:, :, :rows]


def _weighted(weights: Array, value: Array) -> Array:
    return jnp.einsum("bkrs,bksv->bkrv", weights, value, preferred_element_type=jnp.float32)


def _two_rows(x: Float[Array, "b k r d"]) -> Float[Array, "b k r2 d"]:
    """A single row doubled: for one row XLA writes its own loop, scalar in bfloat16; for two it calls a kernel."""
    return x if x.shape[2] > 1 else jnp.concatenate([x, x], axis=2)
