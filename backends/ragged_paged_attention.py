"""JAX's Pallas kernel for TPUs that serves: ``jax.experimental.pallas.ops.tpu.ragged_paged_attention``.

One call attends from the last tokens of many sequences, prefill and decode mixed, to their cached slots. The kernel
wants keys and values interleaved by head in one array of pages, and the contract has two arrays. This file gathers and
interleaves the slots of every sequence in each layer, which a cache in the kernel's own layout would save. It finds the
sequences in the layout. Each has to have its slots in a row, in order of position, and consecutive tokens. A batch that
is not so is computed by ``chunked``. Nothing of this project has run the kernel on a TPU.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from . import choices, kv_cache
from .chunked import CHUNKED
from .contract import Plan, is_whole, positions
from .devices import Target
from .features import INSTEAD, Mode, Takes, refusal
from .layout import Layout
from .operands import Terms
from .spec import AttentionSpec
from .vendor_kernel import VendorKernel

_MODULE = "jax.experimental.pallas.ops.tpu.ragged_paged_attention"
_PAGE, _PAGES, _ROWS = 128, 4, 32  # slots of a page, pages and query tokens of a block; not tuned on a TPU
_LANES = 128
OPTIONS = {
    "sequences": "sequences of a ragged batch (kv_cache.ragged_layout), an integer that divides its slots",
    "pages_per_block": "pages that the kernel copies and computes together, an integer from 1",
    "queries_per_block": "query tokens of a block, an integer from 1",
    "tuned": "path of a policy that attnsuite tune wrote; options given beside it hold over the policy's",
}


def _reasons(spec: AttentionSpec, target: Target, mode: Mode, options: Mapping[str, Any]) -> Iterator[str]:
    half = spec.dtype == "bfloat16" and spec.kv_dtype is None  # two numbers in a word
    packed, step = spec.num_kv_heads * (1 if half else 2), 8 if half else 4
    if packed not in (1, 2, 4, 8) and packed % 8:
        accepted = f"1, 2, 4, or multiples of {step} in this dtype"
        requested = f"num_kv_heads={spec.num_kv_heads}"
        yield refusal("ragged_paged_attention", requested, "whose slots fill whole tiles", accepted)
    if spec.has_segment_ids and "sequences" not in options:
        yield (
            "an array of segment ids is not supported by ragged_paged_attention without the number of sequences "
            f"(accepted: backend_options={{'sequences': n}}); give it, or {INSTEAD}."
        )


def _plan(spec: AttentionSpec, layout: Layout, target: Target, mode: Mode, options: dict[str, Any]) -> Plan:
    """Find the sequences. Options: see :data:`OPTIONS`. Raises ValueError for others, and for what does not fit."""
    sizes, notes = _sizes(spec, target, options)
    alone = "A batch that is not of sequences with consecutive tokens is computed by chunked."
    page = _page(spec.key_value_length // sizes.sequences)

    def plan(spec: AttentionSpec, layout: Layout) -> Plan:
        batch = _found(spec, layout, sizes.sequences)
        careful = CHUNKED.plan(spec, layout, target=target)

        def attend(
            query: Float[Array, "b t n h"],
            key: Float[Array, "b s k h"],
            value: Float[Array, "b s k h"],
            terms: Terms,
        ) -> Float[Array, "b t n h"]:
            return lax.cond(
                batch.fits,
                lambda: _attend(spec, batch, sizes, mode == "interpret", query, key, value),
                lambda: careful.run(query, key, value)[0],
            )

        return Plan.stateless(attend, (alone, *notes), key_blocks=(page, page * sizes.pages_per_block))

    return kv_cache.gathered(spec, layout, plan) if kv_cache.is_cache(spec) else plan(spec, layout)


class _Sizes(NamedTuple):
    """The options: sequences of a batch entry, pages and query tokens of a block."""

    sequences: int
    pages_per_block: int
    queries_per_block: int


class _Batch(NamedTuple):
    """What the kernel is told of the sequences, and what it is not told."""

    lengths: Int[Array, " sequences"]  # slots up to the last row of each, padding rows counted
    starts: Int[Array, " sequences_plus_one"]  # rows
    real: Bool[Array, " rows"]  # rows that see a key
    fits: Bool[Array, ""]  # whether the kernel computes what the layout says


def _found(spec: AttentionSpec, layout: Layout, sequences: int) -> _Batch:
    """The sequences of every batch entry, each with an equal share of its slots, and the rows of each.

    Rows that see nothing are counted to the sequence before them: the kernel has no rows between sequences.
    """
    b, shares = spec.batch, (spec.batch, sequences, -1)
    q_at, k_at = (jnp.broadcast_to(jnp.asarray(x), (b, x.shape[1])) for x in positions(spec, layout))
    k_at, slots = k_at.reshape(shares), jnp.arange(spec.key_value_length)
    filled = jnp.ones((b, spec.key_value_length), bool)
    if layout.key_value_seq_lengths is not None:
        filled = slots < jnp.asarray(layout.key_value_seq_lengths)[:, None]
    q_ids, k_ids = jnp.zeros_like(q_at), jnp.zeros_like(k_at)
    if layout.query_segment_ids is not None and layout.key_value_segment_ids is not None:
        q_ids, k_ids = jnp.asarray(layout.query_segment_ids), jnp.asarray(layout.key_value_segment_ids).reshape(shares)
    filled = filled.reshape(shares) & (k_ids >= 0)
    count, index = filled.sum(-1), jnp.arange(k_at.shape[-1])
    name = k_ids[..., 0]
    in_order = (filled == (index < count[..., None])) & (~filled | (k_at == index) & (k_ids == name[..., None]))
    twice = (name[:, :, None] == name[:, None, :]) & (count[:, :, None] > 0) & (count[:, None, :] > 0)
    fits = in_order.all() & (twice.sum((1, 2)) == (count > 0).sum(1)).all()
    # Rows, in one row for the whole batch.
    mine = (q_ids[:, :, None] == name[:, None, :]) & (count > 0)[:, None, :]
    real = (mine.any(-1) & (q_at >= 0)).reshape(-1)
    of_row = (mine.argmax(-1) + sequences * jnp.arange(b)[:, None]).reshape(-1)
    owner = lax.cummax(jnp.where(real, of_row, 0))
    total = b * sequences
    starts = jnp.searchsorted(owner, jnp.arange(total + 1), side="left").at[0].set(0)
    first = q_at.reshape(-1) - (jnp.arange(real.size) - starts[owner])  # position of the sequence's first row
    of_sequence = jnp.full(total, -(2**30)).at[owner].max(jnp.where(real, first, -(2**30)))
    seen = q_at.reshape(-1) < count.reshape(-1)[owner]
    fits &= (~real | (owner == of_row) & (first == of_sequence[owner]) & seen).all()
    # The kernel waits for a block of every sequence, so that each has a slot.
    lengths = jnp.maximum(of_sequence + starts[1:] - starts[:-1], 1)
    return _Batch(lengths.astype(jnp.int32), starts.astype(jnp.int32), real, fits)


def _attend(
    spec: AttentionSpec,
    batch: _Batch,
    sizes: _Sizes,
    interpret: bool,
    query: Float[Array, "b t n h"],
    key: Float[Array, "b s k h"],
    value: Float[Array, "b s k h"],
) -> Float[Array, "b t n h"]:
    total, rows = batch.lengths.shape[0], query.reshape(-1, *query.shape[2:])
    slots = spec.batch * spec.key_value_length // total
    pages = jnp.stack([key, value], 3).reshape(total, slots, 2 * spec.num_kv_heads, spec.head_dim)
    page = _page(slots)
    pages = jnp.pad(pages, ((0, 0), (0, -slots % page), (0, 0), (0, 0)))
    pages = pages.reshape(-1, page, *pages.shape[2:])
    table = jnp.arange(pages.shape[0], dtype=jnp.int32).reshape(total, -1)
    call = importlib.import_module(_MODULE).ragged_paged_attention
    block = min(sizes.queries_per_block, rows.shape[0])
    if interpret:  # JAX's interpreter stores masked blocks only if no side is shorter than the first
        block = max(1, min(block, spec.group_size, _LANES // spec.group_size))
    precision = jax.default_matmul_precision("default") if spec.dtype == "bfloat16" else contextlib.nullcontext()

    @jax.custom_batching.sequential_vmap  # docs/dev/upstream-issues.md
    def attended(*arrays: Array) -> Array:
        return call(
            *arrays,
            sm_scale=spec.softmax_scale,
            sliding_window=None if spec.window is None else spec.window[0] + 1,
            soft_cap=spec.logits_soft_cap,
            num_kv_pages_per_block=min(sizes.pages_per_block, table.shape[1]),
            num_queries_per_block=block,
        )

    with precision, _interpreted() if interpret else contextlib.nullcontext():
        out = attended(rows, pages, batch.lengths, table, batch.starts, jnp.array([total], jnp.int32))
    return jnp.where(batch.real[:, None, None], out, 0).reshape(query.shape)


@contextlib.contextmanager
def _interpreted() -> Iterator[None]:
    """Pallas' interpreter for TPUs, which knows no reshaped references: the kernel reads its block as an array."""
    kernel = importlib.import_module(f"{_MODULE}.kernel")

    class Copies(kernel.MultiPageAsyncCopyDescriptor):
        def wait(self) -> _Block:
            return _Block(super().wait()[...])

    with mock.patch.object(kernel, "MultiPageAsyncCopyDescriptor", Copies), pltpu.force_tpu_interpret_mode():
        yield


