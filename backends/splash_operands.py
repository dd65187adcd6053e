"""What a splash kernel leaves to its caller, for JAX's splash and tokamax's alike.

The query is scaled, and lengths are padded to whole blocks. The part of the mask that depends on data becomes segment
ids: key lengths, padding, and all of it for one query token (any mask of one row is a segmentation of the keys), whose
heads become rows. A row that sees nothing gets an attention sink of its own, so that its output is zero. What of
the mask follows from slots alone is a :class:`Masking`, which both kernels sort into blocks. No kernel is imported
here: JAX or tokamax may drop theirs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from . import blocks, masks
from .contract import is_whole, may_attend
from .devices import KIB, TPUS, Target
from .features import BASIC_FEATURES, Feature, Mode, refusal
from .layout import Layout, first_slots
from .spec import AttentionSpec
from .vendor_kernel import padded, round_up

LANES = 128  # of a TPU's vector unit; every block is a multiple of it

# Ids that match nothing: real ones are not negative, and these two differ from each other.
_UNSEEING_QUERY, _UNSEEN_KEY = -1, -2
# An attention sink (a logit without a value). It is so small that it changes no row that sees a key, and larger than
# the kernel's mask value (-2.4e38). A row that sees nothing attends to the sink alone: its output and gradients are 0.
_NO_SINK = -1e30

FEATURES: frozenset[Feature] = frozenset({*BASIC_FEATURES - {"mask", "bias"}, "sinks", "mask_function"})
DTYPES = ("float32", "bfloat16")
BLOCK_OPTIONS = {
    "block_q": "query rows per block, a multiple of 128",
    "block_kv": "keys per block, a multiple of 128",
    "block_kv_compute": "keys per step inside a block, a multiple of 128 that divides block_kv",
    "block_q_backward": "query rows per block in the backward pass, a multiple of 128",
    "block_kv_backward": "keys per block in the backward pass, a multiple of 128",
    "block_kv_compute_backward": "keys per step inside a block of the backward pass, a multiple of 128 that divides it",
}


class SegmentIds(NamedTuple):
    """A query sees a key of the same id. Both kernels read the fields by these names."""

    q: Int[Array, "b padded"]
    kv: Int[Array, "b padded"]


@dataclasses.dataclass(frozen=True, slots=True)
class Blocks:
    """Rows and keys per block of both passes, and the query and key lengths padded to whole blocks."""

    q: int
    kv: int
    kv_compute: int
    q_backward: int
    kv_backward: int
    kv_backward_compute: int
    lengths: tuple[int, int]
    backward: bool  # whether there is a backward pass
    fused: bool  # whether one kernel computes all of it

    @property
    def keys(self) -> tuple[int, ...]:
        """The sizes of blocks of keys."""
        backward = (self.kv_backward, self.kv_backward_compute) if self.backward else ()
        return (self.kv, self.kv_compute, *backward)


def blocks_of(name: str, spec: AttentionSpec, target: Target, options: Mapping[str, Any]) -> Blocks:
    """The blocks of these options of the backend ``name``. Raises ValueError if one does not divide the other."""
    rows = spec.group_size if spec.query_length == 1 else spec.query_length
    largest = default_block(target)
    while largest > LANES and largest * max(spec.head_dim, spec.value_head_dim or 0) > 512 * 256:
        largest //= 2
    q, kv = (_even_block(length, largest) for length in (rows, spec.key_value_length))
    q, kv = options.get("block_q", q), options.get("block_kv", kv)
    q_back, kv_back = options.get("block_q_backward", q), options.get("block_kv_backward", kv)
    compute, compute_back = options.get("block_kv_compute", kv), options.get("block_kv_compute_backward", kv_back)
    if kv % compute:
        raise ValueError(f"{name}: block_kv_compute={compute} does not divide block_kv={kv}; give one that does.")
    if kv_back % compute_back:
        raise ValueError(
            f"{name}: block_kv_compute_backward={compute_back} does not divide block_kv_backward={kv_back}; "
            "give one that does."
        )
    step_q, step_kv = (q, kv) if not spec.needs_grad else (math.lcm(q, q_back), math.lcm(kv, kv_back))
    lengths = round_up(rows, step_q), round_up(spec.key_value_length, step_kv)
    fused = options.get("fused_backward", False)
    return Blocks(q, kv, compute, q_back, kv_back, compute_back, lengths, spec.needs_grad, fused)


def is_block(value: object) -> bool:
    """Whether an option's value is a multiple of :data:`LANES`."""
    return is_whole(value, LANES) and value % LANES == 0


def default_block(target: Target) -> int:
    """Rows and keys per block where none are given, for head dims up to 256.

    Not tuned on a TPU, where nothing of this project has run: half of what overflows a kernel's memory is taken
    (``attnsuite compile``; tests/suite/test_compiling.py). An unknown kind gets the size that fits all.
    """
    memory = {kind: known.kernel_memory for kind, known in TPUS.items()}
    return memory.get(target.kind, min(memory.values())) // (32 * KIB)


