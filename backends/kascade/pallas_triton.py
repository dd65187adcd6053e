"""Kascade's kernels in Pallas' Triton dialect for NVIDIA GPUs: attention to listed tiles, and the pooled mass. Forward.

The computations are those of ``pallas_tpu.py`` and ``pallas_tpu_mass.py``. Triton has no prefetched scalars, so one
program takes some rows of a query tile and loops over the list itself, reading each tile in place. A slot without a
tile costs nothing. Pallas' interpreter runs the kernels anywhere; they have never run on a GPU here.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from ..contract import AttentionSpec
from ..devices import Target
from .block_sizes import gpu_blocks, gpu_reasons
from .pallas_rows import HIDDEN, Geometry, Queries, product
from .pallas_tpu import token_reasons, visits
from .selection import Places
from .settings import Settings, Tiling


def refuses(spec: AttentionSpec, settings: Settings, target: Target) -> tuple[str, ...]:
    """Refuses single keys; on a GPU also blocks that do not fit it."""
    reasons = token_reasons(settings)
    if target.platform == "cuda" and not reasons:
        reasons = tuple(gpu_reasons(spec, Tiling.of(spec, settings), settings, target))
    return reasons


def geometry(spec: AttentionSpec, tiling: Tiling, settings: Settings) -> Geometry:
    """The blocks for a GPU's shared memory."""
    return Geometry(spec, tiling, gpu_blocks(spec, tiling, settings))


def dense(geometry: Geometry, places: Places, query: Array, key: Array, value: Array) -> None:
    """There is no such pass."""


