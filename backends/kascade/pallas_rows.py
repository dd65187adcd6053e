"""Code that Kascade's Pallas kernels share: queries as rows, the position of a row, and the keys that it sees.

Row ``g * block_q + t`` of a block is query ``t`` of the block in head ``g`` of the group, so that one load of keys
serves the whole group. One list holds the blocks of all query tiles of all KV heads of all sequences.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from ..contract import AttentionSpec
from ..devices import Platform, Target
from .block_sizes import TileBlocks
from .kernels import Kernels
from .selection import TileLayout
from .settings import Settings, Tiling
from .xla import tiled, untiled

# The value of a hidden score: below every other, and finite, so that no difference of two is NaN.
HIDDEN = float(jnp.finfo(jnp.float32).min)
_UNSEEING_QUERY, _UNSEEN_KEY = -1, -2  # ids that match nothing


class Listed(NamedTuple):
    """The tiles of keys that each query tile visits ``[query tiles, slots]``: the first ``counts [query tiles]``."""

    tiles: Array
    counts: Array


class FlatLayout(NamedTuple):
    """The position of the first query of every query tile of every sequence, the keys of every sequence, and ids.

    Ids of queries are padded as query tiles are, those of keys to whole tiles; () where there are none.
    """

    firsts: Int[Array, " sequences_and_tiles"]
    lengths: Int[Array, " sequences"]
    ids: tuple[()] | tuple[Int[Array, "b tiles_q"], Int[Array, "b padded"]]


@dataclasses.dataclass(frozen=True)
class PallasKernels(Kernels):
    """Attention to listed tiles and the pooled mass, of rows and padded heads; the device's form does the rest.

    ``cut(spec, tiling, settings)`` makes the blocks, and ``misfits(spec, tiling, settings, target)`` says why a device
    of ``platform`` cannot hold them. On any other the kernels are interpreted.
    """

    platform: ClassVar[Platform]
    cut: ClassVar[Callable[[AttentionSpec, Tiling, Settings], TileBlocks]]
    misfits: ClassVar[Callable[[AttentionSpec, Tiling, Settings, Target], Iterator[str]]]

    @classmethod
    def refuses(cls, spec: AttentionSpec, settings: Settings, target: Target) -> tuple[str, ...]:
        """Refuses single keys, and what does not fit the device."""
        if settings.granularity != "tile":
            reason = (
                "granularity='token' is not supported by kascade's Pallas kernels, which load whole tiles; use "
                "granularity='tile', or kernel='xla'."
            )
            return (reason,)
        fits = target.platform != cls.platform
        return () if fits else tuple(cls.misfits(spec, Tiling.of(spec, settings), settings, target))

    @functools.cached_property
    def blocks(self) -> TileBlocks:
        """How a kernel cuts the problem."""
        return type(self).cut(self.spec, self.tiling, self.settings)

    @property
    def row_block(self) -> int:
        """Queries of a block of rows."""
        return self.blocks.block_q

    def mass_of_rows(self, rows: Array, keys: Array, flat: FlatLayout) -> Float[Array, "..."]:
        """The pooled mass by query tile, part of it, and unit."""
        raise NotImplementedError

    def attend_rows(
        self, rows: Array, keys: Array, values: Array, listed: Listed, flat: FlatLayout, *, return_residuals: bool
    ) -> tuple[Array, ...]:
        """Attention to the listed tiles.

        The output ``[blocks, rows, v]``. With ``return_residuals`` it is float32, and the log-sum-exp
        ``[blocks, rows]`` of every row follows.
        """
        raise NotImplementedError

    def gradients_of_rows(
        self, by: Literal["query", "key"], rows: Rows, keys: Array, values: Array, visits: Visits, flat: FlatLayout
    ) -> tuple[Array, ...]:
        """Float32 gradients of the rows, or of keys and values; of what nothing visits they are not defined."""
        raise NotImplementedError

    def pooled_mass(self, layout: TileLayout, query: Array, key: Array) -> Array:
        """As :meth:`Kernels.pooled_mass`."""
        spec, tiling = self.spec, self.tiling
        mass = self.mass_of_rows(tiled(query, *self._tiles), self.heads(key), self._flat_layout(layout))
        return mass.reshape(spec.batch, spec.num_kv_heads, tiling.query_tiles, -1, tiling.units).sum(3)

    def attend(self, layout: TileLayout, query: Array, key: Array, value: Array, listed: Array) -> Array:
        """As :meth:`Kernels.attend`."""
        return untiled(self._attended(layout, query, key, value, listed, return_residuals=False)[0], *self._tiles)

    def attend_with_residuals(
        self, layout: TileLayout, query: Array, key: Array, value: Array, listed: Array
    ) -> tuple[Array, Any] | None:
        """As :meth:`Kernels.attend_with_residuals`: the output not rounded, as rows, and the rows' log-sum-exp."""
        if not self.lists_fit(listed.shape[-1]):
            return None
        residuals = self._attended(layout, query, key, value, listed, return_residuals=True)
        return untiled(residuals[0], *self._tiles).astype(query.dtype), residuals

    def gradients(
        self, layout: TileLayout, query: Array, key: Array, value: Array, listed: Array, residuals: Any, d_out: Array
    ) -> tuple[Array, Array, Array]:
        """As :meth:`Kernels.gradients`: queries visit their keys, then keys the queries that list them."""
        (out, log_sums), d_outs = residuals, tiled(d_out, *self._tiles)
        scalars = jnp.stack([log_sums, (out * d_outs.astype(jnp.float32)).sum(-1)], axis=-1)
        rows, keys, values = Rows(tiled(query, *self._tiles), d_outs, scalars), self.heads(key), self.heads(value)
        listed = listed.reshape(self.spec.batch * self.spec.num_kv_heads, -1, listed.shape[-1])
        flat = self._flat_layout(layout)
        found = []
        for by in ("query", "key"):
            visits = Visits.of(listed, self.tiling.units, by)
            for gradient in self.gradients_of_rows(by, rows, keys, values, visits, flat):
                parts = gradient.reshape(*visits.visited.shape, -1, gradient.shape[-1])
                found.append(jnp.where(visits.visited[..., None, None], parts, 0.0))
        (b, s, k, _), d_query = key.shape, found[0].reshape(rows.query.shape)
        d_key, d_value = (x.reshape(b, k, -1, x.shape[-1])[:, :, :s].swapaxes(1, 2) for x in found[1:])
        return untiled(d_query, *self._tiles).astype(query.dtype), d_key.astype(key.dtype), d_value.astype(value.dtype)

    def lists_fit(self, slots: int) -> bool:
        """Whether a backward pass can hold the lists of ``slots`` tiles, and number their pairs."""
        return self.tiling.query_tiles * self.tiling.units < 2**31

    def _attended(
        self, layout: TileLayout, query: Array, key: Array, value: Array, listed: Array, *, return_residuals: bool
    ) -> tuple[Array, ...]:
        listed = listed.reshape(-1, listed.shape[-1])
        # Unused slots (-1, at the end) repeat the last tile.
        tiles = jnp.where(listed < 0, jnp.maximum(listed.max(-1, keepdims=True), 0), listed)
        lists = Listed(tiles, (listed >= 0).sum(-1, dtype=jnp.int32))
        rows, keys, values = tiled(query, *self._tiles), self.heads(key), self.heads(value)
        flat = self._flat_layout(layout)
        return self.attend_rows(rows, keys, values, lists, flat, return_residuals=return_residuals)

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
        return lax.div(tile, jnp.int32(self.spec.num_kv_heads * self.tiling.query_tiles))

    def heads(self, x: Float[Array, "b s k d"]) -> Float[Array, "heads padded d"]:
        """Keys or values of every sequence and KV head, padded with zeros to whole tiles."""
        b, s, k, d = x.shape
        x = jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, self.tiling.units * self.tiling.unit - s), (0, 0)))
        return x.reshape(b * k, -1, d)

    def _flat_layout(self, layout: TileLayout) -> FlatLayout:
        b, tiling = self.spec.batch, self.tiling
        firsts = jnp.asarray(layout.query_positions)[:, :: tiling.query_tile]
        firsts = jnp.broadcast_to(firsts, (b, tiling.query_tiles)).reshape(-1)
        lengths = jnp.broadcast_to(jnp.asarray(layout.lengths), (b,))
        if layout.query_segment_ids is None or layout.key_value_segment_ids is None:
            return FlatLayout(firsts, lengths, ())
        queries, keys = jnp.asarray(layout.query_segment_ids), jnp.asarray(layout.key_value_segment_ids)
        queries = jnp.broadcast_to(queries, (b, tiling.padded_queries)).reshape(b, tiling.query_tiles, -1)
        behind = self.blocks.tile_q - tiling.query_tile
        queries = jnp.pad(queries, ((0, 0), (0, 0), (0, behind)), constant_values=_UNSEEING_QUERY).reshape(b, -1)
        behind = tiling.units * tiling.unit - keys.shape[1]
        keys = jnp.pad(jnp.broadcast_to(keys, (b, keys.shape[1])), ((0, 0), (0, behind)), constant_values=_UNSEEN_KEY)
        ids = jnp.where(queries < 0, _UNSEEING_QUERY, queries), jnp.where(keys < 0, _UNSEEN_KEY, keys)
        return FlatLayout(firsts, lengths, ids)

    def queries_of(self, tile: Any, offset: Any, firsts: Any, lengths: Any) -> Queries:
        """The queries of query tile ``tile`` from its ``offset`` on, from the scalars above (inside a kernel)."""
        tiling, sequence = self.tiling, self.sequence(tile)
        index = lax.rem(tile, jnp.int32(tiling.query_tiles))
        there = jnp.minimum(tiling.query_tile, self.spec.query_length - index * tiling.query_tile)
        return Queries(firsts[sequence * tiling.query_tiles + index] + offset, there - offset, lengths[sequence])

    def scores(self, query: Float[Array, "rows h"], key: Float[Array, "keys h"]) -> Float[Array, "rows keys"]:
        """Scaled and capped products, float32."""
        score = product(query, key, (1, 1)) * self.spec.softmax_scale
        cap = self.spec.logits_soft_cap
        return score if cap is None else cap * jnp.tanh(score / cap)

    def pair(
        self, query: Array, d_out: Array, log_sum: Array, mean: Array, key: Array, value: Array, seen: Array | None
    ) -> tuple[Float[Array, "rows keys"], Float[Array, "rows keys"]]:
        """The probabilities of rows and keys, and the gradients of their products, in the dtype of the query.

        ``log_sum`` and ``mean`` are the columns ``[rows, 1]`` of :class:`Rows`.
        """
        score, cap = self.scores(query, key), self.spec.logits_soft_cap
        probability = jnp.exp(score - log_sum)
        d_score = probability * (product(d_out, value, (1, 1)) - mean) * self.spec.softmax_scale
        if cap is not None:
            d_score *= 1.0 - (score / cap) ** 2
        if seen is not None:
            probability, d_score = jnp.where(seen, probability, 0.0), jnp.where(seen, d_score, 0.0)
        return probability.astype(query.dtype), d_score.astype(query.dtype)


