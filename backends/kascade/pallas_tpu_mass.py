"""The attention that each tile of keys gets from each query tile: a Pallas kernel for TPUs, in two passes.

Kascade's anchor layers choose by this mass (arXiv 2512.16391): probabilities after the softmax, summed over the queries
of a tile and the heads of a group. The first pass finds each row's log-sum-exp, the second sums probabilities per tile.
The log-sums never leave the core, and scores are never written. Keys in the future are not loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from .block_sizes import LANES
from .pallas_rows import HIDDEN, Geometry, Queries, block_visible, where_needed
from .selection import Places


def pooled_mass(
    geometry: Geometry,
    places: Places,
    query: Float[Array, "batch q_len heads head_dim"],
    key: Float[Array, "batch kv_len kv_heads head_dim"],
    *,
    interpret: bool,
) -> Float[Array, "batch kv_heads query_tiles units"]:
    """As :meth:`attnsuite.backends.kascade.kernels.Kernels.pooled_mass`."""
    spec, tiling, blocks = geometry.spec, geometry.tiling, geometry.blocks
    parts = blocks.blocks_q
    rows, keys, ids = geometry.rows(query, blocks.block_q), geometry.heads(key), geometry.segment_ids(places)
    n_rows = rows.shape[1]

    def block_kv(step: Any, block: Any, firsts: Any, lengths: Any) -> Any:
        """The block, or the last one that is needed: behind it nothing is loaded."""
        queries = geometry.queries_of(step // parts, step % parts * blocks.block_q, firsts, lengths)
        return jnp.minimum(block, _last_block(geometry, queries))

    def of_keys(step: Any, _turn: Any, block: Any, *at: Any) -> tuple[Any, ...]:
        return step // parts // tiling.query_tiles, block_kv(step, block, *at), 0

    def of_key_ids(step: Any, _turn: Any, block: Any, *at: Any) -> tuple[Any, ...]:
        return geometry.sequence(step // parts), 0, block_kv(step, block, *at)

    id_specs = [
        pl.BlockSpec(
            (None, blocks.block_q, 1),
            lambda step, *_: (geometry.sequence(step // parts), step % (tiling.query_tiles * parts), 0),
        ),
        pl.BlockSpec((None, 1, blocks.block_kv), of_key_ids),
    ]
    mass = pl.pallas_call(
        functools.partial(_sum, geometry=geometry),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(rows.shape[0], 2, geometry.kv_blocks),
            in_specs=[
                pl.BlockSpec((None, n_rows, spec.head_dim), lambda step, *_: (step, 0, 0)),
                pl.BlockSpec((None, blocks.block_kv, spec.head_dim), of_keys),
                *id_specs[: len(ids)],
            ],
            out_specs=pl.BlockSpec((None, 1, tiling.units), lambda step, *_: (step, 0, 0)),
            scratch_shapes=[pltpu.VMEM((n_rows, LANES), jnp.float32), pltpu.VMEM((n_rows, LANES), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((rows.shape[0], 1, tiling.units), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        interpret=interpret,
        name="kascade_pooled_mass",
    )(
        geometry.firsts(places),
        geometry.lengths(places),
        rows,
        keys,
        *((ids[0][:, :, None], ids[1][:, None, :]) if ids else ()),
    )
    return mass.reshape(spec.batch, spec.num_kv_heads, tiling.query_tiles, parts, tiling.units).sum(3)


def _last_block(geometry: Geometry, queries: Queries) -> Any:
    """The last block of keys that some query of a block may see."""
    end = jnp.minimum(queries.first + jnp.minimum(queries.number, geometry.blocks.block_q), queries.length)
    return jnp.maximum(end - 1, 0) // geometry.blocks.block_kv


def _sum(firsts_ref: Any, lengths_ref: Any, query_ref: Any, key_ref: Any, *refs: Any, geometry: Geometry) -> None:
    """One block of queries against one block of keys, in the first or the second pass.

    ``max_ref`` and ``sum_ref`` hold the running maximum and sum of each row in the first pass; after it the log-sum-exp
    stands in place of the maximum.
    """
    *id_refs, mass_ref, max_ref, sum_ref = refs
    blocks = geometry.blocks
    step, turn, block = (pl.program_id(axis) for axis in range(3))
    queries = geometry.queries_of(
        step // blocks.blocks_q, step % blocks.blocks_q * blocks.block_q, firsts_ref, lengths_ref
    )
    begin = block * blocks.block_kv

    @pl.when((turn == 0) & (block == 0))
    def _() -> None:
        max_ref[...] = jnp.full_like(max_ref, HIDDEN)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        mass_ref[...] = jnp.zeros_like(mass_ref)

    @pl.when((turn == 1) & (block == 0))
    def _() -> None:
        total = sum_ref[...]
        max_ref[...] += jnp.log(jnp.where(total == 0.0, 1.0, total))

    def score_of(at: int, masked: bool) -> tuple[Float[Array, "rows keys"], Bool[Array, "rows keys"] | None]:
        some = pl.ds(at, blocks.step_kv)
        score = geometry.scores(query_ref[...], key_ref[some, :])
        return score, block_visible(geometry, queries, score.shape, begin + at, id_refs, some) if masked else None

    def log_sum(at: int, masked: bool) -> None:
        score, seen = score_of(at, masked)
        score = score if seen is None else jnp.where(seen, score, HIDDEN)
        before = max_ref[:, :1]
        highest = jnp.maximum(before, score.max(axis=1, keepdims=True))
        weight = jnp.exp(score - highest)
        weight = weight if seen is None else jnp.where(seen, weight, 0.0)
        total = jnp.exp(before - highest) * sum_ref[:, :1] + weight.sum(axis=1, keepdims=True)
        max_ref[...] = jnp.broadcast_to(highest, max_ref.shape)
        sum_ref[...] = jnp.broadcast_to(total, sum_ref.shape)

    def pool(at: int, masked: bool) -> None:
        score, seen = score_of(at, masked)
        weight = jnp.exp(score - max_ref[:, :1])
        weight = weight if seen is None else jnp.where(seen, weight, 0.0)
        mass = weight.sum(axis=0, keepdims=True).sum(axis=1, keepdims=True)
        here = lax.broadcasted_iota(jnp.int32, mass_ref.shape, 1) == block // blocks.blocks_kv
        mass_ref[...] += jnp.where(here, mass, 0.0)

    def in_steps(one: Callable[[int, bool], None], masked: bool) -> None:
        for at in range(0, blocks.block_kv, blocks.step_kv):
            one(at, masked)

    there = (block <= _last_block(geometry, queries)) & (queries.number > 0)
    for_all = queries.all_see(begin + blocks.block_kv) & (queries.number >= blocks.block_q)
    for number, one in enumerate((log_sum, pool)):
        where_needed(there & (turn == number), for_all, bool(id_refs), functools.partial(in_steps, one))
