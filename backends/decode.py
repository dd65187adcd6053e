"""A few query rows against many keys: the decode step on a CPU, without gradients.

It is the plain formula of ``standard``: with so few rows the scores are linear in the key length, and the time is that
of reading the keys and values. The two products are written in the form that XLA computes at the memory's rate on a
CPU; other forms run at a tenth of it. Keys and values should lie in memory as a cache holds them, heads before length
(``models.KVCache``).
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from . import standard
from .contract import NO_TERMS, AttentionSpec, Carry, Layout, Plan, Terms, may_attend


def plan(spec: AttentionSpec, layout: Layout) -> Plan:
    """Plan a decode step; ``spec`` needs no gradient and announces no terms but sinks."""
    return Plan(functools.partial(_attend, spec, may_attend(spec, layout)))


def _attend(
    spec: AttentionSpec,
    mask: Bool[Array, "#b #n #t #s"] | None,
    query: Float[Array, "b t n h"],
    key: Float[Array, "b s k h"],
    value: Float[Array, "b s k v"] | None,
    layer: int,
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
    weights, total, top = standard.exponentials(logits, mask, standard.sink_logits(terms))
    out = weigh(weights.reshape(b, kv_heads, rows, -1), value)[..., : spec.value_head_dim]
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


def weigh(weights: Float[Array, "b k r s"], value: Float[Array, "b k s v"]) -> Float[Array, "b k r v"]:
    """Sums of values weighted by float32 ``weights``, which are rounded to the values' dtype; float32."""
    rows = weights.shape[2]
    weights = _two_rows(weights.astype(value.dtype))
    return jnp.einsum("bkrs,bksv->bkrv", weights, value, preferred_element_type=jnp.float32)[:, :, :rows]


def _two_rows(x: Float[Array, "b k r d"]) -> Float[Array, "b k r2 d"]:
    """A single row doubled: for one row XLA writes its own loop, scalar in bfloat16; for two it calls a kernel."""
    return x if x.shape[2] > 1 else jnp.concatenate([x, x], axis=2)
