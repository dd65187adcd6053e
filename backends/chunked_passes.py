"""The two passes of ``chunked`` over the blocks of a table: attention, and the gradients of query, key and value.

A :class:`Program` holds all static choices; a table of ``blocks.py`` lists the blocks to visit. Scores exist for one
block at a time. :func:`_in_cpu_bits` decides where XLA's CPU compiler needs special treatment.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from . import blocks
from .blocks import BlockTable, PaddedLayout
from .contract import AttentionSpec
from .scores import derived

_MASKED = -1e30  # finite, so that a row with nothing visible gives no NaN
# If the log-sum-exp is above a row's largest score by less than this, its key has the whole row up to rounding.
_ALONE = 2.0**-21
UNSEEN = 1e30  # largest score of a row with nothing visible: its probabilities come out as zero


Reader = Callable[[Array, Array, int], Array]  # (tile, start, width) -> [heads, width, dim]


@dataclasses.dataclass(frozen=True, slots=True)
class BlockSizes:
    """Sizes of the blocks, and how many KV heads one step computes."""

    block_q: int
    block_kv: int
    block_backward: int
    heads_per_tile: int


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """All static choices of one planned attention. ``float32_results``: results are not rounded to the input dtype."""

    spec: AttentionSpec
    sizes: BlockSizes
    on_cpu: bool
    scale_query: float
    scale_scores: float
    float32_results: bool = False


def _in_cpu_bits(program: Program) -> bool:
    """Whether bfloat16 is rounded by integer arithmetic and carried as bits: only for XLA's CPU compiler.

    That compiler's float32 -> bfloat16 conversion is scalar code. It also widens bfloat16 loop operands to float32 and
    narrows them again at every slice.
    """
    return program.on_cpu and program.spec.dtype == "bfloat16"


# Tiles. A tile is `heads_per_tile` KV heads with all query heads of their groups:
# queries [tiles * q_blocks, heads, group * block_q, dim], keys and values [tiles, heads, kv_len, dim].


def _tile_queries(x: Array, spec: AttentionSpec, heads: int, block: int, fill: float = 0) -> Array:
    """[B, T, N, D] -> [tiles * q_blocks, heads, group * block, D], T padded with ``fill``."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % block), (0, 0), (0, 0)), constant_values=fill)
    b, t, _, d = x.shape
    kv_heads, group, n = spec.num_kv_heads, spec.group_size, t // block
    x = x.reshape(b, n, block, kv_heads, group, d).transpose(0, 3, 1, 4, 2, 5)
    x = x.reshape(b * kv_heads // heads, heads, n, group * block, d)
    return x.transpose(0, 2, 1, 3, 4).reshape(-1, heads, group * block, d)


def _untile_queries(x: Array, spec: AttentionSpec, heads: int, block: int) -> Array:
    """The inverse: -> [B, T, N, D]."""
    b, kv_heads, group, d = spec.batch, spec.num_kv_heads, spec.group_size, x.shape[-1]
    n = x.shape[0] * heads // (b * kv_heads)
    x = x.reshape(-1, n, heads, group, block, d).transpose(0, 2, 3, 1, 4, 5).reshape(b, kv_heads, group, n * block, d)
    return x.transpose(0, 3, 1, 2, 4).reshape(b, n * block, kv_heads * group, d)[:, : spec.query_length]


def _tile_keys(x: Array, heads: int, block: int) -> Array:
    """[B, S, K, D] -> [tiles, heads, S, D], S padded with zeros."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % block), (0, 0), (0, 0)))
    b, s, kv_heads, d = x.shape
    return x.transpose(0, 2, 1, 3).reshape(b * kv_heads // heads, heads, s, d)


def _untile_keys(x: Array, spec: AttentionSpec) -> Array:
    """The inverse: -> [B, S, K, D]."""
    x = x.reshape(spec.batch, spec.num_kv_heads, -1, x.shape[-1]).transpose(0, 2, 1, 3)
    return x[:, : spec.key_value_length]


def _columns(x: Array, heads: int, block: int) -> Array:
    """[B, S, K, D] -> [tiles * kv_blocks, heads, block, D]: one entry per KV block, for the backward pass."""
    x = _tile_keys(x, heads, block)
    tiles, _, _, d = x.shape
    return x.reshape(tiles, heads, -1, block, d).swapaxes(1, 2).reshape(-1, heads, block, d)


def _uncolumns(x: Array, spec: AttentionSpec, tiles: int) -> Array:
    """The inverse: -> [B, S, K, D]."""
    _, heads, block, d = x.shape
    return _untile_keys(x.reshape(tiles, -1, heads, block, d).swapaxes(1, 2), spec)


def narrowed(x: Float[Array, "..."], program: Program) -> Array:
    """float32 -> the input dtype; on a CPU to bfloat16 by adding half an ulp and cutting (ties away from 0)."""
    if not _in_cpu_bits(program):
        return x.astype(program.spec.dtype)
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(((bits + jnp.uint32(0x8000)) >> 16).astype(jnp.uint16), jnp.bfloat16)


def _pack(x: Array, program: Program) -> Array:
    return lax.bitcast_convert_type(x, jnp.uint16) if _in_cpu_bits(program) else x


def _unpack(x: Array, program: Program) -> Array:
    return lax.bitcast_convert_type(x, jnp.bfloat16) if _in_cpu_bits(program) else x


def _result(x: Float[Array, "..."], program: Program) -> Array:
    """A result in the form in which loops carry it; :func:`_delivered` converts it back."""
    return x if program.float32_results else _pack(narrowed(x, program), program)


def _delivered(x: Array, program: Program) -> Array:
    return x if program.float32_results else _unpack(x, program)


def _dot(subscripts: str, a: Array, b: Array) -> Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _scores(rows: Float[Array, "h r d"], columns: Float[Array, "h c d"]) -> Float[Array, "h r c"]:
    """Products of every row with every column. The forward pass passes queries as rows, the backward pass keys.

    XLA's CPU kernels add in an order that depends on the number of columns, except for multiples of 64. A score must
    have the same bits in both passes: at logits of 100 its last bit is 64 epsilons of a probability.
    """
    width = columns.shape[1]
    columns = jnp.pad(columns, ((0, 0), (0, -width % 64), (0, 0)))
    return _dot("hrd,hcd->hrc", rows, columns)[..., :width]


def _visit(
    tables: tuple[BlockTable, ...], batch: Array, row: Array, step: Callable[[Array, int, Any, bool], Any], carry: Any
) -> Any:
    """Fold ``step(start, width, carry, mixed)`` over the blocks of one row: mixed ones first, then all-visible ones."""
    for table in tables:
        order, partial, full = (jnp.asarray(x)[batch, row] for x in (table.order, table.partial, table.full))

        def visit(n: Array, carry: Any, *, mixed: bool, order: Array = order, width: int = table.width) -> Any:
            return step(order[n] * width, width, carry, mixed)

        if not _never(table.partial):
            carry = lax.fori_loop(0, partial, functools.partial(visit, mixed=True), carry)
        if not _never(table.full):
            carry = lax.fori_loop(partial, partial + full, functools.partial(visit, mixed=False), carry)
    return carry


def _never(counts: Any) -> bool:
    """Whether no row has such a block, known at trace time; the loop is then left out of the program."""
    return isinstance(counts, np.ndarray) and not counts.any()


def _scaled_query(query: Array, program: Program) -> Array:
    if program.scale_query == 1.0:
        return query
    return (query.astype(jnp.float32) * program.scale_query).astype(query.dtype)


def _tile_per_head(x: Float[Array, " n"], program: Program) -> Float[Array, "tiles heads group 1 1"]:
    """ALiBi's slopes or the sinks of each tile: one number per KV head and query head of its group."""
    spec = program.spec
    grouped = x.astype(jnp.float32).reshape(spec.num_kv_heads, spec.group_size)
    return jnp.tile(grouped, (spec.batch, 1)).reshape(-1, program.sizes.heads_per_tile, spec.group_size, 1, 1)


def _untile_slopes(x: Float[Array, "columns heads group"], spec: AttentionSpec, tiles: int) -> Float[Array, " n"]:
    """The gradient of the slopes, from that of each column of blocks."""
    return x.reshape(tiles, -1, *x.shape[1:]).sum(1).reshape(spec.batch, spec.num_heads).sum(0)


def _tilt(scores: Array, slopes: Array, apart: Array) -> Array:
    """The scores less slopes times distances, which broadcast to one axis for the group and one for its rows."""
    shape = jnp.broadcast_shapes(slopes.shape, apart.shape)
    return (scores.reshape(shape) - slopes * apart).reshape(scores.shape)


def _logits(
    program: Program,
    layout: PaddedLayout,
    scores: Array,
    tile: Array,
    query_start: Array,
    key_start: Array,
    rows: int,
    columns: int,
    *,
    turned: bool = False,
) -> tuple[Array, Array | None]:
    """What soft cap and score function make of a block of scaled scores, and the derivative; None: neither is there.

    The scores are [heads, group * rows, columns], or ``turned`` [heads, columns, group * rows].
    """
    spec, heads, slope = program.spec, program.sizes.heads_per_tile, None
    if spec.logits_soft_cap is not None:
        scores = spec.logits_soft_cap * jnp.tanh(scores / spec.logits_soft_cap)
        slope = 1.0 - (scores / spec.logits_soft_cap) ** 2
    if spec.score_function is None:
        return scores, slope
    kv_heads = tile * heads + jnp.arange(heads, dtype=jnp.int32)[:, None]  # of all batch entries
    head = kv_heads % spec.num_kv_heads * spec.group_size + jnp.arange(spec.group_size, dtype=jnp.int32)[None]
    batch = kv_heads // spec.num_kv_heads
    entry = batch[0, 0] if layout.batch > 1 else jnp.int32(0)
    q_pos, k_pos = blocks.places(layout, entry, query_start, key_start, rows, columns)
    indices = batch[..., None, None], head[..., None, None], q_pos[None, None, :, None], k_pos[None, None, None]
    if turned:
        indices = tuple(x.transpose(0, 3, 1, 2) for x in indices)
    apart = scores.reshape(jnp.broadcast_shapes(*(x.shape for x in indices)))
    made, own = (x.reshape(scores.shape) for x in derived(spec.score_function, apart, *indices))
    return made, own if slope is None else slope * own


def _reader(x: Array | Reader, program: Program) -> Reader:
    """Reads some slots of a tile of contiguous keys or values; a reader itself, if ``x`` is one."""
    if callable(x):
        return x
    tiled = _tile_keys(_pack(x, program), program.sizes.heads_per_tile, program.sizes.block_kv)
    return lambda tile, start, width: _unpack(lax.dynamic_slice_in_dim(tiled[tile], start, width, 1), program)


def _isolated(scores: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Scores and values where a slot that is not finite makes its score NaN: rows that may not see it mask it."""
    bad = ~(jnp.isfinite(k).all(-1) & jnp.isfinite(v).all(-1))
    return jnp.where(bad[:, None], jnp.nan, scores), jnp.where(bad[..., None], 0, v)


def forward(
    program: Program,
    query: Array,
    keys_values: tuple[Array | Reader, Array | Reader | None],
    slopes: Array | None,
    sinks: Array | None,
    layout: PaddedLayout,
    tables: tuple[BlockTable, ...],
) -> tuple[Array, Array, Array]:
    """Output [B, T, N, Hv], and the log-sum-exp as largest score and rest, [B, T, N] each.

    A sink is where the recurrence of its rows starts: as if they had seen a key of this score and a value of zero.
    Keys and values are arrays, or functions that read some slots of a tile from a cache; None: the values are the first
    numbers of the keys. Of a cache, slots that are not finite and that a row may not see do not reach the row, as
    isolation.py says.
    """
    spec, sizes = program.spec, program.sizes
    heads, block_q, group = sizes.heads_per_tile, sizes.block_q, spec.group_size
    from_cache = callable(keys_values[0])
    keys = _reader(keys_values[0], program)
    values = None if keys_values[1] is None else _reader(keys_values[1], program)
    queries = _tile_queries(_pack(_scaled_query(query, program), program), spec, heads, block_q)
    tiles = spec.batch * spec.num_kv_heads // heads
    rows = queries.shape[0] // tiles
    tilted, sunk = (None if x is None else _tile_per_head(x, program) for x in (slopes, sinks))

    def one_row(x: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        tile, row, q = x
        q = _unpack(q, program)
        batch = tile * heads // spec.num_kv_heads if layout.batch > 1 else jnp.int32(0)

        def step(start: Array, width: int, carry: tuple[Array, ...], mixed: bool) -> tuple[Array, ...]:
            top, total, out = carry
            k = keys(tile, start, width)
            v = k[..., : spec.value_head_dim] if values is None else values(tile, start, width)
            scaled = _scores(q, k) * program.scale_scores
            scores, _ = _logits(program, layout, scaled, tile, row * block_q, start, block_q, width)
            if tilted is not None:
                apart = blocks.apart(layout, batch, row * block_q, start, block_q, width)
                scores = _tilt(scores, tilted[tile], apart[None, None])
            if from_cache:
                scores, v = _isolated(scores, k, v)
            if mixed:
                mask = blocks.visible(spec, layout, batch, row * block_q, start, block_q, width)
                scores = jnp.where(mask, scores.reshape(heads, group, block_q, width), _MASKED)
                scores = scores.reshape(heads, group * block_q, width)
            new_top = jnp.maximum(top, scores.max(-1))
            # A row that has seen nothing keeps top at _MASKED; half of that subtracted instead gives exp(-5e29) = 0.
            probs = jnp.exp(scores - jnp.maximum(new_top, _MASKED / 2)[..., None])
            rounded = narrowed(probs, program)
            decay = jnp.exp(top - new_top)
            # The sum is of the rounded weights, so that rounding cancels in the output; except if the sum is a result,
            # or is held against a sink.
            summed = probs if spec.return_log_sum_exp or sinks is not None else rounded.astype(jnp.float32)
            total = total * decay + summed.sum(-1)
            return new_top, total, out * decay[..., None] + _dot("hqk,hkd->hqd", rounded, v)

        shape = (heads, group * block_q)
        start = jnp.full(shape, _MASKED), jnp.zeros(shape)
        if sunk is not None:
            rows_of_head = jnp.broadcast_to(sunk[tile][..., 0], (heads, group, block_q))
            start = rows_of_head.reshape(shape), jnp.ones(shape)
        start = *start, jnp.zeros((*shape, spec.value_head_dim))
        top, total, out = _visit(tables, batch, row, step, start)
        seen = total != 0.0  # NaN is seen
        out = out * jnp.where(seen, 1.0 / jnp.where(seen, total, 1.0), 0.0)[..., None]
        rest = jnp.log(jnp.where(seen, total, 1.0))
        return _result(out, program), jnp.where(seen, top, UNSEEN), rest

    index = jnp.repeat(jnp.arange(tiles), rows), jnp.tile(jnp.arange(rows), tiles)
    out, top, rest = lax.map(one_row, (*index, queries))
    return (
        _delivered(_untile_queries(out, spec, heads, block_q), program),
        _untile_queries(top[..., None], spec, heads, block_q)[..., 0],
        _untile_queries(rest[..., None], spec, heads, block_q)[..., 0],
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Rows:
    """What the backward pass reads of the query rows, in tiles."""

    queries: Array
    d_outs: Array
    tops: Array
    rests: Array
    deltas: Array
    d_lses: Array | None


def _tile_rows(
    program: Program, query: Array, out: Array, top: Array, rest: Array, d_out: Array, d_lse: Array | None
) -> _Rows:
    spec, heads, block = program.spec, program.sizes.heads_per_tile, program.sizes.block_backward
    delta = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)

    def tiled(x: Array, fill: float = 0) -> Array:
        return _tile_queries(x[..., None], spec, heads, block, fill)[..., 0]

    return _Rows(
        queries=_tile_queries(_pack(_scaled_query(query, program), program), spec, heads, block),
        d_outs=_tile_queries(_pack(d_out, program), spec, heads, block),
        tops=tiled(top, UNSEEN),
        rests=tiled(rest),
        deltas=tiled(delta),
        d_lses=None if d_lse is None else tiled(d_lse),
    )


def backward(
    program: Program,
    query: Array,
    key: Array,
    value: Array | None,
    out: Array,
    top: Array,
    rest: Array,
    d_out: Array,
    d_lse: Array | None,
    slopes: Array | None,
    layout: PaddedLayout,
    tables: tuple[BlockTable, ...],
) -> tuple[Array, Array, Any, Array | None]:
    """Gradients of query, key and value, in their dtype (float32 with ``program.float32_results``), and of the slopes.

    Where ``value`` is None, so is its gradient, which is then a part of the keys'. ``d_lse [B, T, N]`` is the cotangent
    of the log-sum-exp, whose derivative by a score is the probability. Scores are kept transposed (keys by queries), so
    that every product contracts the last dimension of its left operand: XLA's CPU backend has a fast kernel for this
    orientation.
    """
    spec, sizes = program.spec, program.sizes
    heads, block, group = sizes.heads_per_tile, sizes.block_backward, spec.group_size
    tiled = _tile_rows(program, query, out, top, rest, d_out, d_lse)
    largest = jnp.exp(-tiled.rests)  # probability of the largest key

    keys, *values = (_columns(_pack(x, program), heads, block) for x in (key, value) if x is not None)
    # Transposed outside the loop: inside, XLA folds the transpose into the product and then has no kernel for it.
    keys_transposed = keys.swapaxes(2, 3)
    tiles = spec.batch * spec.num_kv_heads // heads
    q_blocks, kv_blocks = tiled.queries.shape[0] // tiles, keys.shape[0] // tiles
    tilted = None if slopes is None else _tile_per_head(slopes, program)

    def one_column(d_queries: Array, x: tuple[Array, ...]) -> tuple[Array, tuple[list[Array], Any]]:
        tile, column, k, k_transposed, *given = *x[:2], *(_unpack(part, program) for part in x[2:])
        v = given[0] if given else k[..., : spec.value_head_dim]
        batch = tile * heads // spec.num_kv_heads if layout.batch > 1 else jnp.int32(0)

        def step(start: Array, width: int, carry: tuple[Any, ...], mixed: bool) -> tuple[Any, ...]:
            d_k, d_v, d_tilted, d_queries = carry
            at = tile * q_blocks + start // width
            q, d_o = _unpack(tiled.queries[at], program), _unpack(tiled.d_outs[at], program)
            scaled, here = _scores(k, q) * program.scale_scores, (start, column * block, block, block)
            scores, slope = _logits(program, layout, scaled, tile, *here, turned=True)
            apart = None if tilted is None else blocks.apart(layout, batch, *here).T
            if tilted is not None and apart is not None:
                scores = _tilt(scores, tilted[tile].swapaxes(1, 2), apart[None, :, None])
            probs = jnp.exp((scores - tiled.tops[at][:, None]) - tiled.rests[at][:, None])
            heavy = probs > 0.5
            probs = jnp.where(heavy, largest[at][:, None], probs)
            if mixed:
                mask = blocks.visible(spec, layout, batch, *here).T[:, None]
                probs = jnp.where(mask, probs.reshape(heads, block, group, block), 0.0).reshape(probs.shape)
            d_scores = probs * (_dot("hkd,hqd->hkq", v, d_o) - tiled.deltas[at][:, None])
            # The gradient of a key that has the whole row is zero: its two terms cancel but for their rounding.
            d_scores = jnp.where(heavy & (tiled.rests[at][:, None] < _ALONE), 0.0, d_scores)
            if tiled.d_lses is not None:
                d_scores = d_scores + probs * tiled.d_lses[at][:, None]
            if apart is not None:
                d_tilted -= (d_scores.reshape(heads, block, group, block) * apart[None, :, None]).sum((1, 3))
            if slope is not None:
                d_scores = d_scores * slope
            probs, d_scores = narrowed(probs, program), narrowed(d_scores * program.scale_scores, program)
            d_v = d_v + _dot("hkq,hqd->hkd", probs, d_o)
            d_k = d_k + _dot("hkq,hqd->hkd", d_scores, q)
            d_q = lax.dynamic_index_in_dim(d_queries, at, 0, keepdims=False) + _dot(
                "hdk,hkq->hdq", k_transposed, d_scores
            )
            return d_k, d_v, d_tilted, lax.dynamic_update_index_in_dim(d_queries, d_q, at, 0)

        start = *(jnp.zeros(x.shape, jnp.float32) for x in (k, v)), () if tilted is None else jnp.zeros((heads, group))
        d_k, d_v, d_tilted, d_queries = _visit(tables, batch, column, step, (*start, d_queries))
        found = (d_k, d_v) if given else (d_k.at[..., : spec.value_head_dim].add(d_v),)
        return d_queries, ([_result(x, program) for x in found], d_tilted)

    nothing = jnp.zeros((tiles * q_blocks, heads, spec.head_dim, group * block))
    index = jnp.repeat(jnp.arange(tiles), kv_blocks), jnp.tile(jnp.arange(kv_blocks), tiles)
    d_queries, (found, d_tilted) = lax.scan(one_column, nothing, (*index, keys, keys_transposed, *values))
    d_query = _untile_queries(_result(d_queries.swapaxes(2, 3) * program.scale_query, program), spec, heads, block)
    d_key, *d_value = (_uncolumns(_delivered(x, program), spec, tiles) for x in found)
    d_slopes = None if slopes is None else _untile_slopes(d_tilted, spec, tiles).astype(slopes.dtype)
    return _delivered(d_query, program), d_key, (*d_value, None)[0], d_slopes
