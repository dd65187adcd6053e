"""Code that Kascade's Pallas kernels share: queries as rows, the position of a row, and the keys that it sees.

Row ``g * block_q + t`` of a block is query ``t`` of the block in head ``g`` of the group, so that one load of keys
serves the whole group. One list holds the blocks of all query tiles of all KV heads of all sequences.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from ..contract import AttentionSpec
from .block_sizes import TileBlocks
from .kernels import Kernels
from .selection import Places
from .settings import Settings, Tiling
from .xla import tiled, untiled

# The value of a hidden score: below every other, and finite, so that no difference of two is NaN.
HIDDEN = float(jnp.finfo(jnp.float32).min)
_UNSEEING_QUERY, _UNSEEN_KEY = -1, -2  # ids that match nothing


class Placed(NamedTuple):
    """The position of the first query of every query tile of every sequence, the keys of every sequence, and ids.

    Ids of queries are padded as query tiles are, those of keys to whole tiles; () where there are none.
    """

    firsts: Int[Array, " sequences_and_tiles"]
    lengths: Int[Array, " sequences"]
    ids: tuple[()] | tuple[Int[Array, "b tiles_q"], Int[Array, "b padded"]]


@dataclasses.dataclass(frozen=True)
class PallasKernels(Kernels):
    """Attention to listed tiles and the pooled mass, of rows and padded heads; the device's form does the rest."""

    @property
    def blocks(self) -> TileBlocks:
        """How a kernel cuts the problem."""
        raise NotImplementedError

    @property
    def row_block(self) -> int:
        """Queries of a block of rows."""
        raise NotImplementedError

    def mass_of_rows(self, rows: Array, keys: Array, placed: Placed) -> Float[Array, "..."]:
        """The pooled mass by query tile, part of it, and unit."""
        raise NotImplementedError

    def attend_rows(
        self, rows: Array, keys: Array, values: Array, tiles: Array, counts: Array, placed: Placed
    ) -> Float[Array, "blocks rows v"]:
        """Attention to the first ``counts [query tiles]`` of the listed ``tiles [query tiles, slots]``."""
        raise NotImplementedError

    def pooled_mass(self, places: Places, query: Array, key: Array) -> Array:
        """As :meth:`Kernels.pooled_mass`."""
        spec, tiling = self.spec, self.tiling
        mass = self.mass_of_rows(tiled(query, *self._tiles), self.heads(key), self._placed(places))
        return mass.reshape(spec.batch, spec.num_kv_heads, tiling.query_tiles, -1, tiling.units).sum(3)

    def attend(self, places: Places, query: Array, key: Array, value: Array, listed: Array) -> Array:
        """As :meth:`Kernels.attend`."""
        listed = listed.reshape(-1, listed.shape[-1])
        # Unused slots (-1, at the end) repeat the last tile.
        tiles = jnp.where(listed < 0, jnp.maximum(listed.max(-1, keepdims=True), 0), listed)
        counts = (listed >= 0).sum(-1, dtype=jnp.int32)
        rows, keys, values = tiled(query, *self._tiles), self.heads(key), self.heads(value)
        out = self.attend_rows(rows, keys, values, tiles, counts, self._placed(places))
        return untiled(out, *self._tiles)

    @property
    def _tiles(self) -> tuple[AttentionSpec, Tiling, int, int]:
        return self.spec, self.tiling, self.blocks.tile_q, self.row_block

    @property
    def tiles(self) -> int:
        """Query tiles of all sequences and KV heads."""
        return self.spec.batch * self.spec.num_kv_heads * self.tiling.query_tiles

    @property
    def kv_blocks(self) -> int:
        """TileBlocks of one sequence of keys, padded to whole tiles."""
        return self.tiling.units * self.blocks.blocks_kv

    def sequence(self, tile: Any) -> Any:
        """The sequence that query tile ``tile`` of the list belongs to."""
        return tile // (self.spec.num_kv_heads * self.tiling.query_tiles)

    def heads(self, x: Float[Array, "b s k d"]) -> Float[Array, "heads padded d"]:
        """Keys or values of every sequence and KV head, padded with zeros to whole tiles."""
        b, s, k, d = x.shape
        x = jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, self.tiling.units * self.tiling.unit - s), (0, 0)))
        return x.reshape(b * k, -1, d)

    def _placed(self, places: Places) -> Placed:
        b, tiling = self.spec.batch, self.tiling
        firsts = jnp.asarray(places.query_positions)[:, :: tiling.query_tile]
        firsts = jnp.broadcast_to(firsts, (b, tiling.query_tiles)).reshape(-1)
        lengths = jnp.broadcast_to(jnp.asarray(places.lengths), (b,))
        if places.query_segment_ids is None or places.key_value_segment_ids is None:
            return Placed(firsts, lengths, ())
        queries, keys = jnp.asarray(places.query_segment_ids), jnp.asarray(places.key_value_segment_ids)
        queries = jnp.broadcast_to(queries, (b, tiling.padded_queries)).reshape(b, tiling.query_tiles, -1)
        behind = self.blocks.tile_q - tiling.query_tile
        queries = jnp.pad(queries, ((0, 0), (0, 0), (0, behind)), constant_values=_UNSEEING_QUERY).reshape(b, -1)
        behind = tiling.units * tiling.unit - keys.shape[1]
        keys = jnp.pad(jnp.broadcast_to(keys, (b, keys.shape[1])), ((0, 0), (0, behind)), constant_values=_UNSEEN_KEY)
        ids = jnp.where(queries < 0, _UNSEEING_QUERY, queries), jnp.where(keys < 0, _UNSEEN_KEY, keys)
        return Placed(firsts, lengths, ids)

    def queries_of(self, tile: Any, offset: Any, firsts: Any, lengths: Any) -> Queries:
        """The queries of query tile ``tile`` from its ``offset`` on, from the scalars above (inside a kernel)."""
        tiling, sequence = self.tiling, self.sequence(tile)
        index = tile % tiling.query_tiles
        there = jnp.minimum(tiling.query_tile, self.spec.query_length - index * tiling.query_tile)
        return Queries(firsts[sequence * tiling.query_tiles + index] + offset, there - offset, lengths[sequence])

    def scores(self, query: Float[Array, "rows h"], key: Float[Array, "keys h"]) -> Float[Array, "rows keys"]:
        """Scaled and capped products, float32."""
        score = product(query, key, (1, 1)) * self.spec.softmax_scale
        cap = self.spec.logits_soft_cap
        return score if cap is None else cap * jnp.tanh(score / cap)