class _Block:
    """An array with what the kernel asks of a reference to it."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self.dtype = array.dtype

    def reshape(self, *shape: int) -> _Block:
        return _Block(self._array.reshape(*shape))

    def bitcast(self, dtype: Any) -> _Block:
        """Neighbouring rows in one row of a wider dtype, the first in the low bits."""
        rows, lanes = self._array.shape
        packed = jnp.dtype(dtype).itemsize // self.dtype.itemsize
        return _Block(
            lax.bitcast_convert_type(self._array.reshape(rows // packed, packed, lanes).swapaxes(1, 2), dtype)
        )

    def __getitem__(self, index: Any) -> Array:
        return self._array[index]


def _page(slots: int) -> int:
    return min(_PAGE, -(-slots // 16) * 16)


def _sizes(spec: AttentionSpec, target: Target, options: dict[str, Any]) -> tuple[_Sizes, tuple[str, ...]]:
    """The sizes of the options, over those of the file that ``tuned`` names, and whose they are. Raises ValueError."""
    sizes = {"sequences": 1, "pages_per_block": _PAGES, "queries_per_block": _ROWS}
    sequences, facts = options.get("sequences", 1), {}
    if "tuned" in options and isinstance(sequences, int) and sequences > 0:
        facts = _facts(spec, sequences)
    found, notes = choices.with_tuned(options, "ragged_paged_attention", OPTIONS, target, spec, facts)
    for name, value in (sizes := sizes | found).items():
        if not is_whole(value) or (name == "sequences" and spec.key_value_length % value):
            raise ValueError(
                f"ragged_paged_attention: {name}={value!r} is not accepted for key_value_length="
                f"{spec.key_value_length}; it is {OPTIONS[name]}."
            )
    return _Sizes(**sizes), notes


def _facts(spec: AttentionSpec, sequences: int) -> dict[str, int]:
    """What JAX's and tpu-inference's tables of this kernel are looked up by, rounded up to powers of two as there."""
    kernel = importlib.import_module(f"{_MODULE}.kernel")
    slots = spec.key_value_length // sequences
    page = _page(slots)
    heads = spec.num_heads, 2 * spec.num_kv_heads
    q_heads, combined = kernel.get_min_heads_per_blk(*heads, *(jnp.dtype(spec.dtype) for _ in heads))
    facts = {"heads_per_block": q_heads, "kv_heads_per_block": combined // 2, "page": page}
    facts |= {"tokens": spec.batch * spec.query_length, "slots": -(-slots // page) * page}
    return {name: 1 << (value - 1).bit_length() for name, value in facts.items()}


RAGGED_PAGED_ATTENTION = VendorKernel(
    name="ragged_paged_attention",
    allowed=Takes(
        features=frozenset({
            "causal", "window", "soft_cap", "scale", "segments", "positions", "lengths", "grouped_queries",
            "cross_length", "pages", "kv_dtype",
        }),
        dtypes=("float32", "bfloat16"),
        head_dims=(_LANES,),
        because={"head_dims": "whose rows are the lanes of a TPU"},
    ),
    platform="tpu",
    module=_MODULE,
    reasons=_reasons,
    options=OPTIONS,
    make=_plan,
)  # fmt: skip