class Rows(NamedTuple):
    """Queries as rows, the gradients of their outputs, and two numbers of a row.

    These are its log-sum-exp, and the mean of its probabilities' gradients: the sum of output x gradient.
    """

    query: Float[Array, "blocks rows h"]
    d_out: Float[Array, "blocks rows v"]
    scalars: Float[Array, "blocks rows 2"]


class Visits(NamedTuple):
    """The pairs of query tile and key tile that meet, of each KV head of each sequence, one owner after the other.

    ``codes`` holds ``owner * others + other``, ascending. Behind the last pair it repeats. The pairs of owner ``i``
    are ``starts[i]`` to ``starts[i + 1] - 1``.
    """

    codes: Int[Array, "heads pairs"]
    starts: Int[Array, "heads owners_and_1"]
    others: int

    @property
    def visited(self) -> Bool[Array, "heads owners"]:
        """Whether an owner has a pair."""
        return self.starts[:, 1:] > self.starts[:, :-1]

    @staticmethod
    def of(listed: Int[Array, "heads query_tiles slots"], units: int, by: Literal["query", "key"]) -> Visits:
        """The pairs of lists as :meth:`Kernels.attend` takes them: a sort inverts them, and nothing is scattered."""
        heads, tiles, _ = listed.shape
        tile = jnp.broadcast_to(jnp.arange(tiles, dtype=jnp.int32).reshape(1, -1, 1), listed.shape)
        owners, others = (tiles, units) if by == "query" else (units, tiles)
        codes = tile * units + listed if by == "query" else listed * tiles + tile
        codes = jnp.sort(jnp.where(listed < 0, owners * others, codes).reshape(heads, -1))
        firsts = jnp.arange(owners + 1, dtype=jnp.int32) * others
        starts = jax.vmap(lambda row: jnp.searchsorted(row, firsts).astype(jnp.int32))(codes)
        last = jnp.take_along_axis(codes, jnp.maximum(starts[:, -1:] - 1, 0), axis=1)
        return Visits(
            jnp.where(codes == owners * others, jnp.where(starts[:, -1:] > 0, last, 0), codes), starts, others
        )


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


