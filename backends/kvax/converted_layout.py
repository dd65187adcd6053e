"""Convert the contract's layout to one for which Kvax's kernels compute right results.

Kvax 0.1.0 silently gives wrong numbers for lengths that its blocks do not divide, for segment ids beyond the key
length, for segments that come back, for positions out of order, and in the backward pass for query and key lengths that
differ. It leaves rows that see nothing unspecified. This module pads lengths, renames segments, and makes rows that see
nothing padding. If the order of keys or queries breaks Kvax's shortcut through unmasked blocks (:func:`in_order`),
every block is masked instead. Each guard has a test that fails without it.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from ..contract import positions
from ..layout import Layout, first_slots
from ..operands import EitherArray
from ..spec import AttentionSpec
from ..vendor_kernel import padded, round_up
from .block_sizes import Passes

QUERY_PADDING = -1  # Kvax's padding id. Keys get key_padding() instead: in its kernels padding matches padding.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class KvaxLayout:
    """Padded positions and segments for Kvax, the rows that see a key, and whether the order is what Kvax assumes.

    ``seen`` is None if every row sees a key, ``keys_in_order`` and ``queries_in_order`` if the order is known to hold.
    """

    query_positions: Int[Array, "batch padded_q_len"]
    query_segment_ids: Int[Array, "batch padded_q_len"]
    key_positions: Int[Array, "batch padded_kv_len"]
    key_segment_ids: Int[Array, "batch padded_kv_len"]
    seen: Bool[Array, "batch q_len"] | None
    keys_in_order: Bool[Array, " batch"] | None
    queries_in_order: Bool[Array, " batch"] | None


def padded_lengths(spec: AttentionSpec, blocks: Passes, shards: int = 1) -> tuple[int, int]:
    """Query and key lengths of the kernels; ``shards`` is the number of parts into which the queries are divided.

    Kvax's backward pass computes dq and dk, dv on one grid, which is right for equal lengths only.
    """
    step = blocks.step(spec.needs_grad)
    query = round_up(spec.query_length, step * shards)
    key = round_up(spec.key_value_length, step)
    if spec.needs_grad:
        query = key = round_up(max(query, key), step * shards)
    return query, key


def key_padding(padded_key_length: int) -> int:
    """The id of padded keys: Kvax's mask kernel turns its own padding id into this one and skips it.

    Given from the start, the id matches no query in the other kernels. There Kvax's -1 of a key would match the -1 of a
    query.
    """
    return padded_key_length + 1


@functools.partial(jax.jit, static_argnums=(0, 2, 3))  # one program; operation by operation they are eighty
def convert(spec: AttentionSpec, layout: Layout, padded_query_length: int, padded_key_length: int) -> KvaxLayout:
    """The layout of a call for Kvax's kernels. Arrays may be traced."""
    B, T, S = spec.batch, spec.query_length, spec.key_value_length
    nowhere = (np.zeros((1, T), np.int32), np.zeros((1, S), np.int32))  # not causal: everything is at one place
    q_pos, k_pos = positions(spec, layout) if spec.is_causal else nowhere
    q_pos, k_pos = (jnp.broadcast_to(jnp.asarray(x, jnp.int32), (B, n)) for x, n in ((q_pos, T), (k_pos, S)))
    plain = not (spec.has_segment_ids or spec.has_seq_lengths or (spec.has_positions and spec.is_causal))
    q_ids, k_ids = jnp.zeros((B, T), jnp.int32), jnp.zeros((B, S), jnp.int32)
    seen = keys_in_order = queries_in_order = None
    if not plain:
        q_valid, k_valid = jnp.ones((B, T), bool), jnp.ones((B, S), bool)
        q_segments, k_segments = q_ids, k_ids
        if layout.query_segment_ids is not None and layout.key_value_segment_ids is not None:
            q_segment_ids, k_segment_ids = layout.query_segment_ids, layout.key_value_segment_ids
            k_ids, _ = first_slots(k_segment_ids, k_segment_ids)
            q_ids, found = first_slots(k_segment_ids, q_segment_ids)
            q_segments, k_segments = first_slots(q_segment_ids, q_segment_ids)[0], k_ids
            q_valid, k_valid = found & (q_segment_ids >= 0), k_segment_ids >= 0
        if layout.key_value_seq_lengths is not None:
            k_valid &= jnp.arange(S)[None, :] < layout.key_value_seq_lengths[:, None]
        seen = q_valid & _sees_a_key(q_ids, q_pos, k_ids, k_pos, k_valid)
        keys_in_order = in_order(k_segments, k_pos, k_valid)
        queries_in_order = in_order(q_segments, q_pos, seen)
        q_ids = jnp.where(seen, q_ids, QUERY_PADDING)
        k_ids = jnp.where(k_valid, k_ids, key_padding(padded_key_length))
    return KvaxLayout(
        # Padding continues the count of slots, as Kvax's own sequential positions do.
        _extend(q_pos, padded_query_length),
        padded(q_ids, padded_query_length, fill=QUERY_PADDING),
        _extend(k_pos, padded_key_length),
        padded(k_ids, padded_key_length, fill=key_padding(padded_key_length)),
        seen,
        keys_in_order,
        queries_in_order,
    )


def in_order(
    segment: Int[EitherArray, "batch length"],
    position: Int[EitherArray, "batch length"],
    valid: Bool[EitherArray, "batch length"],
) -> Bool[Array, " batch"]:
    """Whether no segment comes back and no position falls inside a segment, so that full blocks are neighbours.

    ``segment`` names each valid slot's segment by a number below the length. Between the first and the last block that
    a block sees in full, Kvax masks nothing; on one side of these blocks it masks only by segment.
    """
    length = segment.shape[1]
    slots = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), segment.shape)

    def begins(segment: Array, valid: Array, slots: Array) -> Array:
        return slots == jax.ops.segment_min(jnp.where(valid, slots, length), segment, length)[segment]

    begins_here = jax.vmap(begins)(jnp.asarray(segment), jnp.asarray(valid), slots)[:, 1:]
    goes_on = (segment[:, 1:] == segment[:, :-1]) & valid[:, :-1] & (position[:, 1:] >= position[:, :-1])
    return (goes_on | begins_here | ~valid[:, 1:]).all(1)


def _sees_a_key(q_ids: Array, q_pos: Array, k_ids: Array, k_pos: Array, k_valid: EitherArray) -> Array:
    """Whether the earliest valid key of a row's segment is at or before the row."""

    def one(q_ids: Array, q_pos: Array, k_ids: Array, k_pos: Array, k_valid: Array) -> Array:
        length = k_ids.shape[0]
        group = jnp.where(k_valid, k_ids, length)
        earliest = jax.ops.segment_min(k_pos, group, length + 1)
        any_key = jax.ops.segment_max(k_valid.astype(jnp.int32), group, length + 1) > 0
        return any_key[q_ids] & (earliest[q_ids] <= q_pos)

    return jax.vmap(one)(q_ids, q_pos, k_ids, k_pos, jnp.asarray(k_valid))


def _extend(x: Array, length: int) -> Array:
    """Positions of padding: those of the slots, as Kvax assumes where it counts slots itself."""
    return jnp.concatenate(
        [x, jnp.broadcast_to(jnp.arange(x.shape[1], length, dtype=x.dtype), (x.shape[0], length - x.shape[1]))], 1
    )
