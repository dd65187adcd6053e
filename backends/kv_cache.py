"""Read keys and values from a cache: pages that a table deals to sequences, and numbers that stand for a product.

A paged cache (vLLM, arXiv 2309.06180) keeps the slots of all sequences in pages ``[num_pages, page_size, kv_heads,
head_dim]``; ``layout.page_table`` says which pages a sequence has. A quantised cache keeps int8 or float8 numbers; the
terms hold the factors. :func:`gathered` is the reference: any backend, on contiguous keys and values that are gathered
per layer. :func:`block_reader` reads some slots of one sequence, for a backend that works in blocks (``chunked``).

A ragged batch (prefill and decode mixed, no padding) needs nothing more: :func:`ragged_layout` writes it as one row of
tokens whose segment ids are the sequences.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Num

from .contract import Carry, Plan
from .layout import Layout, key_rows, unread_slots
from .operands import NO_TERMS, EitherArray, Terms
from .spec import AttentionSpec

# The largest number of each dtype.
_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


def is_cache(spec: AttentionSpec) -> bool:
    """Whether keys and values are paged or quantised."""
    return spec.page_size is not None or spec.kv_dtype is not None


def quantize(
    x: Float[EitherArray, "rows slots kv_heads dim"], kv_dtype: str, *, axes: tuple[int, ...] = (3,)
) -> tuple[Num[Array, "rows slots kv_heads dim"], Float[Array, "#rows #slots #kv_heads"]]:
    """Keys or values as numbers of ``kv_dtype`` ("int8" or "float8_e4m3fn") and their float32 scales.

    The numbers over ``axes`` share a scale, which maps the largest magnitude of them to the largest number of the
    dtype. ``(3,)``: a scale per slot and KV head; ``(1, 3)``: one per page (or sequence) and KV head. Raises ValueError
    for another dtype, and for ``axes`` without the last one, 3: a cache has no scale per channel.

    >>> numbers, scales = quantize(jnp.ones((5, 16, 2, 64)), "int8", axes=(1, 3))
    >>> str(numbers.dtype), scales.shape
    ('int8', (5, 1, 2))
    """
    if kv_dtype not in _LARGEST:
        raise ValueError(f"kv_dtype={kv_dtype!r} is not supported; use one of {', '.join(_LARGEST)}.")
    if not {3, -1} & set(axes):
        raise ValueError(f"axes={axes!r} lacks 3: a cache has no scale for each of head_dim's numbers; give (3, ...).")
    return _quantize(x, kv_dtype, tuple(axes))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _quantize(x: Array, kv_dtype: str, axes: tuple[int, ...]) -> tuple[Array, Array]:
    x, largest = x.astype(jnp.float32), _LARGEST[kv_dtype]
    top = jnp.abs(x).max(axes, keepdims=True)
    scales = jnp.where(top == 0.0, 1.0, top / largest)
    numbers = jnp.clip(x / scales, -largest, largest)
    numbers = jnp.round(numbers) if kv_dtype == "int8" else numbers
    return numbers.astype(kv_dtype), scales[..., 0]


def ragged_layout(
    page_table: Int[EitherArray, "sequences pages_per_sequence"],
    key_value_seq_lengths: Int[EitherArray, " sequences"],
    query_starts: Int[EitherArray, " sequences_plus_one"],
    *,
    page_size: int,
    num_tokens: int,
) -> Layout:
    """The layout of queries ``[1, num_tokens, heads, head_dim]`` that are the last tokens of several sequences.

    Sequence ``i`` has the tokens ``query_starts[i]`` to ``query_starts[i + 1]`` and as many of the last filled slots of
    its pages; ``key_value_seq_lengths[i]`` counts them with these tokens. A sequence may have none. Tokens behind the
    last start are padding. The arguments are those of JAX's ``ragged_paged_attention`` and may be traced. The spec has
    ``batch=1``, ``key_value_length=sequences * pages_per_sequence * page_size``, ``has_segment_ids`` and
    ``has_positions``. Raises ValueError for shapes that do not fit.
    """
    table, lengths, starts = (jnp.asarray(x, jnp.int32) for x in (page_table, key_value_seq_lengths, query_starts))
    sequences = lengths.shape[0]
    if table.ndim != 2 or table.shape[0] != sequences or starts.shape != (sequences + 1,):
        raise ValueError(
            f"page_table {tuple(table.shape)}, key_value_seq_lengths {tuple(lengths.shape)} and query_starts "
            f"{tuple(starts.shape)} do not fit together; expected (n, pages_per_sequence), (n,) and (n + 1,)."
        )
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    of_token = jnp.searchsorted(starts, tokens, side="right").astype(jnp.int32) - 1
    real = (of_token >= 0) & (of_token < sequences)
    at = jnp.clip(of_token, 0, sequences - 1)
    slots = jnp.arange(table.shape[1] * page_size, dtype=jnp.int32)
    filled = slots[None] < lengths[:, None]
    ids = jnp.where(filled, jnp.arange(sequences, dtype=jnp.int32)[:, None], -1)
    return Layout(
        page_table=table.reshape(1, -1),
        query_segment_ids=jnp.where(real, at, -1)[None],
        key_value_segment_ids=ids.reshape(1, -1),
        query_positions=(lengths[at] - starts[at + 1] + tokens)[None],
        key_value_positions=jnp.tile(slots, sequences)[None],
    )


def gathered(spec: AttentionSpec, layout: Layout, plan: Callable[[AttentionSpec, Layout], Plan]) -> Plan:
    """The plan of ``spec`` from ``plan(bare, layout)``, where ``bare`` has contiguous keys and values of its dtype.

    Each layer gathers the slots of every sequence, ``key_value_length`` of them, and multiplies them by their scales.
    The slots of a page outside the pool are NaN.
    """
    return unrounded(spec, lambda wide: _gathered(wide, layout, plan))


def _gathered(spec: AttentionSpec, layout: Layout, plan: Callable[[AttentionSpec, Layout], Plan]) -> Plan:
    bare = dataclasses.replace(spec, page_size=None, num_pages=None, kv_dtype=None)
    contiguous = dataclasses.replace(layout, page_table=None)
    made, unread = plan(bare, contiguous), unread_slots(spec, layout)
    pages, outside = pages_in_pool(spec, layout)

    def slots_of(x: Array) -> Array:
        return x if pages is None else x[pages].reshape(pages.shape[0], -1, *x.shape[2:])

    def gather(x: Array, scales: EitherArray | None) -> Array:
        every = None if scales is None else slots_of(jnp.broadcast_to(jnp.asarray(scales), key_rows(spec)))
        numbers = _multiplied(spec, slots_of(jnp.asarray(x)), every)
        if outside is not None:
            numbers = jnp.where(outside[..., None, None], jnp.nan, numbers)
        return numbers if unread is None else jnp.where(unread[..., None, None], 0, numbers)  # whatever a page holds

    def attend(
        query: Array, key: Array, value: Array | None, layer: int | None, carry: Carry, terms: Terms = NO_TERMS
    ) -> tuple[Any, Carry]:
        key = gather(key, terms.key_scales)
        value = None if value is None else gather(value, terms.value_scales)
        others = dataclasses.replace(terms, key_scales=None, value_scales=None)
        return made.attend(query, key, value, layer, carry, *((others,) if others.given() else ()))

    return dataclasses.replace(made, attend=attend)


def unrounded(spec: AttentionSpec, plan: Callable[[AttentionSpec], Plan]) -> Plan:
    """``plan(spec)``; of a quantised cache in half precision the plan of the same spec in float32.

    The product of a number and its scale, rounded to half precision, would be off by more than attention rounds.
    """
    if spec.kv_dtype is None or spec.dtype == "float32":
        return plan(spec)
    made = plan(dataclasses.replace(spec, dtype="float32"))

    def attend(query: Array, key: Array, value: Array | None, *rest: Any) -> tuple[Any, Carry]:
        found, carry = made.attend(query.astype(jnp.float32), key, value, *rest)
        out, *others = found if spec.return_log_sum_exp else (found,)
        out = out.astype(spec.dtype)
        return ((out, *others) if others else out), carry

    return dataclasses.replace(made, attend=attend)


def block_reader(
    spec: AttentionSpec,
    layout: Layout,
    x: Num[Array, "rows slots kv_heads dim"],
    scales: Float[EitherArray, "#rows #slots #kv_heads"] | None,
    heads: int,
) -> Callable[[Array, Array, int], Float[Array, "heads width dim"]]:
    """``read(tile, start, width)``: some slots of ``heads`` KV heads of one sequence, in the dtype of the spec.

    Tile ``i`` holds the heads from ``i * heads`` of the sequences' heads in a row. The slots of a page outside the pool
    are NaN. Slots behind the last are the last.
    """
    every = None if scales is None else jnp.broadcast_to(jnp.asarray(scales), key_rows(spec)).reshape(-1, x.shape[2])
    # Numbers that XLA's CPU compiler would widen as a whole to read some of them are read as integers of their bits.
    integers = {"bfloat16": jnp.uint16, "float8_e4m3fn": jnp.uint8}.get(str(x.dtype))
    flat = jnp.asarray(x) if integers is None else lax.bitcast_convert_type(x, integers)
    flat = flat.reshape(-1, *x.shape[2:])
    pages, outside = pages_in_pool(spec, layout)

    def read(tile: Array, start: Array, width: int) -> Float[Array, "heads width dim"]:
        sequence, head = tile * heads // spec.num_kv_heads, tile * heads % spec.num_kv_heads
        slots = jnp.minimum(start + jnp.arange(width, dtype=jnp.int32), spec.key_value_length - 1)
        if pages is None or spec.page_size is None:
            rows = sequence * spec.key_value_length + slots
        else:
            rows = pages[sequence, slots // spec.page_size] * spec.page_size + slots % spec.page_size
        at = rows[None, :], (head + jnp.arange(heads, dtype=jnp.int32))[:, None]
        numbers = flat[at]
        numbers = numbers if flat.dtype == x.dtype else lax.bitcast_convert_type(numbers, x.dtype)
        numbers = _multiplied(spec, numbers, None if every is None else every[at])
        return numbers if outside is None else jnp.where(outside[sequence, slots][None, :, None], jnp.nan, numbers)

    return read


def _multiplied(spec: AttentionSpec, numbers: Num[Array, "*rows dim"], scales: Float[Array, "*rows"] | None) -> Array:
    if scales is None:
        return jnp.asarray(numbers)
    return (jnp.asarray(numbers).astype(jnp.float32) * scales[..., None]).astype(spec.dtype)


def pages_in_pool(
    spec: AttentionSpec, layout: Layout
) -> tuple[Int[Array, "batch pages_per_sequence"] | None, Bool[Array, "batch kv_len"] | None]:
    """The page table with entries inside the pool, and the slots whose own entry is not; None without pages."""
    if layout.page_table is None or spec.page_size is None or spec.num_pages is None:
        return None, None
    table = jnp.asarray(layout.page_table)
    pages = jnp.clip(table, 0, spec.num_pages - 1)
    return pages, jnp.repeat(pages != table, spec.page_size, axis=1)