def loaded(
    kernels: PallasKernels,
    tile: Callable[..., tuple[Any, Any]],
    block: Callable[..., Any],
    rows: Sequence[int],
    keys: Sequence[int],
) -> list[pl.BlockSpec]:
    """What a step loads of arrays of rows and of keys of these widths, and of the ids where there are some; for TPUs.

    Of its place in the grid and the prefetched scalars ``tile`` makes a query tile of the list and a block of rows in
    it, and ``block`` the block of keys in their head.
    """
    spec, tiles, blocks = kernels.spec, kernels.tiling.query_tiles, kernels.blocks

    def of_rows(*at: Any) -> tuple[Any, ...]:
        this, part = tile(*at)
        return this * blocks.blocks_q + part, 0, 0

    def of_keys(*at: Any) -> tuple[Any, ...]:
        return tile(*at)[0] // tiles, block(*at), 0

    def of_query_ids(*at: Any) -> tuple[Any, ...]:
        this, part = tile(*at)
        return kernels.sequence(this), this % tiles * blocks.blocks_q + part, 0

    def of_key_ids(*at: Any) -> tuple[Any, ...]:
        return kernels.sequence(tile(*at)[0]), 0, block(*at)

    ids = [((blocks.block_q, 1), of_query_ids), ((1, blocks.block_kv), of_key_ids)] if spec.has_segment_ids else []
    shapes = [
        *(((spec.group_size * blocks.block_q, width), of_rows) for width in rows),
        *(((blocks.block_kv, width), of_keys) for width in keys),
        *ids,
    ]
    return [pl.BlockSpec((None, *shape), index) for shape, index in shapes]


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
