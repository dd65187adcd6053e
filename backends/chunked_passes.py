"""The two passes of ``chunked`` over the blocks of a table: attention, and the gradients of its operands.

A :class:`Program` holds all static choices; a table of ``blocks.py`` lists the blocks to visit. Scores exist for one
block at a time.

Keys, values, queries and cotangents that are NaN or infinite reach only the pairs that are visible. A mixed block
multiplies probabilities of zero with slots that a row may not see, so there the bad slots are zeroed, and their scores
are NaN for the rows that see them. In an all-visible block there is nothing to keep out.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from . import blocks
from . import chunked_tiles as tiles
from .blocks import BlockTable, PaddedLayout, Place
from .chunked_tiles import Corner, Program
from .manual_axes import varying
from .operands import Terms
from .scores import derived
from .spec import AttentionSpec

# If the log-sum-exp is above a row's largest score by less than this, its key has the whole row up to rounding.
_ALONE = 2.0**-21
# Largest score of a row with nothing visible, above every sink: its probabilities come out as zero.
UNSEEN = float(jnp.finfo(jnp.float32).max)


Reader = Callable[[Array, Array, int], Array]  # (tile, start, width) -> [heads, width, dim]


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
        partial, full = (0 if never(x) else jnp.asarray(x)[batch, row] for x in (table.partial, table.full))
        order = jnp.asarray(table.order)[batch, row]

        def visit(n: Array, carry: Any, *, mixed: bool, order: Array = order, width: int = table.width) -> Any:
            return step(order[n] * width, width, carry, mixed)

        if not never(table.partial):
            carry = lax.fori_loop(0, partial, functools.partial(visit, mixed=True), carry)
        if not never(table.full):
            carry = lax.fori_loop(partial, partial + full, functools.partial(visit, mixed=False), carry)
    return carry


def never(counts: Any) -> bool:
    """Whether no row has such a block, known at trace time; the loop is then left out of the program."""
    return isinstance(counts, np.ndarray) and not counts.any()


def _grid(count: int, blocks_of_tile: int) -> tuple[Array, Array]:
    """Tile and index of each block, block by block."""
    tile, block = jnp.arange(count, dtype=jnp.int32), jnp.arange(blocks_of_tile, dtype=jnp.int32)
    return jnp.repeat(tile, blocks_of_tile), jnp.tile(block, count)


def _entry(program: Program, layout: PaddedLayout, tile: Array) -> Array:
    """The batch entry whose layout holds for a tile."""
    return tile * program.sizes.heads_per_tile // program.spec.num_kv_heads if layout.batch > 1 else jnp.int32(0)


def _scaled_query(query: Array, program: Program) -> Array:
    if program.scale_query == 1.0:
        return query
    return (query.astype(jnp.float32) * program.scale_query).astype(query.dtype)


def _logits(
    program: Program, layout: PaddedLayout, scores: Array, tile: Array, at: Place, *, turned: bool
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
    q_pos, k_pos = blocks.positions_of(layout, at)
    indices = batch[..., None, None], head[..., None, None], q_pos[None, None, :, None], k_pos[None, None, None]
    if turned:
        indices = tuple(x.transpose(0, 3, 1, 2) for x in indices)
    apart = scores.reshape(jnp.broadcast_shapes(*(x.shape for x in indices)))
    scored, derivative = (x.reshape(scores.shape) for x in derived(spec.score_function, apart, *indices))
    return scored, derivative if slope is None else slope * derivative


def _reader(x: Array | Reader, program: Program) -> Reader:
    """Reads some slots of a tile of contiguous keys or values; a reader itself, if ``x`` is one."""
    if callable(x):
        return x
    tiled = tiles.tile_keys(tiles.pack(x, program), program.sizes.heads_per_tile, program.sizes.block_kv)
    return lambda tile, start, width: tiles.unpack(lax.dynamic_slice_in_dim(tiled[tile], start, width, 1), program)


class _Fitted(NamedTuple):
    """Slopes, one per tile, KV head and query head of its group, and the bias, fitted to the blocks of a pass."""

    slopes: Array | None
    bias: Array | None


def _fitted(terms: Terms, program: Program, rows: int, columns: int) -> _Fitted:
    return _Fitted(
        None if terms.alibi is None else tiles.tile_per_head(terms.alibi, program),
        None if terms.bias is None else blocks.fitted(terms.bias, rows, columns),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Block:
    """One block of logits [heads, group, rows, columns], with what the gradient needs; all in the order of the pass."""

    logits: Array
    slope: Array | None  # derivative of soft cap and score function, in the shape of the scores
    apart: Array | None  # distances, where there is ALiBi
    seen: Callable[[], Array]  # which pairs may attend: [heads or 1, group or 1, rows, columns]


def _block(
    program: Program,
    layout: PaddedLayout,
    terms: _Fitted,
    scores: Array,
    corner: Corner,
    rows: int,
    columns: int,
    *,
    turned: bool = False,
) -> _Block:
    """The logits of a block of scaled scores. ``turned``: the order is [heads, columns, group, rows]."""
    spec, heads = program.spec, program.sizes.heads_per_tile
    order = (0, 3, 1, 2) if turned else (0, 1, 2, 3)
    tile, first_row, first_key = corner
    at = Place(_entry(program, layout, tile), first_row, first_key, rows, columns)
    logits, slope = _logits(program, layout, scores, tile, at, turned=turned)
    logits = logits.reshape([(heads, spec.group_size, rows, columns)[axis] for axis in order])
    apart, (slopes, bias) = None, terms
    if slopes is not None:
        q_pos, k_pos = blocks.positions_of(layout, at)
        apart = jnp.abs(q_pos[:, None] - k_pos[None]).astype(jnp.float32)[None, None].transpose(order)
        logits = logits - slopes[tile].transpose(order) * apart
    if bias is not None:
        bias = tiles.part(bias, spec, heads, corner, rows, columns)
        logits = logits + bias.astype(jnp.float32).transpose(order)

    def seen() -> Array:
        visible = blocks.visible(spec, layout, at)[None, None]
        if layout.mask is not None:
            visible = visible & tiles.part(jnp.asarray(layout.mask), spec, heads, corner, rows, columns)
        if bias is not None:  # -inf hides a key as a mask does
            visible = visible & ~jnp.isneginf(bias)
        return jnp.asarray(visible).transpose(order)

    return _Block(logits, slope, apart, seen)


def forward(
    program: Program,
    query: Array,
    keys_values: tuple[Array | Reader, Array | Reader | None],
    terms: Terms,
    layout: PaddedLayout,
    tables: tuple[BlockTable, ...],
) -> tuple[Array, Array, Array]:
    """Output [B, T, N, Hv], and the log-sum-exp as largest score and rest, [B, T, N] each.

    A sink is where the recurrence of its rows starts: as if they had seen a key of this score and a value of zero.
    Keys and values are arrays, or functions that read some slots of a tile from a cache; None: the values are the first
    numbers of the keys.
    """
    spec, sizes = program.spec, program.sizes
    heads, block_q, group = sizes.heads_per_tile, sizes.block_q, spec.group_size
    keys = _reader(keys_values[0], program)
    values = None if keys_values[1] is None else _reader(keys_values[1], program)
    queries = tiles.tile_queries(tiles.pack(_scaled_query(query, program), program), spec, heads, block_q)
    count = spec.batch * spec.num_kv_heads // heads
    rows = queries.shape[0] // count
    learned = _fitted(terms, program, block_q, sizes.block_kv)
    sunk = None if terms.sinks is None else tiles.tile_per_head(terms.sinks, program)

    def one_row(x: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        tile, row, q = x
        q = tiles.unpack(q, program)
        batch = _entry(program, layout, tile)

        def step(start: Array, width: int, carry: tuple[Array, ...], mixed: bool) -> tuple[Array, ...]:
            top, total, out = carry
            corner = tile, row * block_q, start
            k = keys(tile, start, width)
            v = k[..., : spec.value_head_dim] if values is None else values(tile, start, width)
            scaled = _scores(q, k) * program.scale_scores
            block = _block(program, layout, learned, scaled, corner, block_q, width)
            scores = block.logits
            if mixed:
                bad = tiles.not_finite(k, v)
                v = jnp.where(bad[..., None], 0, v)
                scores = jnp.where(block.seen(), jnp.where(bad[:, None, None], jnp.nan, scores), -jnp.inf)
            scores = scores.reshape(heads, group * block_q, width)
            # It cancels in the results. JAX would divide by the number of scores that equal it, which can be zero
            # where XLA computes them again.
            new_top = jnp.maximum(top, lax.stop_gradient(scores.max(-1)))
            at = jnp.where(jnp.isneginf(new_top), 0.0, new_top)  # a row that has seen nothing gives no NaN
            probs = jnp.exp(scores - at[..., None])
            rounded = probs if tiles.is_precise(program) else tiles.narrowed(probs, program)
            decay = jnp.exp(top - at)
            # The sum is of the rounded weights, so that rounding cancels in the output; except if the sum is a result,
            # or is held against a sink.
            exact = spec.return_log_sum_exp or sunk is not None
            total = total * decay + (probs if exact else rounded.astype(jnp.float32)).sum(-1)
            return new_top, total, out * decay[..., None] + _dot("hqk,hkd->hqd", rounded, v.astype(rounded.dtype))

        shape = (heads, group * block_q)
        start = jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.float32)
        if sunk is not None:
            rows_of_head = jnp.broadcast_to(sunk[tile][..., 0], (heads, group, block_q))
            sinks = rows_of_head.reshape(shape)
            start = lax.stop_gradient(sinks), jnp.exp(sinks - lax.stop_gradient(sinks))
        start = *start, jnp.zeros((*shape, spec.value_head_dim), jnp.float32)
        top, total, out = _visit(tables, batch, row, step, varying(start, query))
        seen = total != 0.0  # NaN is seen
        out = out * jnp.where(seen, 1.0 / jnp.where(seen, total, 1.0), 0.0)[..., None]
        rest = jnp.log(jnp.where(seen, total, 1.0))
        return tiles.result(out, program), jnp.where(seen, top, UNSEEN), rest

    out, top, rest = lax.map(one_row, (*_grid(count, rows), queries))
    return (
        tiles.delivered(tiles.untile_queries(out, spec, heads, block_q), program),
        tiles.untile_queries(top[..., None], spec, heads, block_q)[..., 0],
        tiles.untile_queries(rest[..., None], spec, heads, block_q)[..., 0],
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
    if spec.masks_anything or spec.has_bias:  # a row that is not finite spoils what it sees by its log-sum-exp alone
        bad = ~(jnp.isfinite(query).all(-1) & jnp.isfinite(d_out).all(-1))
        query, d_out = (jnp.where(bad[..., None], 0, x) for x in (query, d_out))
        rest = jnp.where(bad, jnp.nan, rest)

    def tiled(x: Array, fill: float = 0) -> Array:
        return tiles.tile_queries(x[..., None], spec, heads, block, fill)[..., 0]

    return _Rows(
        queries=tiles.tile_queries(tiles.pack(_scaled_query(query, program), program), spec, heads, block),
        d_outs=tiles.tile_queries(tiles.pack(d_out, program), spec, heads, block),
        tops=tiled(top, UNSEEN),
        rests=tiled(rest),
        deltas=tiled(delta),
        d_lses=None if d_lse is None else tiled(d_lse),
    )


def _where_visible(x: Array, mask: Array | None) -> Array:
    """``x`` where the pair is visible, else zero, also for a product of a hidden NaN; None: all of it."""
    if mask is None:
        return x
    apart = mask.shape[1], x.shape[2] // mask.shape[3], mask.shape[3]
    return jnp.where(mask, x.reshape(x.shape[0], *apart), 0.0).reshape(x.shape)


@jax.custom_jvp
def _probability(logarithm: Array, rest: Array) -> Array:
    """``exp(logarithm)``; the largest key of a row has its probability from the sum."""
    found = jnp.exp(logarithm)
    return jnp.where(found > 0.5, jnp.exp(-rest), found)


@_probability.defjvp
def _(operands: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    found = _probability(*operands)
    return found, found * tangents[0]


def _d_scores(rows: _Rows, at: Array, scores: Array, products: Array, mask: Array | None) -> tuple[Array, Array]:
    """Probabilities of a block of logits, and the gradient of the logits; ``products`` are those of values and dO."""
    top, rest, delta = (x[at][:, None] for x in (rows.tops, rows.rests, rows.deltas))
    probs = _probability((scores - top) - rest, rest)
    heavy = probs > 0.5
    probs = _where_visible(probs, mask)
    # The gradient of a key that has the whole row is zero: its two terms cancel but for their rounding.
    d_scores = jnp.where(heavy & (rest < _ALONE), 0.0, probs * (products - delta))
    if rows.d_lses is not None:
        d_scores = d_scores + probs * rows.d_lses[at][:, None]
    return probs, _where_visible(d_scores, mask)


def _of_keys(
    spec: AttentionSpec, d_keys: Float[Array, "*rows h"], d_values: Float[Array, "*rows v"]
) -> Float[Array, "*rows h"]:
    """The gradient of keys that hold the values."""
    if spec.value_head_dim == spec.head_dim:  # a slice of everything is a constant, which no share's program may have
        return d_keys + d_values
    return d_keys.at[..., : spec.value_head_dim].add(d_values)


def backward(
    program: Program,
    operands: tuple[Array, Array, Array | None],
    seen: tuple[Array, Array, Array],
    cotangents: tuple[Array, Array | None],
    terms: Terms,
    layout: PaddedLayout,
    tables: tuple[BlockTable, ...],
    requested: Collection[str],
) -> tuple[Array, Array, Array | None, Terms]:
    """Gradients of query, key and value, in their dtype (float32 with ``program.float32_results``).

    Those of ``alibi`` and ``bias`` too, where ``requested`` names them: a bias's is as large as all scores.

    ``operands`` are query, key and value, ``seen`` is the result of :func:`forward`, ``cotangents`` those of the output
    and of the log-sum-exp [B, T, N], whose derivative by a score is the probability. Where the value is None, so is its
    gradient, which is then a part of the keys'. Scores are kept transposed (keys by queries), so that every product
    contracts the last dimension of its left operand: XLA's CPU backend has a fast kernel for this orientation.
    """
    spec, sizes = program.spec, program.sizes
    heads, block, group = sizes.heads_per_tile, sizes.block_backward, spec.group_size
    query, *keys_values = operands
    tiled = _tile_rows(program, query, *seen, *cotangents)

    keys, *values = (tiles.columns_of(tiles.pack(x, program), heads, block) for x in keys_values if x is not None)
    # Transposed outside the loop: inside, XLA folds the transpose into the product and then has no kernel for it.
    keys_transposed = keys.swapaxes(2, 3)
    count = spec.batch * spec.num_kv_heads // heads
    q_blocks, kv_blocks = tiled.queries.shape[0] // count, keys.shape[0] // count
    learned, apart = _fitted(terms, program, block, block), (heads, block, group, block)

    def one_column(carry: Any, x: tuple[Array, ...]) -> tuple[Any, tuple[list[Array], Any]]:
        d_queries, d_biases = carry
        tile, column, k, k_transposed, *stored_values = *x[:2], *(tiles.unpack(part, program) for part in x[2:])
        v = stored_values[0] if stored_values else k[..., : spec.value_head_dim]
        batch = _entry(program, layout, tile)
        bad = tiles.not_finite(k, v)
        clean = *(jnp.where(bad[..., None], 0, x) for x in (k, v)), jnp.where(bad[:, None], 0, k_transposed)

        def step(start: Array, width: int, carry: tuple[Any, ...], mixed: bool) -> tuple[Any, ...]:
            d_k, d_v, d_tilted, d_queries, d_biases = carry
            at = tile * q_blocks + start // width
            q, d_o = tiles.unpack(tiled.queries[at], program), tiles.unpack(tiled.d_outs[at], program)
            keys, values, turned = clean if mixed else (k, v, k_transposed)
            corner = tile, start, column * block
            part = _block(
                program, layout, learned, _scores(keys, q) * program.scale_scores, corner, block, block, turned=True
            )
            scores = jnp.where(bad[..., None, None], jnp.nan, part.logits) if mixed else part.logits
            mask = part.seen() if mixed else None
            products = _dot("hkd,hqd->hkq", values, d_o)
            probs, d_scores = _d_scores(tiled, at, scores.reshape(products.shape), products, mask)
            if d_tilted is not None and part.apart is not None:
                d_tilted -= (d_scores.reshape(apart) * part.apart).sum((1, 3))
            if d_biases is not None:
                by_pair = d_scores.reshape(apart).transpose(0, 2, 3, 1)
                d_biases = tiles.added(d_biases, by_pair, spec, corner)
            if part.slope is not None:
                d_scores = d_scores * _where_visible(part.slope, mask)
            probs, d_scores = tiles.narrowed(probs, program), tiles.narrowed(d_scores * program.scale_scores, program)
            d_v = d_v + _dot("hkq,hqd->hkd", probs, d_o)
            d_k = d_k + _dot("hkq,hqd->hkd", d_scores, q)
            d_q = lax.dynamic_index_in_dim(d_queries, at, 0, keepdims=False) + _dot("hdk,hkq->hdq", turned, d_scores)
            return d_k, d_v, d_tilted, lax.dynamic_update_index_in_dim(d_queries, d_q, at, 0), d_biases

        start = (
            *(jnp.zeros(x.shape, jnp.float32) for x in (k, v)),
            jnp.zeros((heads, group), jnp.float32) if "alibi" in requested else None,
        )
        start = *varying(start, query), d_queries, d_biases
        d_k, d_v, d_tilted, *carry = _visit(tables, batch, column, step, start)
        found = (d_k, d_v) if stored_values else (_of_keys(spec, d_k, d_v),)
        return tuple(carry), ([tiles.result(x, program) for x in found], d_tilted)

    nothing = (
        jnp.zeros((count * q_blocks, heads, spec.head_dim, group * block), jnp.float32),
        None if learned.bias is None or "bias" not in requested else jnp.zeros(learned.bias.shape, jnp.float32),
    )
    operands_of_columns = *_grid(count, kv_blocks), keys, keys_transposed, *values
    (d_queries, d_biases), (found, d_tilted) = lax.scan(one_column, varying(nothing, query), operands_of_columns)
    d_query = tiles.result(d_queries.swapaxes(2, 3) * program.scale_query, program)
    d_query = tiles.delivered(tiles.untile_queries(d_query, spec, heads, block), program)
    d_key, *d_value = (tiles.uncolumns(tiles.delivered(x, program), spec, count) for x in found)
    d_terms = Terms(
        alibi=None
        if terms.alibi is None or d_tilted is None
        else tiles.untile_slopes(d_tilted, spec, count).astype(terms.alibi.dtype),
        bias=None
        if terms.bias is None or d_biases is None
        else d_biases[tuple(map(slice, terms.bias.shape))].astype(terms.bias.dtype),
    )
    return d_query, d_key, (*d_value, None)[0], d_terms
