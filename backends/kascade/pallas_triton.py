"""Kascade's kernels in Pallas' Triton dialect for NVIDIA GPUs: attention to listed tiles, its gradient, pooled mass.

The computations are those of ``pallas_tpu.py``. Triton has no prefetched scalars, so one
program takes some rows of a query tile and loops over the list itself, reading each tile in place. A slot without a
tile costs nothing. Pallas' interpreter runs the kernels anywhere; they have never run on a GPU here.
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
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float

from .block_sizes import TileBlocks, gpu_blocks, gpu_reasons
from .pallas_rows import HIDDEN, FlatLayout, PallasKernels, Queries, Rows, Visits, product


@dataclasses.dataclass(frozen=True)
class TritonKernels(PallasKernels):
    """The kernels in blocks for a GPU's shared memory."""

    platform = "cuda"
    misfits = staticmethod(gpu_reasons)

    @functools.cached_property
    def blocks(self) -> TileBlocks:  # pyright: ignore[reportIncompatibleMethodOverride]  (kept)
        """How a kernel cuts the problem."""
        return gpu_blocks(self.spec, self.tiling, self.settings)

    @property
    def row_block(self) -> int:
        """Queries of a block of rows: a whole tile, of which a program takes a part."""
        return self.blocks.tile_q

    def attend_rows(
        self,
        rows: Array,
        keys: Array,
        values: Array,
        tiles: Array,
        counts: Array,
        flat: FlatLayout,
        *,
        return_residuals: bool,
    ) -> tuple[Array, ...]:
        """As :meth:`PallasKernels.attend_rows`."""
        out = [
            jax.ShapeDtypeStruct((*rows.shape[:2], values.shape[-1]), jnp.float32 if return_residuals else rows.dtype)
        ]
        if return_residuals:
            out.append(jax.ShapeDtypeStruct(rows.shape[:2], jnp.float32))
        operands = rows, keys, values, tiles, counts, *flat[:2], *flat.ids
        return tuple(self._call("kascade_attend", _attend, operands, out, [self._part(x) for x in out]))

    def gradients_of_rows(
        self, by: Literal["query", "key"], rows: Rows, keys: Array, values: Array, visits: Visits, flat: FlatLayout
    ) -> tuple[Array, ...]:
        """As :meth:`PallasKernels.gradients_of_rows`: a program owns some rows, or some keys."""
        blocks, heads, owners = self.blocks, *visits.visited.shape
        size, whole = (blocks.block_q, rows.query.shape[1]) if by == "query" else (blocks.step_kv, blocks.tile_kv)
        dims = (rows.query.shape[-1],) if by == "query" else (keys.shape[-1], values.shape[-1])
        operands = *rows, keys, values, visits.codes, visits.starts, *flat[:2], *flat.ids
        found = pl.pallas_call(
            functools.partial(_gradient, kernels=self, by=by, owners=owners, others=visits.others),
            grid=(whole // size, heads * owners),
            in_specs=(pl.no_block_spec,) * len(operands),
            out_specs=[pl.BlockSpec((None, size, dim), lambda mine, owner: (owner, mine, 0)) for dim in dims],
            out_shape=[jax.ShapeDtypeStruct((heads * owners, whole, dim), jnp.float32) for dim in dims],
            compiler_params=self._params,
            interpret=self.interpret,
            name=f"kascade_gradient_by_{by}",
        )(*operands)
        return tuple(found)

    def mass_of_rows(self, rows: Array, keys: Array, flat: FlatLayout) -> Float[Array, "tiles parts units"]:
        """As :meth:`PallasKernels.mass_of_rows`."""
        parts = rows.shape[1] // self.blocks.block_q
        out = jax.ShapeDtypeStruct((self.tiles, parts, self.tiling.units), jnp.float32)
        return self._call("kascade_pooled_mass", _sum, (rows, keys, *flat[:2], *flat.ids), out, pl.no_block_spec)

    def _part(self, rows: Any) -> pl.BlockSpec:
        """The rows of a program."""
        return pl.BlockSpec(
            (None, self.blocks.block_q, *rows.shape[2:]), lambda part, tile: (tile, part, *((0,) * len(rows.shape[2:])))
        )

    @property
    def _params(self) -> plgpu.CompilerParams:
        # As FlashAttention takes them for such tiles; not tuned on a GPU, where nothing of this has run.
        large = self.blocks.block_q * self.spec.head_dim > 64 * 64
        return plgpu.CompilerParams(num_warps=8 if large else 4, num_stages=2)

    def _call(
        self, name: str, kernel: Callable[..., None], operands: tuple[Array, ...], out: Any, out_spec: Any
    ) -> Any:
        """A program for each part of each query tile; all operands but its rows are whole."""
        return pl.pallas_call(
            functools.partial(kernel, kernels=self),
            grid=(operands[0].shape[1] // self.blocks.block_q, self.tiles),
            in_specs=[self._part(operands[0]), *(pl.no_block_spec,) * (len(operands) - 1)],
            out_specs=out_spec,
            out_shape=out,
            compiler_params=self._params,
            interpret=self.interpret,
            name=name,
        )(*operands)


class _Rows:
    """Inside a kernel: the rows of a part of a query tile, and what they see."""

    def __init__(
        self, kernels: TritonKernels, part: Any, tile: Any, firsts_ref: Any, lengths_ref: Any, id_refs: Any
    ) -> None:
        blocks, tiling = kernels.blocks, kernels.tiling
        self.part, self.tile = part, tile
        # div and rem of what is not negative: Triton's dialect cannot lower Python's signs of % inside a loop.
        self.head, self.sequence = lax.div(tile, jnp.int32(tiling.query_tiles)), kernels.sequence(tile)
        self.queries: Queries = kernels.queries_of(self.tile, 0, firsts_ref, lengths_ref)
        # tile_q is a power of two: the row's place in its head is what remains of its number.
        self._place = (self.part * blocks.block_q + jnp.arange(blocks.block_q, dtype=jnp.int32)) & (blocks.tile_q - 1)
        self._step, self._ids = blocks.step_kv, id_refs
        if id_refs:
            at = lax.rem(tile, jnp.int32(tiling.query_tiles)) * blocks.tile_q + self._place
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
    kernels: TritonKernels,
) -> None:
    n_ids, at = 2 * kernels.spec.has_segment_ids, (pl.program_id(0), pl.program_id(1))
    id_refs, (out_ref, *log_sum_refs) = refs[:n_ids], refs[n_ids:]
    blocks, rows = kernels.blocks, _Rows(kernels, *at, firsts_ref, lengths_ref, id_refs)
    steps, query = jnp.int32(blocks.tile_kv // blocks.step_kv), query_ref[...]

    def step(number: Any, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        before, total, acc = state
        begin = tiles_ref[rows.tile, lax.div(number, steps)] * blocks.tile_kv + lax.rem(number, steps) * blocks.step_kv
        some = pl.ds(begin, blocks.step_kv)
        seen = rows.visible(begin)
        score = jnp.where(seen, kernels.scores(query, key_ref[rows.head, some, :]), HIDDEN)
        highest, weight, decay = _soften(score, seen, before)
        value = value_ref[rows.head, some, :]
        acc = decay[:, None] * acc + product(weight.astype(value.dtype), value, (1, 0))
        return highest, decay * total + weight.sum(axis=1), acc

    start = (*_nothing_seen(blocks.block_q), jnp.zeros((blocks.block_q, out_ref.shape[-1]), jnp.float32))
    highest, total, acc = lax.fori_loop(0, counts_ref[rows.tile] * steps, step, start)
    total = jnp.where(total == 0.0, 1.0, total)
    out_ref[...] = (acc / total[:, None]).astype(out_ref.dtype)
    for log_sum_ref in log_sum_refs:
        log_sum_ref[...] = highest + jnp.log(total)


def _gradient(
    query_ref: Any,
    d_out_ref: Any,
    scalars_ref: Any,
    key_ref: Any,
    value_ref: Any,
    codes_ref: Any,
    starts_ref: Any,
    firsts_ref: Any,
    lengths_ref: Any,
    *refs: Any,
    kernels: TritonKernels,
    by: Literal["query", "key"],
    owners: int,
    others: int,
) -> None:
    """The gradients of some rows, or of some keys and values: a loop over what their tile meets."""
    n_ids = 2 * kernels.spec.has_segment_ids
    id_refs, gradient_refs, blocks = refs[:n_ids], refs[n_ids:], kernels.blocks
    # Read once: inside a loop an interpreter does not know them.
    mine, owner = pl.program_id(0), pl.program_id(1)
    head, owner = owner // owners, owner % owners
    first, parts = starts_ref[head, owner], query_ref.shape[1] // blocks.block_q
    its = jnp.int32(blocks.tile_kv // blocks.step_kv if by == "query" else parts)

    def step(number: Any, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        other = lax.rem(codes_ref[head, first + lax.div(number, its)], jnp.int32(others)), lax.rem(number, its)
        (tile, part), (unit, split) = ((owner, mine), other) if by == "query" else (other, (owner, mine))
        tile, some = head * kernels.tiling.query_tiles + tile, pl.ds(part * blocks.block_q, blocks.block_q)
        begin = unit * blocks.tile_kv + split * blocks.step_kv
        slots = pl.ds(begin, blocks.step_kv)
        query, d_out, key = query_ref[tile, some, :], d_out_ref[tile, some, :], key_ref[head, slots, :]
        log_sum, mean = scalars_ref[tile, some, 0][:, None], scalars_ref[tile, some, 1][:, None]
        seen = _Rows(kernels, part, tile, firsts_ref, lengths_ref, id_refs).visible(begin)
        probability, d_score = kernels.pair(query, d_out, log_sum, mean, key, value_ref[head, slots, :], seen)
        if by == "query":
            return (sums[0] + product(d_score, key, (1, 0)),)
        return sums[0] + product(d_score, query, (0, 0)), sums[1] + product(probability, d_out, (0, 0))

    start = tuple(jnp.zeros(ref.shape, jnp.float32) for ref in gradient_refs)
    sums = lax.fori_loop(0, (starts_ref[head, owner + 1] - first) * its, step, start)
    for ref, total in zip(gradient_refs, sums, strict=True):
        ref[...] = total


def _sum(query_ref: Any, key_ref: Any, firsts_ref: Any, lengths_ref: Any, *refs: Any, kernels: TritonKernels) -> None:
    *id_refs, mass_ref = refs
    # Read once: inside a loop an interpreter does not know them.
    at = pl.program_id(0), pl.program_id(1)
    blocks, rows = kernels.blocks, _Rows(kernels, *at, firsts_ref, lengths_ref, id_refs)
    steps, query = blocks.tile_kv // blocks.step_kv, query_ref[...]
    end = jnp.minimum(
        rows.queries.first + jnp.minimum(rows.queries.number, kernels.tiling.query_tile), rows.queries.length
    )
    visited = (end + blocks.tile_kv - 1) // blocks.tile_kv

    def score_of(begin: Any) -> tuple[Array, Array]:
        seen = rows.visible(begin)
        score = kernels.scores(query, key_ref[rows.head, pl.ds(begin, blocks.step_kv), :])
        return jnp.where(seen, score, HIDDEN), seen

    def log_sum(number: Any, state: tuple[Array, Array]) -> tuple[Array, Array]:
        before, total = state
        highest, weight, decay = _soften(*score_of(number * blocks.step_kv), before)
        return highest, decay * total + weight.sum(axis=1)

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
    lax.fori_loop(visited, kernels.tiling.units, nothing, None)


def _soften(score: Array, seen: Array, before: Array) -> tuple[Array, Array, Array]:
    """Each row's maximum, the weights of a step, and the factor to what was summed before."""
    highest = jnp.maximum(before, score.max(axis=1))
    return highest, jnp.where(seen, jnp.exp(score - highest[:, None]), 0.0), jnp.exp(before - highest)


def _nothing_seen(rows: int) -> tuple[Float[Array, " rows"], Float[Array, " rows"]]:
    """Running maximum and sum of rows that have seen nothing."""
    return jnp.full(rows, HIDDEN, jnp.float32), jnp.zeros(rows, jnp.float32)
