"""Kascade's kernels in Pallas' Triton dialect for NVIDIA GPUs: attention to listed tiles, its gradient, pooled mass.

The computations are those of ``pallas_tpu.py``. Triton has no prefetched scalars, so one program takes some rows of a
query tile and loops over the list itself, reading each tile in place. A slot without a tile costs nothing. Where there
are few rows, as in a decode step, several programs share a list or the keys (split-KV, as in FlashDecoding), and what
they found is merged. Pallas' interpreter runs the kernels anywhere.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float

from ..merging import merge_parts
from .block_sizes import gpu_blocks, gpu_reasons
from .pallas_rows import HIDDEN, FlatLayout, Listed, PallasKernels, Queries, Rows, Visits, product

# Fewer programs leave processors of a GPU idle: an H200 has 132. With 8 programs, whose keys nobody shared, a decode
# step of 16 layers took 6.8 times the time of dense attention there (reports/published/gpu-nvidia-h200-kascade).
PROGRAMS = 256


@dataclasses.dataclass(frozen=True)
class TritonKernels(PallasKernels):
    """The kernels in blocks for a GPU's shared memory."""

    platform = "cuda"
    cut = staticmethod(gpu_blocks)
    misfits = staticmethod(gpu_reasons)

    @property
    def row_block(self) -> int:
        """Queries of a block of rows: a whole tile, of which a program takes a part."""
        return self.blocks.tile_q

    def attend_rows(
        self, rows: Array, keys: Array, values: Array, listed: Listed, flat: FlatLayout, *, return_residuals: bool
    ) -> tuple[Array, ...]:
        """As :meth:`PallasKernels.attend_rows`."""
        splits = self._splits(rows, listed.tiles.shape[1])
        shape, rounded = (splits, *rows.shape[:2]), splits == 1 and not return_residuals
        out = [jax.ShapeDtypeStruct((*shape, values.shape[-1]), rows.dtype if rounded else jnp.float32)]
        if not rounded:
            out.append(jax.ShapeDtypeStruct(shape, jnp.float32))
        whole = keys, values, *listed, *flat[:2], *flat.ids
        kernel = functools.partial(_attend, kernels=self, slots=-(-listed.tiles.shape[1] // splits))
        found = self._call("kascade_attend", kernel, (rows,), whole, out, [self._part(x, 1) for x in out], splits)
        if splits == 1:
            return tuple(x[0] for x in found)
        merged = merge_parts([(found[0][split], found[1][split]) for split in range(splits)])
        return merged if return_residuals else (merged[0].astype(rows.dtype),)

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
        """As :meth:`PallasKernels.mass_of_rows`: first what each row sees as a whole, then the share of every unit."""
        splits = self._splits(rows, self.tiling.units)
        units = -(-self.tiling.units // splits)
        whole, shape = (keys, *flat[:2], *flat.ids), (splits, *rows.shape[:2])
        sums = [jax.ShapeDtypeStruct(shape, jnp.float32)]
        kernel = functools.partial(_log_sums, kernels=self, units=units)
        (found,) = self._call("kascade_log_sums", kernel, (rows,), whole, sums, [self._part(sums[0], 1)], splits)
        parts = rows.shape[1] // self.blocks.block_q
        mass = [jax.ShapeDtypeStruct((self.tiles, parts, self.tiling.units), jnp.float32)]
        kernel = functools.partial(_mass, kernels=self, units=units)
        by_row = rows, jax.nn.logsumexp(found, axis=0)
        return self._call("kascade_pooled_mass", kernel, by_row, whole, mass, [pl.no_block_spec], splits)[0]

    def _splits(self, rows: Array, pieces: int) -> int:
        """Among how many programs the ``pieces`` that the same rows go through are divided."""
        programs = self.tiles * (rows.shape[1] // self.blocks.block_q)
        each = -(-pieces // min(pieces, -(-PROGRAMS // programs)))
        return -(-pieces // each)

    def _part(self, rows: Any, splits: int = 0) -> pl.BlockSpec:
        """The rows of a program; with 1 for ``splits`` what it finds for them in its share of the list or the keys."""
        behind = rows.shape[2 + splits :]

        def index(part: Any, tile: Any, split: Any) -> tuple[Any, ...]:
            return *(split,) * splits, tile, part, *(0,) * len(behind)

        return pl.BlockSpec((*(None,) * (1 + splits), self.blocks.block_q, *behind), index)

    @property
    def _params(self) -> plgpu.CompilerParams:
        # As FlashAttention takes them for such tiles; not tuned on a GPU.
        large = self.blocks.block_q * self.spec.head_dim > 64 * 64
        return plgpu.CompilerParams(num_warps=8 if large else 4, num_stages=2)

    def _call(
        self,
        name: str,
        kernel: Callable[..., None],
        by_row: tuple[Array, ...],
        whole: tuple[Array, ...],
        out: list[jax.ShapeDtypeStruct],
        out_specs: Sequence[Any],
        splits: int,
    ) -> list[Array]:
        """A program for each part of each query tile and each split; it gets its rows of the operands ``by_row``."""
        return pl.pallas_call(
            kernel,
            grid=(by_row[0].shape[1] // self.blocks.block_q, self.tiles, splits),
            in_specs=[*map(self._part, by_row), *(pl.no_block_spec,) * len(whole)],
            out_specs=out_specs,
            out_shape=out,
            compiler_params=self._params,
            interpret=self.interpret,
            name=name,
        )(*by_row, *whole)


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


def _attend(*operands: Any, kernels: TritonKernels, slots: int) -> None:
    """Attention to the ``slots`` of the list from the program's own on."""
    query_ref, key_ref, value_ref, tiles_ref, counts_ref, firsts_ref, lengths_ref, *refs = operands
    n_ids, (part, tile, split) = 2 * kernels.spec.has_segment_ids, map(pl.program_id, range(3))
    id_refs, (out_ref, *log_sum_refs) = refs[:n_ids], refs[n_ids:]
    blocks, rows = kernels.blocks, _Rows(kernels, part, tile, firsts_ref, lengths_ref, id_refs)
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
    first, last = split * slots, jnp.minimum(counts_ref[rows.tile], (split + 1) * slots)
    highest, total, acc = lax.fori_loop(first * steps, last * steps, step, start)
    total = jnp.where(total == 0.0, 1.0, total)
    out_ref[...] = (acc / total[:, None]).astype(out_ref.dtype)
    for log_sum_ref in log_sum_refs:
        log_sum_ref[...] = highest + jnp.log(total)


def _gradient(*operands: Any, kernels: TritonKernels, by: Literal["query", "key"], owners: int, others: int) -> None:
    """The gradients of some rows, or of some keys and values: a loop over what their tile meets."""
    query_ref, d_out_ref, scalars_ref, key_ref, value_ref, *rest = operands
    codes_ref, starts_ref, firsts_ref, lengths_ref, *refs = rest
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


class _Scored:
    """Inside a kernel: the rows of a program, and its share of their keys, ``units`` of them."""

    def __init__(self, kernels: TritonKernels, units: int, query_ref: Any, key_ref: Any, layout_refs: Any) -> None:
        part, tile, split = map(pl.program_id, range(3))
        firsts_ref, lengths_ref, *id_refs = layout_refs
        self.blocks, self.rows = kernels.blocks, _Rows(kernels, part, tile, firsts_ref, lengths_ref, id_refs)
        self.steps = self.blocks.tile_kv // self.blocks.step_kv
        queries = self.rows.queries
        end = jnp.minimum(queries.first + jnp.minimum(queries.number, kernels.tiling.query_tile), queries.length)
        self.first, self.end = split * units, jnp.minimum((split + 1) * units, kernels.tiling.units)
        self.visited = jnp.clip((end + self.blocks.tile_kv - 1) // self.blocks.tile_kv, self.first, self.end)
        self._kernels, self._query, self._key_ref = kernels, query_ref[...], key_ref

    def of(self, begin: Any) -> tuple[Float[Array, "rows keys"], Bool[Array, "rows keys"]]:
        """The scores of the step that begins at slot ``begin``, and what is seen."""
        seen = self.rows.visible(begin)
        key = self._key_ref[self.rows.head, pl.ds(begin, self.blocks.step_kv), :]
        return jnp.where(seen, self._kernels.scores(self._query, key), HIDDEN), seen


def _log_sums(query_ref: Any, key_ref: Any, *refs: Any, kernels: TritonKernels, units: int) -> None:
    *layout_refs, log_sum_ref = refs
    scored = _Scored(kernels, units, query_ref, key_ref, layout_refs)

    def add(number: Any, state: tuple[Array, Array]) -> tuple[Array, Array]:
        before, total = state
        highest, weight, decay = _soften(*scored.of(number * scored.blocks.step_kv), before)
        return highest, decay * total + weight.sum(axis=1)

    steps = scored.first * scored.steps, scored.visited * scored.steps
    highest, total = lax.fori_loop(*steps, add, _nothing_seen(scored.blocks.block_q))
    log_sum_ref[...] = highest + jnp.log(jnp.where(total == 0.0, 1.0, total))


def _mass(query_ref: Any, log_sum_ref: Any, key_ref: Any, *refs: Any, kernels: TritonKernels, units: int) -> None:
    *layout_refs, mass_ref = refs
    scored, log_sums = _Scored(kernels, units, query_ref, key_ref, layout_refs), log_sum_ref[...]
    at = scored.rows.tile, scored.rows.part

    def pool(unit: Any, _: None) -> None:
        def add(number: Any, mass: Array) -> Array:
            score, seen = scored.of(unit * scored.blocks.tile_kv + number * scored.blocks.step_kv)
            return mass + jnp.where(seen, jnp.exp(score - log_sums[:, None]), 0.0).sum()

        mass_ref[*at, unit] = lax.fori_loop(0, jnp.int32(scored.steps), add, jnp.float32(0.0))

    def nothing(unit: Any, _: None) -> None:
        mass_ref[*at, unit] = jnp.float32(0.0)

    lax.fori_loop(scored.first, scored.visited, pool, None)
    lax.fori_loop(scored.visited, scored.end, nothing, None)


def _soften(score: Array, seen: Array, before: Array) -> tuple[Array, Array, Array]:
    """Each row's maximum, the weights of a step, and the factor to what was summed before."""
    highest = jnp.maximum(before, score.max(axis=1))
    return highest, jnp.where(seen, jnp.exp(score - highest[:, None]), 0.0), jnp.exp(before - highest)


def _nothing_seen(rows: int) -> tuple[Float[Array, " rows"], Float[Array, " rows"]]:
    """Running maximum and sum of rows that have seen nothing."""
    return jnp.full(rows, HIDDEN, jnp.float32), jnp.zeros(rows, jnp.float32)