def attend(
    geometry: Geometry,
    places: Places,
    query: Float[Array, "batch q_len heads head_dim"],
    key: Float[Array, "batch kv_len kv_heads head_dim"],
    value: Float[Array, "batch kv_len kv_heads v_dim"],
    listed: Int[Array, "batch kv_heads query_tiles slots"],
    *,
    interpret: bool,
) -> Float[Array, "batch q_len heads v_dim"]:
    """As :meth:`attnsuite.backends.kascade.kernels.Kernels.attend`."""
    spec = geometry.spec
    rows, block, v_dim = geometry.rows(query, geometry.blocks.tile_q), geometry.blocks.block_q, value.shape[-1]
    ids = geometry.segment_ids(places)
    tiles, counts = visits(listed)
    out = pl.pallas_call(
        functools.partial(_attend, geometry=geometry),
        grid=(rows.shape[1] // block, geometry.tiles),
        in_specs=[
            pl.BlockSpec((None, block, spec.head_dim), lambda part, tile: (tile, part, 0)),
            *(pl.no_block_spec,) * (6 + len(ids)),
        ],
        out_specs=pl.BlockSpec((None, block, v_dim), lambda part, tile: (tile, part, 0)),
        out_shape=jax.ShapeDtypeStruct((*rows.shape[:2], v_dim), query.dtype),
        compiler_params=_compiler_params(geometry),
        interpret=interpret,
        name="kascade_attend",
    )(
        rows,
        geometry.heads(key),
        geometry.heads(value),
        tiles,
        counts,
        geometry.firsts(places),
        geometry.lengths(places),
        *ids,
    )
    return geometry.queries(out, geometry.blocks.tile_q)


def pooled_mass(
    geometry: Geometry,
    places: Places,
    query: Float[Array, "batch q_len heads head_dim"],
    key: Float[Array, "batch kv_len kv_heads head_dim"],
    *,
    interpret: bool,
) -> Float[Array, "batch kv_heads query_tiles units"]:
    """As :meth:`attnsuite.backends.kascade.kernels.Kernels.pooled_mass`."""
    spec, tiling = geometry.spec, geometry.tiling
    rows, block, ids = (
        geometry.rows(query, geometry.blocks.tile_q),
        geometry.blocks.block_q,
        geometry.segment_ids(places),
    )
    parts = rows.shape[1] // block
    mass = pl.pallas_call(
        functools.partial(_sum, geometry=geometry),
        grid=(parts, geometry.tiles),
        in_specs=[
            pl.BlockSpec((None, block, spec.head_dim), lambda part, tile: (tile, part, 0)),
            *(pl.no_block_spec,) * (3 + len(ids)),
        ],
        out_specs=pl.no_block_spec,
        out_shape=jax.ShapeDtypeStruct((geometry.tiles, parts, tiling.units), jnp.float32),
        compiler_params=_compiler_params(geometry),
        interpret=interpret,
        name="kascade_pooled_mass",
    )(rows, geometry.heads(key), geometry.firsts(places), geometry.lengths(places), *ids)
    return mass.sum(1).reshape(spec.batch, spec.num_kv_heads, tiling.query_tiles, tiling.units)


def _compiler_params(geometry: Geometry) -> plgpu.CompilerParams:
    # As FlashAttention takes them for such tiles; not tuned on a GPU, where nothing of this has run.
    large = geometry.blocks.block_q * geometry.spec.head_dim > 64 * 64
    return plgpu.CompilerParams(num_warps=8 if large else 4, num_stages=2)


class _Rows:
    """Inside a kernel: the rows of one program, and what they see."""

    def __init__(self, geometry: Geometry, firsts_ref: Any, lengths_ref: Any, id_refs: Any) -> None:
        blocks, tiling = geometry.blocks, geometry.tiling
        # Read once: inside a loop an interpreter does not know them.
        self.part, self.tile = pl.program_id(0), pl.program_id(1)
        self.head, self.sequence = self.tile // tiling.query_tiles, geometry.sequence(self.tile)
        self.queries: Queries = geometry.queries_of(self.tile, 0, firsts_ref, lengths_ref)
        # tile_q is a power of two: the row's place in its head is what remains of its number.
        self._place = (self.part * blocks.block_q + jnp.arange(blocks.block_q, dtype=jnp.int32)) & (blocks.tile_q - 1)
        self._step, self._ids = blocks.step_kv, id_refs
        if id_refs:
            at = self.tile % tiling.query_tiles * blocks.tile_q + self._place
            self._query_ids = id_refs[0][self.sequence, at]

    def visible(self, begin: Any) -> Bool[Array, "rows keys"]:
        """Which row sees which of the keys of the step that begins at slot ``begin``."""
        slot = begin + jnp.arange(self._step, dtype=jnp.int32)
        if not self._ids:
            return self.queries.visible(self._place[:, None], slot[None, :], None)
        ids = self._query_ids[:, None], self._ids[1][self.sequence, pl.ds(begin, self._step)][None, :]
        return self.queries.visible(self._place[:, None], slot[None, :], ids)


def _attend(
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    tiles_ref: Any,
    counts_ref: Any,
    firsts_ref: Any,
    lengths_ref: Any,
    *refs: Any,
    geometry: Geometry,
) -> None:
    *id_refs, out_ref = refs
    blocks, rows = geometry.blocks, _Rows(geometry, firsts_ref, lengths_ref, id_refs)
    steps, query = jnp.int32(blocks.tile_kv // blocks.step_kv), query_ref[...]

    def step(number: Any, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        before, total, acc = state
        # div and rem of what is not negative: Triton's dialect cannot lower Python's signs of % inside a loop.
        begin = tiles_ref[rows.tile, lax.div(number, steps)] * blocks.tile_kv + lax.rem(number, steps) * blocks.step_kv
        some = pl.ds(begin, blocks.step_kv)
        seen = rows.visible(begin)
        score = jnp.where(seen, geometry.scores(query, key_ref[rows.head, some, :]), HIDDEN)
        highest = jnp.maximum(before, score.max(axis=1))
        weight = jnp.where(seen, jnp.exp(score - highest[:, None]), 0.0)
        decay, value = jnp.exp(before - highest), value_ref[rows.head, some, :]
        acc = decay[:, None] * acc + product(weight.astype(value.dtype), value, (1, 0))
        return highest, decay * total + weight.sum(axis=1), acc

    start = (*_nothing_seen(blocks.block_q), jnp.zeros((blocks.block_q, out_ref.shape[-1]), jnp.float32))
    _, total, acc = lax.fori_loop(0, counts_ref[rows.tile] * steps, step, start)
    out_ref[...] = (acc / jnp.where(total == 0.0, 1.0, total)[:, None]).astype(out_ref.dtype)


def _sum(query_ref: Any, key_ref: Any, firsts_ref: Any, lengths_ref: Any, *refs: Any, geometry: Geometry) -> None:
    *id_refs, mass_ref = refs
    blocks, rows = geometry.blocks, _Rows(geometry, firsts_ref, lengths_ref, id_refs)
    steps, query = blocks.tile_kv // blocks.step_kv, query_ref[...]
    end = jnp.minimum(
        rows.queries.first + jnp.minimum(rows.queries.number, geometry.tiling.query_tile), rows.queries.length
    )
    visited = (end + blocks.tile_kv - 1) // blocks.tile_kv

    def score_of(begin: Any) -> tuple[Array, Array]:
        seen = rows.visible(begin)
        score = geometry.scores(query, key_ref[rows.head, pl.ds(begin, blocks.step_kv), :])
        return jnp.where(seen, score, HIDDEN), seen

    def log_sum(number: Any, state: tuple[Array, Array]) -> tuple[Array, Array]:
        before, total = state
        score, seen = score_of(number * blocks.step_kv)
        highest = jnp.maximum(before, score.max(axis=1))
        weight = jnp.where(seen, jnp.exp(score - highest[:, None]), 0.0)
        return highest, jnp.exp(before - highest) * total + weight.sum(axis=1)

    highest, total = lax.fori_loop(0, visited * steps, log_sum, _nothing_seen(blocks.block_q))
    log_sums = highest + jnp.log(jnp.where(total == 0.0, 1.0, total))

    def pool(tile: Any, _: None) -> None:
        def add(number: Any, mass: Array) -> Array:
            score, seen = score_of(tile * blocks.tile_kv + number * blocks.step_kv)
            return mass + jnp.where(seen, jnp.exp(score - log_sums[:, None]), 0.0).sum()

        mass_ref[rows.tile, rows.part, tile] = lax.fori_loop(0, steps, add, jnp.float32(0.0))

    def nothing(tile: Any, _: None) -> None:
        mass_ref[rows.tile, rows.part, tile] = jnp.float32(0.0)

    lax.fori_loop(0, visited, pool, None)
    lax.fori_loop(visited, geometry.tiling.units, nothing, None)


def _nothing_seen(rows: int) -> tuple[Float[Array, " rows"], Float[Array, " rows"]]:
    """Running maximum and sum of rows that have seen nothing."""
    return jnp.full(rows, HIDDEN, jnp.float32), jnp.zeros(rows, jnp.float32)
