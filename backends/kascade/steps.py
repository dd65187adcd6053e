"""An anchor in a decode step: one query row per head, against the keys as a cache holds them.

The scores of a row are linear in the length, so they are computed whole. The mass is read from them, and a dense layer
weighs the values with them. The products are those of ``backends.decode_step``, which read a cache in one run.
Attention to a selection is the loop of ``xla.py``, with one row per query head.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .. import decode_step, standard
from ..contract import AttentionSpec
from .selection import Selection, TileLayout
from .selection import select as select_by
from .settings import Ablation, Tiling


def select(
    spec: AttentionSpec,
    tiling: Tiling,
    layout: TileLayout,
    query: Float[Array, "b 1 n h"],
    key: Float[Array, "b s k h"],
    value: Float[Array, "b s k v"] | None = None,
    ablation: Ablation | None = None,
) -> tuple[Selection, Float[Array, "b 1 n v"] | None]:
    """The selection of an anchor for one new token; with ``value``, also dense attention's output."""
    mass, weights, total, seen = pooled_mass(spec, tiling, layout, query, key)
    selection = select_by(tiling, layout, mass[:, :, None], ablation)
    if value is None:
        return selection, None
    read = seen if spec.has_segment_ids or spec.has_seq_lengths else None
    out = decode_step.weigh(weights, value.swapaxes(1, 2), read) / total
    return selection, out.reshape(spec.batch, 1, spec.num_heads, -1).astype(query.dtype)


def pooled_mass(
    spec: AttentionSpec,
    tiling: Tiling,
    layout: TileLayout,
    query: Float[Array, "b 1 n h"],
    key: Float[Array, "b s k h"],
) -> tuple[Float[Array, "b k units"], Float[Array, "b k g s"], Float[Array, "b k g 1"], Bool[Array, "b s"]]:
    """The mass of every unit; the weights of all keys and their sums, from which it follows; which keys are seen."""
    b, k, g, s = spec.batch, spec.num_kv_heads, spec.group_size, spec.key_value_length
    layout = layout.of_all(b)
    logits = decode_step.scores(query.reshape(b, k, g, -1), key.swapaxes(1, 2)) * spec.softmax_scale
    if spec.logits_soft_cap is not None:
        logits = spec.logits_soft_cap * jnp.tanh(logits / spec.logits_soft_cap)
    slots = jnp.arange(s, dtype=jnp.int32)
    seen = slots[None] <= layout.query_positions
    seen = seen & (slots[None] < layout.lengths[:, None])
    if layout.query_segment_ids is not None and layout.key_value_segment_ids is not None:
        ids = layout.query_segment_ids
        seen = seen & (ids == layout.key_value_segment_ids) & (ids >= 0)
    weights, total, _ = standard.exponentials(logits, seen[:, None, None])
    mass = (weights / total).sum(2)
    mass = jnp.pad(mass, ((0, 0), (0, 0), (0, tiling.units * tiling.unit - s)))
    return mass.reshape(b, k, tiling.units, tiling.unit).sum(-1), weights, total, seen
