"""Classify the blocks of the score matrix: skip, mixed or full.

The score matrix is cut into blocks of ``block_q`` query rows by ``block_kv`` keys. The smallest and largest position
and segment id of each block decide whether a pair of blocks is all masked (skip), all visible (no mask needed) or
mixed. The idea is that of FlexAttention's BlockMask (PyTorch). Here it follows from the interval of keys that a query
sees, without a quadratic pass over elements. Only a mask without such an interval is evaluated on every pair, and a
mask array is read once. Bounds are conservative: a visited block may have nothing visible in it, but a skipped block
never has anything visible.
"""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from . import masks
from .contract import positions
from .layout import Layout
from .operands import EitherArray
from .spec import AttentionSpec

SKIP, PARTIAL, FULL = 0, 1, 2

_LARGE = np.int32(2**31 - 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class PaddedLayout:
    """A layout padded to whole blocks; NumPy arrays if it follows from the spec alone, else traced ones.

    ``batch`` is 1 if the same layout holds for every sequence. ``lengths`` is the number of leading key slots that
    exist; the padding of the last block lies behind them.
    """

    query_positions: Int[EitherArray, "batch q_pad"]
    key_value_positions: Int[EitherArray, "batch kv_pad"]
    query_segment_ids: Int[EitherArray, "batch q_pad"] | None
    key_value_segment_ids: Int[EitherArray, "batch kv_pad"] | None
    lengths: Int[EitherArray, " batch"]
    mask: Bool[EitherArray, "#batch #heads #q_pad #kv_pad"] | None = None  # the caller's own where it needs no padding

    @property
    def batch(self) -> int:
        """Distinct layouts: 1, or one per sequence."""
        return self.lengths.shape[0]


@functools.partial(jax.tree_util.register_dataclass, data_fields=("order", "partial", "full"), meta_fields=("width",))
@dataclasses.dataclass(frozen=True, slots=True)
class BlockTable:
    """The blocks to visit in every row of blocks: first the ``partial`` mixed ones, then the ``full`` ones.

    ``order[b, i, :partial[b, i]]`` are the mixed blocks of row i, the next ``full[b, i]`` the all-visible ones. The
    rest is not visited. A block in column c begins at element ``c * width``.
    """

    width: int
    order: Int[EitherArray, "batch rows columns"]
    partial: Int[EitherArray, "batch rows"]
    full: Int[EitherArray, "batch rows"]


def pad_layout(spec: AttentionSpec, layout: Layout, block_q: int, block_kv: int) -> PaddedLayout:
    """Fill in the defaults of ``layout``, which is that of a plan (:func:`layout.fit`), and pad it to whole blocks."""
    q_pos, k_pos = positions(spec, layout)
    q_pad, k_pad = -spec.query_length % block_q, -spec.key_value_length % block_kv
    lengths = layout.key_value_seq_lengths
    if lengths is None:
        lengths = np.full((1,), spec.key_value_length, np.int32)
    q_seg, k_seg = layout.query_segment_ids, layout.key_value_segment_ids
    padded: dict[str, Any] = {
        "query_positions": _pad(q_pos, q_pad, 0),
        "key_value_positions": _pad(k_pos, k_pad, 0),
        "query_segment_ids": None if q_seg is None else _pad(q_seg, q_pad, -1),
        "key_value_segment_ids": None if k_seg is None else _pad(k_seg, k_pad, -1),
        "lengths": lengths,
    }
    mask = None if layout.mask is None else fitted(layout.mask, block_q, block_kv)
    batch = max(x.shape[0] for x in (*padded.values(), mask) if x is not None)
    return PaddedLayout(**{name: _broadcast(x, batch) for name, x in padded.items()}, mask=mask)


def fitted(x: EitherArray, rows: int, columns: int) -> Any:
    """``x`` padded with zeros to whole blocks of ``rows`` queries and ``columns`` keys."""
    amounts = [0 if n == 1 else -n % size for n, size in zip(x.shape[2:], (rows, columns), strict=True)]
    if not any(amounts):
        return x
    xp: Any = np if isinstance(x, np.ndarray) else jnp
    return xp.pad(x, [(0, 0), (0, 0), *((0, amount) for amount in amounts)])


def classify(
    spec: AttentionSpec, layout: PaddedLayout, block_q: int, block_kv: int
) -> Int[EitherArray, "batch q_blocks kv_blocks"]:
    """SKIP, PARTIAL or FULL for every pair of blocks."""
    xp = _module(layout)
    k_slots = np.arange(layout.key_value_positions.shape[1], dtype=np.int32)[None]
    k_real = k_slots < layout.lengths[:, None]
    q_real = (np.arange(layout.query_positions.shape[1]) < spec.query_length)[None]
    q_low, q_high = (x[:, :, None] for x in _bounds(xp, layout.query_positions, q_real, block_q))
    k_low, k_high = (x[:, None, :] for x in _bounds(xp, layout.key_value_positions, k_real, block_kv))
    some = (k_low <= k_high) & (q_low <= q_high)  # the block has a real key and a real query
    every = some & _blocked(k_real, block_kv).all(-1)[:, None, :]
    mask = spec.positional_mask
    if mask is not None:
        seen = of_bounds(mask, (q_low, q_high), (k_low, k_high))
        if seen is None:
            q_pos, k_pos = layout.query_positions, layout.key_value_positions
            seen = on_blocks(mask, q_pos, k_pos, q_real, k_real, block_q, block_kv)
        some, every = some & seen[0], every & seen[1]
    if layout.query_segment_ids is not None and layout.key_value_segment_ids is not None:
        q_seg, k_seg = layout.query_segment_ids, layout.key_value_segment_ids
        q_min, q_max = (x[:, :, None] for x in _bounds(xp, q_seg, q_seg >= 0, block_q))
        k_min, k_max = (x[:, None, :] for x in _bounds(xp, k_seg, (k_seg >= 0) & k_real, block_kv))
        padless = _blocked(q_seg >= 0, block_q).all(-1)[:, :, None] & _blocked(k_seg >= 0, block_kv).all(-1)[:, None, :]
        some = some & (k_min <= q_max) & (k_max >= q_min) & (q_min <= q_max) & (k_min <= k_max)
        every = every & padless & (q_min == q_max) & (k_min == k_max) & (q_min == k_min)
    if layout.mask is not None:
        seen = _of_blocks(layout.mask, block_q, block_kv)
        some, every = some & seen[0], every & seen[1]
    if spec.has_bias:  # -inf hides a key: only the bias itself tells, block by block
        every = xp.zeros_like(every)
    return xp.where(every & some, FULL, xp.where(some, PARTIAL, SKIP)).astype(np.int32)


def _of_blocks(mask: Bool[EitherArray, "#b #n #t #s"], rows: int, columns: int) -> tuple[Any, Any]:
    """Whether a fitted mask shows some, and whether it shows every pair of each block; an axis of size one stays."""
    b, n, t, s = mask.shape
    rows, columns = min(rows, t), min(columns, s)
    apart = mask.reshape(b, n, t // rows, rows, s // columns, columns)
    return apart.any((1, 3, 5)), apart.all((1, 3, 5))


def of_bounds(mask: masks.Mask, query: tuple[Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any] | None:
    """Whether some and whether every pair of a block is visible, by the lowest and highest positions of its two sides.

    None where the mask's interval is not exact: then :func:`on_blocks` evaluates the pairs.
    """
    (q_low, q_high), (k_low, k_high) = query, key
    (first, last, exact), (first_of_last, last_of_last, _) = mask.interval(q_low), mask.interval(q_high)
    if not exact:
        return None
    some = every = True
    if first is not None:
        some, every = k_high >= first, k_low >= first_of_last
    if last is not None:
        some, every = some & (k_low <= last_of_last), every & (k_high <= last)
    return some, every


def on_blocks(
    function: masks.MaskFunction,
    query: Int[EitherArray, "batch q_pad"],
    key: Int[EitherArray, "batch kv_pad"],
    real_query: Bool[EitherArray, "#batch q_pad"],
    real_key: Bool[EitherArray, "#batch kv_pad"],
    block_q: int,
    block_kv: int,
) -> tuple[Bool[EitherArray, "batch rows columns"], Bool[EitherArray, "batch rows columns"]]:
    """Whether some, and whether every, real pair of each block is visible, by evaluating the function on each pair.

    The corners of a block do not tell: a dilated mask can show all four and hide the rest. Memory is that of one row of
    blocks at a time. The results are NumPy arrays if the arguments are.
    """

    def row(query: Any, real_query: Any, seen: Any) -> tuple[Any, Any]:
        real = real_query[:, :, None] & real_key[:, None, :]
        blocks = (query.shape[0], block_q, -1, block_kv)
        return (seen & real).reshape(blocks).any((1, 3)), (seen | ~real).reshape(blocks).all((1, 3))

    if all(isinstance(x, np.ndarray) for x in (query, key, real_query, real_key)):
        starts = range(0, query.shape[1], block_q)
        parts = [(query[:, i : i + block_q], real_query[:, i : i + block_q]) for i in starts]
        found = [row(q, real, masks.evaluated(function, q[:, :, None], key[:, None, :])) for q, real in parts]
        some, every = (np.stack(x, 1) for x in zip(*found, strict=True))
        return some, every
    by_row = [x.reshape(x.shape[0], -1, block_q).swapaxes(0, 1) for x in map(jnp.asarray, (query, real_query))]
    keys = jnp.asarray(key)[:, None, :]
    found = lax.map(lambda x: row(x[0], x[1], function(x[0][:, :, None], keys)), tuple(by_row))
    return found[0].swapaxes(0, 1), found[1].swapaxes(0, 1)


def table(kinds: Int[EitherArray, "batch rows columns"], width: int) -> BlockTable:
    """The blocks to visit, row by row."""
    xp: Any = np if isinstance(kinds, np.ndarray) else jnp
    rank = xp.where(kinds == PARTIAL, 0, xp.where(kinds == FULL, 1, 2))
    return BlockTable(
        width,
        xp.argsort(rank, axis=-1, stable=True).astype(np.int32),
        (kinds == PARTIAL).sum(-1).astype(np.int32),
        (kinds == FULL).sum(-1).astype(np.int32),
    )


def coarsen(kinds: Int[EitherArray, "batch rows columns"], ratio: int) -> tuple[Any, Any]:
    """Kinds of the blocks, and of runs of ``ratio`` blocks. An all-visible run is removed from the single blocks.

    Wide blocks cost fewer passes over the running maximum and sum; narrow ones waste less where a mask is needed.
    """
    xp = np if isinstance(kinds, np.ndarray) else jnp
    runs = (kinds.reshape(*kinds.shape[:2], -1, ratio) == FULL).all(-1)
    wide = xp.where(runs, FULL, SKIP).astype(np.int32)
    return xp.where(xp.repeat(runs, ratio, axis=-1), SKIP, kinds).astype(np.int32), wide


class Place(NamedTuple):
    """Where one block lies: its batch entry, its first query and first key, and how many there are of each."""

    batch: Int[EitherArray, ""]
    query: Int[EitherArray, ""]
    key: Int[EitherArray, ""]
    rows: int
    columns: int


def visible(spec: AttentionSpec, layout: PaddedLayout, at: Place) -> Bool[EitherArray, "rows columns"]:
    """The pairs of one mixed block that may attend."""
    slots = at.key + jnp.arange(at.columns, dtype=jnp.int32)
    q_pos, k_pos = positions_of(layout, at)
    ok = (slots < jnp.asarray(layout.lengths)[at.batch])[None]
    if spec.positional_mask is not None:
        ok = ok & spec.positional_mask(q_pos[:, None], k_pos[None])
    if layout.query_segment_ids is not None:
        q_seg = _part(layout.query_segment_ids, at.batch, at.query, at.rows)[:, None]
        ok = ok & (q_seg == _part(layout.key_value_segment_ids, at.batch, at.key, at.columns)[None]) & (q_seg >= 0)
    return jnp.broadcast_to(ok, (at.rows, at.columns))


def positions_of(layout: PaddedLayout, at: Place) -> tuple[Int[Array, " rows"], Int[Array, " columns"]]:
    """Positions of the queries and of the keys of one block."""
    queries = _part(layout.query_positions, at.batch, at.query, at.rows)
    return queries, _part(layout.key_value_positions, at.batch, at.key, at.columns)


def _part(x: Any, batch: Any, start: Any, size: int) -> Array:
    return jax.lax.dynamic_slice(jnp.asarray(x), (batch, start), (1, size))[0]


def _module(layout: PaddedLayout) -> ModuleType:
    """NumPy if nothing is traced, so that the table of a static layout is a constant of the program; else jax.numpy."""
    return np if all(isinstance(x, np.ndarray) for x in jax.tree.leaves(layout)) else jnp


def _blocked(x: Any, size: int) -> Any:
    return x.reshape(x.shape[0], -1, size)


def _bounds(xp: ModuleType, x: Any, keep: Any, size: int) -> tuple[Any, Any]:
    """Smallest and largest kept value per block; (large, -large) where none is kept."""
    low = _blocked(xp.where(keep, x, _LARGE), size).min(-1)
    high = _blocked(xp.where(keep, x, -_LARGE), size).max(-1)
    return low, high


def _pad(x: Any, amount: int, value: int) -> Any:
    xp = np if isinstance(x, np.ndarray) else jnp
    return xp.pad(x, ((0, 0), (0, amount)), constant_values=value).astype(np.int32)


def _broadcast(x: Any, batch: int) -> Any:
    if x is None:
        return None
    xp = np if isinstance(x, np.ndarray) else jnp
    return xp.broadcast_to(x, (batch, *x.shape[1:])).astype(np.int32)
