"""The plain reference of Kascade, quadratic: every faster form is tested against it.

The mass is read from whole softmax rows. Attention to a selection is ``standard`` attention under an explicit mask.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .. import standard
from ..contract import AttentionSpec, Layout, may_attend
from ..devices import Target
from ..support import plan
from .selection import Selection, TileLayout, with_local
from .settings import Tiling


def probabilities(
    spec: AttentionSpec,
    layout: Layout,
    query: Float[Array, "batch q_len heads head_dim"],
    key: Float[Array, "batch kv_len kv_heads head_dim"],
) -> Float[Array, "batch heads q_len kv_len"]:
    """Dense attention of each query to each key, float32; a row that sees nothing is 0."""
    b, t, n, h = query.shape
    s, kv_heads = key.shape[1:3]
    grouped = query.reshape(b, t, kv_heads, n // kv_heads, h)
    logits = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=jnp.float32) * spec.softmax_scale
    if spec.logits_soft_cap is not None:
        logits = spec.logits_soft_cap * jnp.tanh(logits / spec.logits_soft_cap)
    weights, total, _ = standard.exponentials(logits.reshape(b, n, t, s), may_attend(spec, layout))
    return weights / total


def pooled(tiling: Tiling, x: Float[Array, "*lead q_len kv_len"]) -> Float[Array, "*lead query_tiles units"]:
    """Sums over the queries of each tile and the keys of each unit."""
    short = tiling.padded_queries - x.shape[-2], tiling.units * tiling.unit - x.shape[-1]
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, more) for more in short])
    shape = (*x.shape[:-2], tiling.query_tiles, tiling.query_tile, tiling.units, tiling.unit)
    return x.reshape(shape).sum((-3, -1))


def pooled_mass(
    spec: AttentionSpec,
    layout: Layout,
    tiling: Tiling,
    query: Float[Array, "batch q_len heads head_dim"],
    key: Float[Array, "batch kv_len kv_heads head_dim"],
) -> Float[Array, "batch kv_heads query_tiles units"]:
    """Attention mass of each unit, float32: summed over the rows of a query tile and the heads of a group.

    A row that sees a key counts 1 in total; a row that sees nothing, and a padding row of the last tile, counts 0.
    """
    probs = probabilities(spec, layout, query, key)
    b, _, t, s = probs.shape
    return pooled(tiling, probs.reshape(b, key.shape[2], -1, t, s).sum(2))


def attended(
    spec: AttentionSpec, layout: Layout, tiling: Tiling, selection: Selection
) -> Bool[Array, "batch heads q_len kv_len"]:
    """The whole mask of the pairs that are computed under ``selection``."""
    listed = with_local(tiling, TileLayout.of(spec, layout, tiling), selection)
    chosen = (listed[..., None] == jnp.arange(tiling.units, dtype=jnp.int32).reshape(1, 1, 1, 1, -1)).any(-2)
    chosen = jnp.repeat(jnp.repeat(chosen, tiling.query_tile, 2), tiling.unit, 3)
    chosen = jnp.repeat(chosen[:, :, : spec.query_length, : spec.key_value_length], spec.group_size, 1)
    mask = may_attend(spec, layout)
    return chosen if mask is None else chosen & mask


def under_mask(
    spec: AttentionSpec,
    query: Float[Array, "batch q_len heads head_dim"],
    key: Float[Array, "batch kv_len kv_heads head_dim"],
    value: Float[Array, "batch kv_len kv_heads v_dim"],
    mask: Bool[Array, "#batch #heads q_len kv_len"],
    target: Target,
) -> Float[Array, "batch q_len heads v_dim"]:
    """``standard`` attention to the pairs of ``mask`` alone."""
    bare = dataclasses.replace(
        spec, is_causal=False, has_segment_ids=False, has_positions=False, has_seq_lengths=False, has_mask=True
    )
    return plan(standard.STANDARD, bare, Layout(mask=mask), target=target).run(query, key, value)[0]