@dataclasses.dataclass(frozen=True, slots=True)
class Queries:
    """Consecutive queries: the position of the first, how many there are, and the keys of their sequence."""

    first: Any
    number: Any
    length: Any

    def all_see(self, end: Any) -> Any:
        """Whether all of them see every key before slot ``end``, if there are no segments."""
        return (end <= self.first + 1) & (end <= self.length)

    def visible(
        self, place: Int[Array, "rows 1"], slot: Int[Array, "1 keys"], ids: tuple[Any, Any] | None
    ) -> Bool[Array, "rows keys"]:
        """Which row sees which key; ``place`` counts queries from the first. Padding rows see none."""
        position = jnp.where(place < self.number, self.first + place, -1)
        seen = (slot <= position) & (slot < self.length)
        return seen if ids is None else seen & (ids[0] == ids[1])


def product(left: Array, right: Array, contracted: tuple[int, int]) -> Array:
    """A product of two matrices in float32, in full.

    Products of bfloat16 are exact in float32 as they are, and Mosaic rejects a higher precision for them.
    """
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else lax.Precision.DEFAULT
    dims = (((contracted[0],), (contracted[1],)), ((), ()))
    return lax.dot_general(left, right, dims, precision=precision, preferred_element_type=jnp.float32)


def token_reasons(settings: Settings) -> tuple[str, ...]:
    """Why no Pallas kernel takes these settings."""
    if settings.granularity == "tile":
        return ()
    reason = (
        "granularity='token' is not supported by kascade's Pallas kernels, which load whole tiles; use "
        "granularity='tile', or kernel='xla'."
    )
    return (reason,)


def block_visible(
    kernels: PallasKernels, queries: Queries, shape: tuple[int, ...], begin: Any, id_refs: Any, some: Any
) -> Bool[Array, "rows keys"]:
    """What each row of a block sees of the keys ``some`` of a block, which begin at slot ``begin``; for TPUs."""
    # block_q is a power of two: the row's place in its head is what remains of its number.
    place = lax.broadcasted_iota(jnp.int32, shape, 0) & (kernels.blocks.block_q - 1)
    slot = begin + lax.broadcasted_iota(jnp.int32, shape, 1)
    if not id_refs:
        return queries.visible(place, slot, None)
    return queries.visible(place, slot, (jnp.tile(id_refs[0][...], (kernels.spec.group_size, 1)), id_refs[1][:, some]))


def where_needed(there: Any, for_all: Any, has_ids: bool, work: Callable[..., None]) -> None:
    """Run ``work(masked)`` once if ``there``; unmasked if every row sees every key (never with segments)."""
    if has_ids:
        pl.when(there)(functools.partial(work, masked=True))
        return
    pl.when(there & for_all)(functools.partial(work, masked=False))
    pl.when(there & ~for_all)(functools.partial(work, masked=True))
