"""Attention to listed tiles of keys, its gradient, and the mass of every tile, as Pallas kernels for TPUs.

Attention is FlashAttention-2's recurrence (arXiv 2307.08691) over the tiles that a query tile visits (the reuse layers
of arXiv 2512.16391, with tiles for tokens). The list is prefetched into scalar memory. It names the block of keys and
values that each grid step loads, so that nothing is gathered in the device's memory. In a decode step most of a query
tile is padding.

Kascade's anchor layers choose by the mass: probabilities after the softmax, summed over the queries of a tile and the
heads of a group. A first pass finds each row's log-sum-exp, a second sums probabilities per tile. The log-sums never
leave the core, and scores are never written. Keys in the future are not loaded.

The gradient walks over the pairs of tiles twice (``pallas_rows.Visits``): in the order of the queries for their
gradient, in that of the keys for the gradients of keys and values. So each block of a gradient is written once.

Pallas' interpreter runs the kernels anywhere.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from .block_sizes import LANES, tpu_blocks, tpu_reasons
from .pallas_rows import (
    HIDDEN,
    FlatLayout,
    Listed,
    PallasKernels,
    Queries,
    Rows,
    Visits,
    block_visible,
    loaded,
    product,
    where_needed,
)

# The part of the scalar memory (1 MiB in every generation) for the list of one call. A longer list takes several calls.
LIST_BYTES = 512 * 1024


@dataclasses.dataclass(frozen=True)
class TpuKernels(PallasKernels):
    """The kernels in blocks for a TPU's vector memory."""

    platform = "tpu"
    cut = staticmethod(tpu_blocks)
    misfits = staticmethod(tpu_reasons)

    def attend_rows(
        self, rows: Array, keys: Array, values: Array, listed: Listed, flat: FlatLayout, *, return_residuals: bool
    ) -> tuple[Array, ...]:
        """As :meth:`PallasKernels.attend_rows`; a long list takes several calls."""
        n_rows, slots, v_dim = rows.shape[1], listed.tiles.shape[-1], values.shape[-1]
        calls = -(-self.tiles * (slots + 1) * 4 // LIST_BYTES)
        per_call = -(-self.tiles // calls)
        n_blocks, dtype = per_call * self.blocks.blocks_q, jnp.float32 if return_residuals else rows.dtype
        out_shape = [jax.ShapeDtypeStruct((n_blocks, n_rows, v_dim), dtype)]
        if return_residuals:
            out_shape.append(jax.ShapeDtypeStruct((n_blocks, n_rows, LANES), jnp.float32))
        call = _call(self, slots, out_shape)
        spare = calls * per_call - self.tiles
        tiles = jnp.pad(listed.tiles, ((0, spare), (0, 0))).reshape(calls, per_call * slots)
        counts = jnp.pad(listed.counts, (0, spare)).reshape(calls, per_call)
        columns = _as_columns(flat.ids)

        def part(of_call: tuple[Array, Array, Array]) -> tuple[Array, ...]:
            start, tiles, counts = of_call
            # One dimension each: an array of more is padded to 128 lanes in scalar memory.
            out, *log_sums = call(start[None], tiles, counts, *flat[:2], rows, keys, values, *columns)
            return out, *(x[..., 0] for x in log_sums)

        found = lax.map(part, (jnp.arange(calls, dtype=jnp.int32) * per_call, tiles, counts))
        return tuple(x.reshape(-1, *x.shape[2:])[: self.tiles * self.blocks.blocks_q] for x in found)

    def lists_fit(self, slots: int) -> bool:
        """As :meth:`PallasKernels.lists_fit`: a call has the pairs of one KV head of one sequence."""
        return self.tiling.query_tiles * slots * 4 <= LIST_BYTES and super().lists_fit(slots)

    def gradients_of_rows(
        self, by: Literal["query", "key"], rows: Rows, keys: Array, values: Array, visits: Visits, flat: FlatLayout
    ) -> tuple[Array, ...]:
        """As :meth:`PallasKernels.gradients_of_rows`, one KV head of one sequence after the other."""
        heads = keys.shape[0]
        columns, scalars = _as_columns(flat.ids), rows.scalars.reshape(heads, -1, *rows.scalars.shape[1:])
        dims = (rows.query.shape[-1],) if by == "query" else (keys.shape[-1], values.shape[-1])
        call = _gradient_call(self, by, dims, values.shape[-1], visits)

        def of_head(of_call: tuple[Array, ...]) -> list[Array]:
            head, codes, count, scalars = of_call
            # The scalars of a row are padded to 128 lanes: those of one head at a time.
            operands = rows.query, rows.d_out, scalars, keys, values, *columns
            return call(head[None], codes, count[None], *flat[:2], *operands)

        xs = jnp.arange(heads, dtype=jnp.int32), visits.codes, visits.starts[:, -1], scalars
        return tuple(lax.map(of_head, xs))

    def mass_of_rows(self, rows: Array, keys: Array, flat: FlatLayout) -> Float[Array, "blocks 1 units"]:
        """As :meth:`PallasKernels.mass_of_rows`."""
        tiling, blocks, head_dim = self.tiling, self.blocks, (self.spec.head_dim,)
        n_rows = rows.shape[1]

        def tile(step: Any, *_: Any) -> tuple[Any, Any]:
            return step // blocks.blocks_q, step % blocks.blocks_q

        def block_kv(step: Any, _turn: Any, block: Any, firsts: Any, lengths: Any) -> Any:
            """The block, or the last one that is needed: behind it nothing is loaded."""
            this, part = tile(step)
            return jnp.minimum(block, _last_block(self, self.queries_of(this, part * blocks.block_q, firsts, lengths)))

        return pl.pallas_call(
            functools.partial(_sum, kernels=self),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=(rows.shape[0], 2, self.kv_blocks),
                in_specs=loaded(self, tile, block_kv, head_dim, head_dim),
                out_specs=pl.BlockSpec((None, 1, tiling.units), lambda step, *_: (step, 0, 0)),
                scratch_shapes=[pltpu.VMEM((n_rows, LANES), jnp.float32), pltpu.VMEM((n_rows, LANES), jnp.float32)],
            ),
            out_shape=jax.ShapeDtypeStruct((rows.shape[0], 1, tiling.units), jnp.float32),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
            interpret=self.interpret,
            name="kascade_pooled_mass",
        )(*flat[:2], rows, keys, *_as_columns(flat.ids))


def _as_columns(ids: tuple[Array, ...]) -> tuple[Array, ...]:
    return (ids[0][:, :, None], ids[1][:, None, :]) if ids else ()


def _call(kernels: TpuKernels, slots: int, out_shape: list[jax.ShapeDtypeStruct]) -> Callable[..., list[Array]]:
    """The kernel over as many blocks of queries as ``out_shape`` has, with lists of ``slots`` tiles of keys."""
    head_dim, (steps, n_rows, v_dim) = kernels.spec.head_dim, out_shape[0].shape
    parts, splits = kernels.blocks.blocks_q, kernels.blocks.blocks_kv

    def tile(step: Any, slot: Any, start: Any, *_: Any) -> tuple[Any, Any]:
        return jnp.minimum(start[0] + step // parts, kernels.tiles - 1), step % parts  # the last call may have to spare

    def block_kv(step: Any, slot: Any, start: Any, tiles: Any, counts: Any, *_: Any) -> Any:
        """Behind the last listed tile the same block again, which is not loaded again."""
        index = step // parts
        part = jnp.where(slot // splits < counts[index], slot % splits, splits - 1)
        return tiles[index * slots + slot // splits] * splits + part

    return pl.pallas_call(
        functools.partial(_attend, kernels=kernels, slots=slots),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(steps, slots * splits),
            in_specs=loaded(kernels, tile, block_kv, (head_dim,), (head_dim, v_dim)),
            out_specs=[pl.BlockSpec((None, *out.shape[1:]), lambda step, *_: (step, 0, 0)) for out in out_shape],
            scratch_shapes=[
                pltpu.VMEM((n_rows, LANES), jnp.float32),
                pltpu.VMEM((n_rows, LANES), jnp.float32),
                pltpu.VMEM((n_rows, v_dim), jnp.float32),
            ],
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=kernels.interpret,
        name="kascade_attend",
    )


def _attend(*operands: Any, kernels: TpuKernels, slots: int) -> None:
    """One block of queries against one block of keys: the running maximum, sum and output of every row."""
    start_ref, tiles_ref, counts_ref, firsts_ref, lengths_ref, query_ref, key_ref, value_ref, *refs = operands
    n_ids = 2 * kernels.spec.has_segment_ids
    id_refs, (out_ref, *log_sum_refs, max_ref, sum_ref, acc_ref) = refs[:n_ids], refs[n_ids:]
    blocks, step, slot = kernels.blocks, pl.program_id(0), pl.program_id(1)
    index, part = step // blocks.blocks_q, step % blocks.blocks_q
    listed, split = slot // blocks.blocks_kv, slot % blocks.blocks_kv
    tile = jnp.minimum(start_ref[0] + index, kernels.tiles - 1)
    queries = kernels.queries_of(tile, part * blocks.block_q, firsts_ref, lengths_ref)
    begin = tiles_ref[index * slots + listed] * blocks.tile_kv + split * blocks.block_kv

    @pl.when(slot == 0)
    def _() -> None:
        max_ref[...] = jnp.full_like(max_ref, HIDDEN)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def work(masked: bool) -> None:
        for at in range(0, blocks.block_kv, blocks.step_kv):
            some = pl.ds(at, blocks.step_kv)
            score = kernels.scores(query_ref[...], key_ref[some, :])
            seen = block_visible(kernels, queries, score.shape, begin + at, id_refs, some) if masked else None
            weight, decay = _soften(score, seen, max_ref, sum_ref)
            value = value_ref[some, :]
            acc_ref[...] = decay * acc_ref[...] + product(weight.astype(value.dtype), value, (1, 0))

    where_needed(listed < counts_ref[index], queries.all_see(begin + blocks.block_kv), bool(id_refs), work)

    @pl.when(slot == slots * blocks.blocks_kv - 1)
    def _() -> None:
        total = sum_ref[:, :1]
        out_ref[...] = (acc_ref[...] / jnp.where(total == 0.0, 1.0, total)).astype(out_ref.dtype)
        for log_sum_ref in log_sum_refs:
            log_sum_ref[...] = max_ref[...] + jnp.log(jnp.where(sum_ref[...] == 0.0, 1.0, sum_ref[...]))


def _soften(score: Array, seen: Array | None, max_ref: Any, sum_ref: Any) -> tuple[Array, Array]:
    """The weights of a step, and the factor to what was summed before; raises each row's maximum and sum."""
    score = score if seen is None else jnp.where(seen, score, HIDDEN)
    before = max_ref[:, :1]
    highest = jnp.maximum(before, score.max(axis=1, keepdims=True))
    weight = jnp.exp(score - highest)
    weight = weight if seen is None else jnp.where(seen, weight, 0.0)  # of a row that sees nothing yet, exp(0)
    decay = jnp.exp(before - highest)
    total = decay * sum_ref[:, :1] + weight.sum(axis=1, keepdims=True)
    max_ref[...] = jnp.broadcast_to(highest, max_ref.shape)
    sum_ref[...] = jnp.broadcast_to(total, sum_ref.shape)
    return weight, decay


def _last_block(kernels: TpuKernels, queries: Queries) -> Any:
    """The last block of keys that some query of a block may see."""
    end = jnp.minimum(queries.first + jnp.minimum(queries.number, kernels.blocks.block_q), queries.length)
    return jnp.maximum(end - 1, 0) // kernels.blocks.block_kv


def _sum(firsts_ref: Any, lengths_ref: Any, query_ref: Any, key_ref: Any, *refs: Any, kernels: TpuKernels) -> None:
    """One block of queries against one block of keys, in the first or the second pass.

    ``max_ref`` and ``sum_ref`` hold the running maximum and sum of each row in the first pass; after it the log-sum-exp
    stands in place of the maximum.
    """
    *id_refs, mass_ref, max_ref, sum_ref = refs
    blocks = kernels.blocks
    step, turn, block = (pl.program_id(axis) for axis in range(3))
    queries = kernels.queries_of(
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
        score = kernels.scores(query_ref[...], key_ref[some, :])
        return score, block_visible(kernels, queries, score.shape, begin + at, id_refs, some) if masked else None

    def log_sum(at: int, masked: bool) -> None:
        _soften(*score_of(at, masked), max_ref, sum_ref)

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

    there = (block <= _last_block(kernels, queries)) & (queries.number > 0)
    for_all = queries.all_see(begin + blocks.block_kv) & (queries.number >= blocks.block_q)
    for number, one in enumerate((log_sum, pool)):
        where_needed(there & (turn == number), for_all, bool(id_refs), functools.partial(in_steps, one))


def _gradient_call(
    kernels: TpuKernels, by: Literal["query", "key"], dims: tuple[int, ...], v_dim: int, visits: Visits
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


def _gradient(*operands: Any, kernels: TpuKernels, by: Literal["query", "key"], others: int) -> None:
    """One block of queries against one block of keys: what they add to the gradients of the owner."""
    head_ref, codes_ref, count_ref, firsts_ref, lengths_ref, *rest = operands
    query_ref, d_out_ref, scalars_ref, key_ref, value_ref, *refs = rest
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
