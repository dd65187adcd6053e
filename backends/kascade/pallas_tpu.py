"""Attention to listed tiles of keys, forward, as a Pallas kernel for TPUs: prefill and decode.

The kernel is FlashAttention-2's recurrence (arXiv 2307.08691) over the tiles that a query tile visits (the reuse layers
of arXiv 2512.16391, with tiles for tokens). The list is prefetched into scalar memory. It names the block of keys and
values that each grid step loads, so that nothing is gathered in the device's memory. In a decode step most of a query
tile is padding. Pallas' interpreter runs the kernel anywhere. The functions are those of ``kernels.py``.
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
from jaxtyping import Array, Float, Int

from ..contract import AttentionSpec
from ..devices import Target
from .block_sizes import LANES, tpu_blocks, tpu_reasons
from .pallas_rows import HIDDEN, Geometry, block_visible, product, where_needed
from .pallas_tpu_mass import pooled_mass as pooled_mass
from .selection import Places
from .settings import Settings, Tiling

# The part of the scalar memory (1 MiB in every generation) for the list of one call. A longer list takes several calls.
LIST_BYTES = 512 * 1024


def refuses(spec: AttentionSpec, settings: Settings, target: Target) -> tuple[str, ...]:
    """Refuses single keys; on a TPU also float16 and blocks that do not fit it."""
    reasons = [*token_reasons(settings)]
    if target.platform == "tpu":
        if spec.dtype == "float16":
            reasons.append(
                "dtype=float16 is not supported by kascade's kernel for TPUs (float32 or bfloat16, as TPUs compute); "
                "cast the inputs, or use backend='chunked'."
            )
        if not reasons:
            reasons += tpu_reasons(spec, Tiling.of(spec, settings), settings, target)
    return tuple(reasons)


def token_reasons(settings: Settings) -> tuple[str, ...]:
    """Why no Pallas kernel takes these settings."""
    if settings.granularity == "tile":
        return ()
    reason = (
        "granularity='token' is not supported by kascade's Pallas kernels, which load whole tiles; use "
        "granularity='tile', or kernel='xla'."
    )
    return (reason,)


def geometry(spec: AttentionSpec, tiling: Tiling, settings: Settings) -> Geometry:
    """The blocks for a TPU's vector memory."""
    return Geometry(spec, tiling, tpu_blocks(spec, tiling, settings))


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
    block_q = geometry.blocks.block_q
    rows, keys, values = geometry.rows(query, block_q), geometry.heads(key), geometry.heads(value)
    ids, n_rows, slots, v_dim = geometry.segment_ids(places), rows.shape[1], listed.shape[-1], value.shape[-1]
    calls = -(-geometry.tiles * (slots + 1) * 4 // LIST_BYTES)
    per_call = -(-geometry.tiles // calls)
    out_shape = jax.ShapeDtypeStruct((per_call * geometry.blocks.blocks_q, n_rows, v_dim), query.dtype)
    call = _call(geometry, slots, out_shape, has_ids=bool(ids), interpret=interpret)
    tiles, counts = visits(listed)
    spare = calls * per_call - geometry.tiles
    tiles = jnp.pad(tiles, ((0, spare), (0, 0))).reshape(calls, per_call * slots)
    counts = jnp.pad(counts, (0, spare)).reshape(calls, per_call)
    columns = (ids[0][:, :, None], ids[1][:, None, :]) if ids else ()
    firsts, lengths = geometry.firsts(places), geometry.lengths(places)

    def part(of_call: tuple[Array, Array, Array]) -> Array:
        start, tiles, counts = of_call
        # One dimension each: an array of more is padded to 128 lanes in scalar memory.
        return call(start[None], tiles, counts, firsts, lengths, rows, keys, values, *columns)

    out = lax.map(part, (jnp.arange(calls, dtype=jnp.int32) * per_call, tiles, counts))
    return geometry.queries(out.reshape(-1, n_rows, v_dim)[: geometry.tiles * geometry.blocks.blocks_q], block_q)


def _call(
    geometry: Geometry, slots: int, out_shape: jax.ShapeDtypeStruct, *, has_ids: bool, interpret: bool
) -> Callable[..., Array]:
    """The kernel over as many blocks of queries as ``out_shape`` has, with lists of ``slots`` tiles of keys."""
    tiling, blocks, head_dim = geometry.tiling, geometry.blocks, geometry.spec.head_dim
    (steps, n_rows, v_dim), parts, splits = out_shape.shape, blocks.blocks_q, blocks.blocks_kv

    def tile_at(step: Any, start: Any) -> Any:
        return jnp.minimum(start[0] + step // parts, geometry.tiles - 1)  # the last call may have steps to spare

    def block_kv(step: Any, slot: Any, tiles: Any, counts: Any) -> Any:
        """Behind the last listed tile the same block again, which is not loaded again."""
        index = step // parts
        part = jnp.where(slot // splits < counts[index], slot % splits, splits - 1)
        return tiles[index * slots + slot // splits] * splits + part

    def of_rows(step: Any, slot: Any, start: Any, *_: Any) -> tuple[Any, ...]:
        return tile_at(step, start) * parts + step % parts, 0, 0

    def of_keys(step: Any, slot: Any, start: Any, tiles: Any, counts: Any, *_: Any) -> tuple[Any, ...]:
        return tile_at(step, start) // tiling.query_tiles, block_kv(step, slot, tiles, counts), 0

    def of_query_ids(step: Any, slot: Any, start: Any, *_: Any) -> tuple[Any, ...]:
        tile = tile_at(step, start)
        return geometry.sequence(tile), tile % tiling.query_tiles * parts + step % parts, 0

    def of_key_ids(step: Any, slot: Any, start: Any, tiles: Any, counts: Any, *_: Any) -> tuple[Any, ...]:
        return geometry.sequence(tile_at(step, start)), 0, block_kv(step, slot, tiles, counts)

    id_specs = [
        pl.BlockSpec((None, blocks.block_q, 1), of_query_ids),
        pl.BlockSpec((None, 1, blocks.block_kv), of_key_ids),
    ]
    return pl.pallas_call(
        functools.partial(_attend, geometry=geometry, slots=slots),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(steps, slots * splits),
            in_specs=[
                pl.BlockSpec((None, n_rows, head_dim), of_rows),
                pl.BlockSpec((None, blocks.block_kv, head_dim), of_keys),
                pl.BlockSpec((None, blocks.block_kv, v_dim), of_keys),
                *(id_specs if has_ids else ()),
            ],
            out_specs=pl.BlockSpec((None, n_rows, v_dim), lambda step, *_: (step, 0, 0)),
            scratch_shapes=[
                pltpu.VMEM((n_rows, LANES), jnp.float32),
                pltpu.VMEM((n_rows, LANES), jnp.float32),
                pltpu.VMEM((n_rows, v_dim), jnp.float32),
            ],
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="kascade_attend",
    )


def visits(
    listed: Int[Array, "batch kv_heads query_tiles slots"],
) -> tuple[Int[Array, "tiles slots"], Int[Array, " tiles"]]:
    """The list of every query tile, with unused slots (-1, at the end) repeating the last tile; and its length."""
    listed = listed.reshape(-1, listed.shape[-1])
    last = jnp.maximum(listed.max(-1, keepdims=True), 0)
    return jnp.where(listed < 0, last, listed), (listed >= 0).sum(-1, dtype=jnp.int32)


def _attend(
    start_ref: Any,
    tiles_ref: Any,
    counts_ref: Any,
    firsts_ref: Any,
    lengths_ref: Any,
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    *refs: Any,
    geometry: Geometry,
    slots: int,
) -> None:
    """One block of queries against one block of keys: the running maximum, sum and output of every row."""
    *id_refs, out_ref, max_ref, sum_ref, acc_ref = refs
    blocks, step, slot = geometry.blocks, pl.program_id(0), pl.program_id(1)
    index, part = step // blocks.blocks_q, step % blocks.blocks_q
    listed, split = slot // blocks.blocks_kv, slot % blocks.blocks_kv
    tile = jnp.minimum(start_ref[0] + index, geometry.tiles - 1)
    queries = geometry.queries_of(tile, part * blocks.block_q, firsts_ref, lengths_ref)
    begin = tiles_ref[index * slots + listed] * blocks.tile_kv + split * blocks.block_kv

    @pl.when(slot == 0)
    def _() -> None:
        max_ref[...] = jnp.full_like(max_ref, HIDDEN)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def attend_step(at: int, masked: bool) -> None:
        some = pl.ds(at, blocks.step_kv)
        score = geometry.scores(query_ref[...], key_ref[some, :])
        seen = block_visible(geometry, queries, score.shape, begin + at, id_refs, some) if masked else None
        score = score if seen is None else jnp.where(seen, score, HIDDEN)
        before = max_ref[:, :1]
        highest = jnp.maximum(before, score.max(axis=1, keepdims=True))
        weight = jnp.exp(score - highest)
        weight = weight if seen is None else jnp.where(seen, weight, 0.0)  # of a row that sees nothing yet, exp(0)
        decay = jnp.exp(before - highest)
        total = decay * sum_ref[:, :1] + weight.sum(axis=1, keepdims=True)
        value = value_ref[some, :]
        acc_ref[...] = decay * acc_ref[...] + product(weight.astype(value.dtype), value, (1, 0))
        max_ref[...] = jnp.broadcast_to(highest, max_ref.shape)
        sum_ref[...] = jnp.broadcast_to(total, sum_ref.shape)

    def work(masked: bool) -> None:
        for at in range(0, blocks.block_kv, blocks.step_kv):
            attend_step(at, masked)

    where_needed(listed < counts_ref[index], queries.all_see(begin + blocks.block_kv), bool(id_refs), work)

    @pl.when(slot == slots * blocks.blocks_kv - 1)
    def _() -> None:
        total = sum_ref[:, :1]
        out_ref[...] = (acc_ref[...] / jnp.where(total == 0.0, 1.0, total)).astype(out_ref.dtype)