def _even_block(length: int, largest: int) -> int:
    """The block that covers ``length`` in as few blocks as ``largest`` allows, with as little padding."""
    return round_up(-(-length // -(-length // largest)), LANES)


def segment_ids(spec: AttentionSpec, layout: Layout, lengths: tuple[int, int]) -> SegmentIds | None:
    """Segment ids for the part of the mask that depends on data: lengths, padding, segments, one query's positions."""
    rows, keys = spec.query_length, spec.key_value_length
    if rows == 1:
        mask = may_attend(spec, layout)
        seen = jnp.ones((1, keys), bool) if mask is None else mask[:, 0, 0]
        ids = jnp.zeros((spec.batch, lengths[0]), jnp.int32)
        keys_seen = jnp.broadcast_to(seen, (spec.batch, keys))
        k = jnp.where(keys_seen, 0, jnp.int32(_UNSEEN_KEY))
        return SegmentIds(ids, padded(k, lengths[1], fill=_UNSEEN_KEY))
    # Under a causal mask no row sees the padding behind the last key, if there are no more rows than keys.
    padding_shows = keys < lengths[1] and not (spec.is_causal and rows <= keys)
    if not (spec.has_segment_ids or spec.has_seq_lengths or padding_shows):
        return None
    q = jnp.zeros((spec.batch, rows), jnp.int32)
    k = jnp.zeros((spec.batch, keys), jnp.int32)
    if layout.query_segment_ids is not None and layout.key_value_segment_ids is not None:
        q, k = layout.query_segment_ids, layout.key_value_segment_ids
        q, k = jnp.where(q < 0, _UNSEEING_QUERY, q), jnp.where(k < 0, _UNSEEN_KEY, k)
    if layout.key_value_seq_lengths is not None:
        slots = jnp.arange(keys, dtype=jnp.int32)[None, :]
        k = jnp.where(slots < layout.key_value_seq_lengths[:, None], k, _UNSEEN_KEY)
    return SegmentIds(padded(q, lengths[0], fill=_UNSEEING_QUERY), padded(k, lengths[1], fill=_UNSEEN_KEY))


def rows_that_see(ids: SegmentIds, rows: int, *, causal: bool) -> Bool[Array, "b t"]:
    """The rows that see any key."""
    first, found = first_slots(ids.kv, ids.q[:, :rows])
    return found & (first <= jnp.arange(rows)) if causal else found


def one_key_is_seen(ids: SegmentIds | None) -> Bool[Array, "b 1 1 1"] | None:
    """Where query and key get no gradient: a softmax over one key is 1 whatever the scores. None: nowhere.

    The kernel's gradient is 0 there up to rounding. The rounding errors of all rows of a batch entry add up in its one
    key, which has no other gradient to hide them.
    """
    return None if ids is None else ((ids.kv != _UNSEEN_KEY).sum(1) == 1)[:, None, None, None]


def no_sinks(spec: AttentionSpec) -> Float[Array, " heads"]:
    """A sink per head of the kernel, too small to change a row. One query token has its group's heads as rows."""
    return jnp.full(spec.num_kv_heads if spec.query_length == 1 else spec.num_heads, _NO_SINK, jnp.float32)


def to_kernel(
    spec: AttentionSpec, lengths: tuple[int, int], query: Array, key: Array, value: Array
) -> tuple[Float[Array, "b n t h"], Float[Array, "b k s h"], Float[Array, "b k s v"]]:
    """Heads before length, lengths padded, the query scaled. One query token has its group's heads as rows."""
    query = (query.astype(jnp.float32) * spec.softmax_scale).astype(query.dtype)
    key, value = (padded(x.swapaxes(1, 2), lengths[1], 2) for x in (key, value))
    return rows_to_kernel(spec, lengths[0], query), key, value


def rows_to_kernel(spec: AttentionSpec, length: int, x: Float[Array, "b t n d"]) -> Float[Array, "b n padded d"]:
    """Queries, outputs or their gradients as the kernel's rows."""
    by_group = spec.batch, spec.num_kv_heads, spec.group_size, x.shape[-1]
    return padded(x.reshape(by_group) if spec.query_length == 1 else x.swapaxes(1, 2), length, 2)


def from_kernel(spec: AttentionSpec, out: Float[Array, "b n t v"]) -> Float[Array, "b t n v"]:
    """The kernel's rows as an output."""
    if spec.query_length == 1:
        return out[:, :, : spec.group_size].reshape(spec.batch, 1, spec.num_heads, -1)
    return out[:, :, : spec.query_length].swapaxes(1, 2)


def in_context(
    call: Callable[..., Array], context: Callable[[], Any], *, one_by_one: bool = False
) -> Callable[..., Array]:
    """``call(q, k, v, ids, term)`` traced in ``context()``, forward and backward.

    A gradient is traced after the call has returned, hence its own rule. ``one_by_one``: ``jax.vmap`` becomes a loop,
    because Pallas' interpreter for TPUs does not know the axis that it adds to a grid.
    """
    batched = jax.custom_batching.sequential_vmap if one_by_one else lambda function: function

    def derived(q: Array, k: Array, v: Array, ids: Any, term: Any) -> tuple[Array, Any]:
        with context():
            return jax.vjp(lambda q, k, v, term: call(q, k, v, ids, term), q, k, v, term)

    @batched
    def forward(*operands: Any) -> tuple[Array, Any]:
        out, pull_back = derived(*operands)
        return out, operands if one_by_one else pull_back

    @batched
    def backward(residuals: Any, d_out: Array) -> tuple[Any, ...]:
        pull_back = derived(*residuals)[1] if one_by_one else residuals
        with context():
            d_query, d_key, d_value, d_term = pull_back(d_out)
            return d_query, d_key, d_value, None, d_term

    @jax.custom_vjp
    @batched
    def run(q: Array, k: Array, v: Array, ids: Any, term: Any) -> Array:
        with context():
            return call(q, k, v, ids, term)

    run.defvjp(forward, backward)
    return run


def default_precision() -> Any:
    """A context without the matmul precision that the caller asks for.

    Products of bfloat16 are exact in float32 as they are, and Mosaic rejects a higher precision for them ("Bad lhs
    type").
    """
    return jax.default_matmul_precision("default")


def scaling_notes(spec: AttentionSpec) -> tuple[str, ...]:
    """That a kernel gets a half-precision query that the scale has rounded, where it does."""
    if spec.dtype == "float32" or math.frexp(spec.softmax_scale)[0] == 0.5:
        return ()
    note = (
        f"The scale {spec.softmax_scale:.4g} is no power of two and rounds the {spec.dtype} query once more: with "
        "logits of 70 output and gradients are off by more than the judge allows."
    )
    return (note,)


def reasons(name: str, spec: AttentionSpec, target: Target, mode: Mode, options: Mapping[str, Any]) -> Iterator[str]:
    """What a mask by slot cannot say, and sinks of one token; ``name`` is the backend's."""
    if spec.has_positions and spec.positional_mask is not None and spec.query_length > 1:
        requested = f"an array of explicit positions with query_length={spec.query_length}"
        yield refusal(name, requested, "whose mask is by slot", "one query token, or positions that are arange")
    if spec.has_sinks and spec.query_length == 1 < spec.group_size:
        heads = f"num_heads={spec.num_heads} on num_kv_heads={spec.num_kv_heads}"
        requested = f"an array of attention sinks with query_length=1 and {heads}"
        why = "whose rows are then the heads of a group and share one sink"
        yield refusal(name, requested, why, "more query tokens, or as many KV heads as heads")


@dataclasses.dataclass(frozen=True)
class Masking:
    """The visibility that follows from slots alone, known before there is data. Hashable: the key of the cache.

    It has what a kernel asks of a mask. With ``q_sequence`` and ``mask_function`` the kernel computes the mask of a
    mixed block by itself.
    """

    query_length: int
    key_value_length: int
    mask_function: masks.Mask | None = None

    @staticmethod
    def of(spec: AttentionSpec, query_length: int, key_value_length: int) -> Masking:
        """The mask of ``spec`` over padded lengths."""
        mask = None if spec.query_length == 1 else spec.positional_mask  # of one query all of it is in the segment ids
        return Masking(query_length, key_value_length, mask)

    @property
    def shape(self) -> tuple[int, int]:
        """Query and key slots."""
        return self.query_length, self.key_value_length

    @functools.cached_property
    def q_sequence(self) -> np.ndarray:
        """The query slots."""
        return np.arange(self.query_length, dtype=np.int32)

    def __getitem__(self, index: tuple[slice, slice]) -> Bool[np.ndarray, "q k"]:
        rows, columns = (np.arange(n, dtype=np.int32)[part] for n, part in zip(self.shape, index, strict=True))
        assert self.mask_function is not None  # noqa: S101 (kernels have a mask of their own for all of them)
        return self.mask_function(rows[:, None], columns[None, :])

    @property
    def hides_everything(self) -> bool:
        """Whether no slot sees any; kernels cannot be made of such a mask."""
        return visited_blocks(self, math.gcd(256, self.query_length), self.key_value_length) == 0


def of_nothing(q: Array, k: Array, v: Array, ids: Any, sinks: Array) -> Array:
    """In place of a kernel where :attr:`Masking.hides_everything`: zero for each row of one batch entry."""
    return jnp.zeros((*q.shape[:2], v.shape[-1]), q.dtype)


def visited_blocks(masking: Masking, block_q: int, block_kv: int) -> int:
    """How many blocks of the score matrix have a visible pair, or nearly so where a mask has several conditions."""
    queries, keys = (np.arange(n, dtype=np.int32) for n in (masking.query_length, masking.key_value_length))
    q, k = queries[::block_q, None], keys[None, ::block_kv]
    if masking.mask_function is None:
        return q.size * k.size
    seen = blocks.of_bounds(masking.mask_function, (q, q + (block_q - 1)), (k, k + (block_kv - 1)))
    if seen is None:
        real = (queries >= 0)[None], (keys >= 0)[None]
        seen = blocks.on_blocks(masking.mask_function, queries[None], keys[None], *real, block_q, block_kv)
    return int(np.broadcast_to(seen[0], (1, q.size, k.size)).sum())
