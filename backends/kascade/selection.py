"""The selection: the keys that each query tile attends to, chosen by pooled attention mass.

Pure functions of arrays. Pooling is post-softmax (arXiv 2512.16391): probabilities, summed over the queries of a tile
and the query heads of a KV head. Candidates lie strictly before the tile's local region. The local region is always
attended to and never selected. So nothing is selected twice, and no selection looks ahead of its tile.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..contract import AttentionSpec, Layout
from .settings import Ablation, Tiling

_LARGE = np.int32(2**31 - 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """The selection of an anchor layer, handed to the layers after it: the carry of the ``kascade`` backend.

    ``selected [batch, kv_heads, query_tiles, slots]`` int32: indices of units (key tiles; single keys with
    ``granularity="token"``), ascending and distinct, then -1 to the end. ``count [batch, kv_heads, query_tiles]``
    int32: how many are not -1. The local region of a query tile is not included, because it follows from the tiling
    (:func:`with_local` adds it for kernels).
    """

    selected: Int[Array, "batch kv_heads query_tiles slots"]
    count: Int[Array, "batch kv_heads query_tiles"]

    def remapped(self, head_map: tuple[int, ...] | Array) -> Selection:
        """The selection for a reusing layer: its KV head ``h`` takes that of KV head ``head_map[h]``.

        An empty map, and one that maps each head to itself, change nothing.
        """
        if isinstance(head_map, tuple) and head_map in ((), tuple(range(self.selected.shape[1]))):
            return self
        heads = jnp.asarray(head_map)
        return Selection(self.selected[:, heads], self.count[:, heads])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class TileLayout:
    """The positions, lengths and ids of queries and keys, which decide visibility. Key positions are slots.

    ``first_local [batch or 1, query_tiles]``: the unit at which each query tile's local region begins. It is at most
    the unit that the end of the keys cuts, or the number of units if the end cuts none. ``query_positions`` and ids are
    padded to whole query tiles (ids with -1). ``lengths`` counts the key slots that exist. ``batch`` is 1 if all
    sequences have the same layout.
    """

    query_positions: Int[Array, "batch padded_queries"]
    first_local: Int[Array, "batch query_tiles"]
    lengths: Int[Array, " batch"]
    query_segment_ids: Int[Array, "batch padded_queries"] | None = None
    key_value_segment_ids: Int[Array, "batch kv_len"] | None = None

    @staticmethod
    def of(spec: AttentionSpec, layout: Layout, tiling: Tiling) -> TileLayout:
        """``layout``, padded; NumPy where they follow from the spec alone.

        Raises ValueError for key positions, which this backend takes to be slots.
        """
        if layout.key_value_positions is not None:
            raise ValueError(
                "kascade: key_value_positions are not supported, key positions are slots; leave them out, "
                "or use backend='chunked'."
            )
        pad = tiling.padded_queries - spec.query_length
        q_pos, lengths = layout.query_positions, layout.key_value_seq_lengths
        if q_pos is None:
            q_pos = np.arange(tiling.padded_queries, dtype=np.int32)[None]
        else:
            # Padding rows get the last row's position, so that kernels need no special case.
            q_pos = jnp.pad(jnp.asarray(q_pos, jnp.int32), ((0, 0), (0, pad)), mode="edge")
        if lengths is None:
            lengths = np.full((1,), spec.key_value_length, np.int32)
        q_seg, k_seg = layout.query_segment_ids, layout.key_value_segment_ids
        if q_seg is not None:
            q_seg = jnp.pad(jnp.asarray(q_seg, jnp.int32), ((0, 0), (0, pad)), constant_values=-1)
        # A unit that the end of the keys cuts is never selected, so that kernels read whole units.
        first = (q_pos[:, :: tiling.query_tile] // tiling.unit).clip(0, spec.key_value_length // tiling.unit)
        batch = max(x.shape[0] for x in (q_pos, lengths, q_seg) if x is not None)

        def spread(x: Any) -> Any:
            xp = np if isinstance(x, np.ndarray) else jnp
            return xp.broadcast_to(x, (batch, *x.shape[1:])).astype(np.int32)

        arrays: list[Any] = [x if x is None else spread(x) for x in (q_pos, first, lengths, q_seg, k_seg)]
        return TileLayout(*arrays)

    @property
    def batch(self) -> int:
        """Distinct rows: 1, or one per sequence."""
        return self.lengths.shape[0]

    def of_all(self, batch: int) -> TileLayout:
        """The same with one row per sequence."""
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape[1:])), self)


def may_see(
    query_positions: Int[Array, " rows"],
    slots: Int[Array, " keys"],
    length: Int[Array, ""],
    query_ids: Int[Array, " rows"] | None = None,
    key_ids: Int[Array, " keys"] | None = None,
) -> Bool[Array, "rows keys"]:
    """The pairs of rows and key slots that the contract lets attend: causal, inside length and segment."""
    ok = (slots[None] <= query_positions[:, None]) & ((slots >= 0) & (slots < length))[None]
    if query_ids is not None and key_ids is not None:
        ok = ok & (query_ids[:, None] == key_ids[None]) & (query_ids >= 0)[:, None]
    return ok


def candidates(tiling: Tiling, layout: TileLayout) -> Bool[Array, "batch query_tiles units"]:
    """Units that a query tile may select: strictly before its local region, and not all padding or other documents.

    Conservative in segments: a unit may be a candidate although no row of the tile sees a key in it.
    """
    units = jnp.arange(tiling.units, dtype=jnp.int32)
    ok = units[None, None] < jnp.asarray(layout.first_local)[:, :, None]
    ok = ok & (units[None] * tiling.unit < jnp.asarray(layout.lengths)[:, None])[:, None]
    if layout.query_segment_ids is not None and layout.key_value_segment_ids is not None:
        q_low, q_high = _id_bounds(layout.query_segment_ids, tiling.query_tile)
        k_low, k_high = _id_bounds(layout.key_value_segment_ids, tiling.unit)
        ok = ok & (k_low[:, None] <= q_high[:, :, None]) & (k_high[:, None] >= q_low[:, :, None])
    return ok


def choose(
    tiling: Tiling, mass: Float[Array, "*lead units"], candidate: Bool[Array, "*lead units"]
) -> tuple[Int[Array, "*lead slots"], Int[Array, "*lead"]]:
    """Indices of the candidates with the most mass, ascending, then -1; and their number.

    ``mass`` is not negative; ties go to the earlier unit. Of n candidates ``tiling.budgets[n]`` are taken.
    """
    count = jnp.asarray(tiling.budgets, jnp.int32)[jnp.minimum(candidate.sum(-1), len(tiling.budgets) - 1)]
    if tiling.slots == 0:
        return jnp.zeros((*mass.shape[:-1], 0), jnp.int32), count
    _, best = jax.lax.top_k(jnp.where(candidate, mass, -1.0), tiling.slots)
    rank = jnp.arange(tiling.slots, dtype=jnp.int32).reshape((1,) * (mass.ndim - 1) + (-1,))
    ascending = jnp.sort(jnp.where(rank < count[..., None], best.astype(jnp.int32), _LARGE), axis=-1)
    return jnp.where(ascending == _LARGE, -1, ascending), count


def select(
    tiling: Tiling,
    layout: TileLayout,
    mass: Float[Array, "batch kv_heads query_tiles units"],
    ablation: Ablation | None = None,
) -> Selection:
    """The candidates with the most mass of each KV head; with ``all_heads`` of all heads together."""
    if ablation == "all_heads":
        mass = jnp.broadcast_to(mass.sum(1, keepdims=True), mass.shape)
    allowed = candidates(tiling, layout.of_all(mass.shape[0]))[:, None]
    return Selection(*choose(tiling, mass, jnp.broadcast_to(allowed, mass.shape)))


def with_local(
    tiling: Tiling, layout: TileLayout, selection: Selection
) -> Int[Array, "batch kv_heads query_tiles slots_and_local"]:
    """Every unit that each query tile visits: the selected ones, then its local region, ascending; then -1.

    For kernels that walk one list. Local units beyond the end of the keys are left out. Local units beyond the diagonal
    are not: the kernel masks them.
    """
    batch, heads, tiles, _ = selection.selected.shape
    local = jnp.asarray(layout.first_local)[:, None, :, None] + jnp.arange(tiling.local_units, dtype=jnp.int32).reshape(
        1, 1, 1, -1
    )
    local = jnp.broadcast_to(jnp.where(local < tiling.units, local, -1), (batch, heads, tiles, tiling.local_units))
    both = jnp.concatenate([selection.selected, local], axis=-1)
    ascending = jnp.sort(jnp.where(both < 0, _LARGE, both), axis=-1)
    return jnp.where(ascending == _LARGE, -1, ascending)


def _id_bounds(ids: Int[Array, "batch length"], size: int) -> tuple[Array, Array]:
    """Smallest and largest id that is no padding, per run of ``size``; (large, -large) where all is padding."""
    ids = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % size)), constant_values=-1).reshape(ids.shape[0], -1, size)
    return jnp.where(ids < 0, _LARGE, ids).min(-1), jnp.where(ids < 0, -_LARGE, ids).max(-1)
