"""The gradient of attention to listed tiles, as a Pallas kernel for TPUs.

The kernel walks over the pairs of tiles twice (``pallas_rows.Visits``): in the order of the queries for their gradient,
in that of the keys for the gradients of keys and values. So each block of a gradient is written once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from .pallas_rows import PallasKernels, Visits, block_visible, loaded, product, where_needed


def gradient_call(
    kernels: PallasKernels, by: Literal["query", "key"], dims: tuple[int, ...], v_dim: int, visits: Visits
) -> Callable[..., list[Array]]:
    """The kernel over the pairs of one KV head: every block of an owner stays while its others pass.

    Grid: blocks of an owner, pairs, blocks of the other.
    """
    tiling, blocks, spec = kernels.tiling, kernels.blocks, kernels.spec
    n_rows, parts, splits = spec.group_size * blocks.block_q, blocks.blocks_q, blocks.blocks_kv
    owner_blocks, other_blocks = (parts, splits) if by == "query" else (splits, parts)

    def blocks_of(mine: Any, pair: Any, its: Any, head: Any, codes: Any, count: Any, *_: Any) -> tuple[Any, Any]:
        """Of rows and of keys, in their head. Behind the last pair the same block again, which is not loaded again."""
        its = jnp.where(pair < count[0], its, other_blocks - 1)
        owner = codes[pair] // visits.others * owner_blocks + mine
        other = codes[pair] % visits.others * other_blocks + its
        return (owner, other) if by == "query" else (other, owner)

    def tile(mine: Any, pair: Any, its: Any, head: Any, *lists: Any) -> tuple[Any, Any]:
        row_block = blocks_of(mine, pair, its, head, *lists)[0]
        return head[0] * tiling.query_tiles + row_block // parts, row_block % parts

    def rows_of_head(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, n_rows, width), lambda *at: (blocks_of(*at)[0], 0, 0))

    def keys_of_head(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, blocks.block_kv, width), lambda *at: (0, blocks_of(*at)[1], 0))

    widths = spec.head_dim, v_dim
    query, d_out, *others = loaded(kernels, tile, lambda *at: blocks_of(*at)[1], widths, widths)
    owner_size = tiling.query_tiles * parts if by == "query" else kernels.kv_blocks * blocks.block_kv
    lead = (owner_size, n_rows) if by == "query" else (1, owner_size)
    return pl.pallas_call(
        functools.partial(_gradient, kernels=kernels, by=by, others=visits.others),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(owner_blocks, visits.codes.shape[1], other_blocks),
            in_specs=[query, d_out, rows_of_head(2), *others],
            out_specs=[(rows_of_head if by == "query" else keys_of_head)(dim) for dim in dims],
        ),
        out_shape=[jax.ShapeDtypeStruct((*lead, dim), jnp.float32) for dim in dims],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 3),
        interpret=kernels.interpret,
        name=f"kascade_gradient_by_{by}",
    )


def _gradient(
    head_ref: Any,
    codes_ref: Any,
    count_ref: Any,
    firsts_ref: Any,
    lengths_ref: Any,
    query_ref: Any,
    d_out_ref: Any,
    scalars_ref: Any,
    key_ref: Any,
    value_ref: Any,
    *refs: Any,
    kernels: PallasKernels,
    by: Literal["query", "key"],
    others: int,
) -> None:
    """One block of queries against one block of keys: what they add to the gradients of the owner."""
    n_ids = 2 * kernels.spec.has_segment_ids
    id_refs, gradient_refs, blocks, tiling = refs[:n_ids], refs[n_ids:], kernels.blocks, kernels.tiling
    mine, pair, its = (pl.program_id(axis) for axis in range(3))
    owner, other = codes_ref[pair] // others, codes_ref[pair] % others
    (tile, part), (unit, split) = ((owner, mine), (other, its)) if by == "query" else ((other, its), (owner, mine))
    queries = kernels.queries_of(
        head_ref[0] * tiling.query_tiles + tile, part * blocks.block_q, firsts_ref, lengths_ref
    )
    begin = unit * blocks.tile_kv + split * blocks.block_kv

    @pl.when((its == 0) & ((pair == 0) | (codes_ref[jnp.maximum(pair - 1, 0)] // others != owner)))
    def _() -> None:
        for ref in gradient_refs:
            ref[...] = jnp.zeros_like(ref)

    def work(masked: bool) -> None:
        query, d_out, of_rows = query_ref[...], d_out_ref[...], (scalars_ref[:, :1], scalars_ref[:, 1:])
        for at in range(0, blocks.block_kv, blocks.step_kv):
            some = pl.ds(at, blocks.step_kv)
            key, shape = key_ref[some, :], (query.shape[0], blocks.step_kv)
            seen = block_visible(kernels, queries, shape, begin + at, id_refs, some) if masked else None
            probability, d_score = kernels.pair(query, d_out, *of_rows, key, value_ref[some, :], seen)
            if by == "query":
                gradient_refs[0][...] += product(d_score, key, (1, 0))
            else:
                gradient_refs[0][some, :] += product(d_score, query, (0, 0))
                gradient_refs[1][some, :] += product(probability, d_out, (0, 0))

    for_all = queries.all_see(begin + blocks.block_kv) & (queries.number >= blocks.block_q)
    where_needed(pair < count_ref[0], for_all, bool(id_refs), work)
