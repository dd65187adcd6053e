"""The key-value cache: preallocated arrays per layer, and the number of filled slots per sequence.

Keys and values are kept as ``[batch, kv_heads, capacity, head_dim]``, the ``kv_layout`` ``"HND"``: a decode step reads
each head's keys in one run, and XLA's own products need no transpose. ``lengths`` are on the host, so that a full
cache is refused before it is written to, without waiting for the device.

A quantised cache keeps int8 or float8 numbers, and a float32 scale for each slot and KV head. A prefill behind an empty
cache attends over its own keys and values, so that only what follows it reads quantised ones.

A paged cache keeps ``[num_pages, kv_heads, page_size, head_dim]``, and a page table on the host says which pages a
sequence has. A page is taken when a token needs it. The free pages are those that the table does not name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Num

from attnsuite.backends.contract import Terms
from attnsuite.backends.features import KV_DTYPES
from attnsuite.backends.kv_cache import quantize

from .checks import require_positive_int
from .config import DTYPES, AttentionType, ModelConfig

CACHE_DTYPES = (*DTYPES, *KV_DTYPES)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Quantised:
    """Keys or values of a layer as numbers of int8 or float8; a slot of a KV head stands for ``numbers * scales``."""

    numbers: Num[Array, "batch kv_heads capacity head_dim"]
    scales: Float[Array, "batch kv_heads capacity 1"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the numbers."""
        return self.numbers.shape

    @property
    def dtype(self) -> Any:
        """Dtype of the numbers."""
        return self.numbers.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of numbers and scales."""
        return self.numbers.nbytes + self.scales.nbytes


Slots = Float[Array, "batch kv_heads capacity head_dim"] | Quantised
Held = tuple[tuple[Slots, ...], tuple[Slots, ...]]  # the keys of every layer, and the values


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVCache:
    """Keys and values of all layers, and per sequence the number of filled slots (int32, on the host).

    Of a paged cache, ``page_table`` holds the pages of each sequence in order (int32, on the host), and -1 where there
    is none yet; keys and values have a row per page. A ``latent`` layer keeps the latents of ``models/latent.py`` as
    its only key, and no values. Prefilling and decoding *donate* the arrays: afterwards only the returned cache can be
    used.
    """

    keys: tuple[Slots, ...]
    values: tuple[Slots, ...]
    lengths: Int[np.ndarray, " batch"]
    page_table: Int[np.ndarray, "batch pages_per_sequence"] | None = None

    @staticmethod
    def create(
        config: ModelConfig,
        batch: int,
        capacity: int,
        dtype: str | None = None,
        *,
        page_size: int | None = None,
        num_pages: int | None = None,
    ) -> KVCache:
        """An empty cache with room for ``capacity`` tokens per sequence. Raises ValueError.

        ``dtype`` is one of :data:`CACHE_DTYPES`; "int8" and "float8_e4m3fn" make a quantised cache. ``dtype=None``
        means the config's, except on CPUs, where it is float32: attention over a bfloat16 cache reads 3-9 GB/s there
        (Zen 5, jaxlib 0.10.2), float32 comes near the limit of the memory. With ``page_size`` the cache is paged, and
        ``capacity`` is rounded up to whole pages; ``num_pages`` is the size of the pool that all sequences share
        (default: enough for all of them at once).
        """
        if "full" in config.attention_types:
            raise ValueError(
                "attention='full' sees later tokens, so it cannot be cached; call the model on all of them."
            )
        batch = require_positive_int("batch", batch)
        capacity = require_positive_int("capacity", capacity)
        config.check_length("capacity", capacity)
        table, rows, slots = None, batch, capacity
        if page_size is not None:
            page_size = require_positive_int("page_size", page_size)
            of_sequence = -(-capacity // page_size)
            capacity, table = of_sequence * page_size, np.full((batch, of_sequence), -1, np.int32)
            rows, slots = batch * of_sequence if num_pages is None else num_pages, page_size
            rows = require_positive_int("num_pages", rows)
        elif num_pages is not None:
            raise ValueError(f"num_pages={num_pages!r} is about a paged cache; give page_size too, or leave it out.")
        dtype = dtype or default_dtype(config)
        if dtype not in CACHE_DTYPES:
            raise ValueError(f"dtype={dtype!r} is not supported; use one of {', '.join(CACHE_DTYPES)}.")
        keys, values = slot_shapes(config, rows, slots)
        return KVCache(
            keys=tuple(_empty(shape, dtype) for shape in keys),
            values=tuple(_empty(shape, dtype) for shape in values),
            lengths=np.zeros(batch, np.int32),
            page_table=table,
        )

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.lengths.shape[0]

    @property
    def capacity(self) -> int:
        """Slots per sequence."""
        return self.keys[0].shape[2] * (1 if self.page_table is None else self.page_table.shape[1])

    @property
    def pages(self) -> tuple[int, int] | None:
        """Pages in the pool, and slots of a page; None if the cache is not paged."""
        return None if self.page_table is None else (self.keys[0].shape[0], self.keys[0].shape[2])

    @property
    def free_pages(self) -> Int[np.ndarray, " pages"]:
        """The pages that no sequence has, in order; none if the cache is not paged."""
        if self.page_table is None:
            return np.zeros(0, np.int32)
        return np.setdiff1d(np.arange(self.keys[0].shape[0], dtype=np.int32), self.page_table)

    @property
    def is_empty(self) -> bool:
        """Whether no sequence has a token yet; the first prefill then attends over its own tokens only."""
        return not self.lengths.any()

    @property
    def dtype(self) -> str:
        """Dtype of keys and values."""
        return str(self.keys[0].dtype)

    @property
    def problem(self) -> dict[str, Any]:
        """What :func:`attnsuite.models.planning.attention_spec` has to know to attend to this cache."""
        kv_dtype = self.dtype if self.dtype in KV_DTYPES else None
        dtype = None if kv_dtype else self.dtype
        return {"key_value_length": self.capacity, "dtype": dtype, "kv_dtype": kv_dtype, "pages": self.pages}

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, and of their scales."""
        return sum(x.nbytes for x in (*self.keys, *self.values))

    @staticmethod
    def check(cache: Any) -> None:
        """Raise TypeError for what is no cache, ValueError for one that was donated, or whose lengths are traced."""
        if not isinstance(cache, KVCache):
            raise TypeError(
                f"cache is a {type(cache).__name__}; give one that model.new_cache(batch, capacity) made, or call the "
                "model, which needs none."
            )
        if isinstance(cache.lengths, Tracer):
            raise ValueError(  # noqa: TRY004 (of the right type, but traced)
                "the cache is an argument of jax.jit, so that its lengths are not known; call prefill and decode "
                "outside of jit: what they compute is compiled."
            )
        if any(not isinstance(x, Tracer) and x.is_deleted() for x in jax.tree.leaves(cache.keys)):
            raise ValueError(
                "this cache was donated to an earlier call; go on with the cache that the call returned, or with a "
                "new one."
            )

    def lengths_after(self, new: int, lengths: Any = None) -> Int[np.ndarray, " batch"]:
        """The filled slots after ``new`` tokens (of which ``lengths`` are valid) have been written.

        Raises ValueError if a sequence has no room for all ``new`` tokens, padding included.
        """
        valid = np.full(self.batch, new) if lengths is None else np.asarray(lengths)
        whole = np.issubdtype(valid.dtype, np.integer) and valid.shape == (self.batch,)
        if not whole or valid.min() < 1 or valid.max() > new:
            raise ValueError(
                f"lengths={valid.tolist()} must hold {self.batch} integers from 1 to {new}, one per sequence."
            )
        used = int(self.lengths.max())
        if used + new > self.capacity:
            raise ValueError(
                f"the cache has {self.capacity} slots per sequence, {used} of them filled, and {new} more do not fit; "
                f"make one with a capacity of at least {used + new}."
            )
        return self.lengths + valid.astype(np.int32)

    def table_after(self, lengths: Int[np.ndarray, " batch"]) -> Int[np.ndarray, "batch pages_per_sequence"] | None:
        """The page table with a page for each of ``lengths`` slots; None if the cache is not paged.

        Raises ValueError if too few pages are free.
        """
        if self.page_table is None:
            return None
        of_sequence = np.arange(self.page_table.shape[1])[None] * self.keys[0].shape[2]
        missing = (of_sequence < lengths[:, None]) & (self.page_table < 0)
        free, needed = self.free_pages, int(missing.sum())
        if needed > free.size:
            raise ValueError(
                f"the cache has {self.keys[0].shape[0]} pages, {free.size} of them free, and {needed} more are needed; "
                "release a sequence, or make a cache of more pages."
            )
        table = self.page_table.copy()
        table[missing] = free[:needed]
        return table

    def released(self, rows: Any) -> KVCache:
        """The cache without the tokens of the sequences ``rows``, whose pages are free again. Raises ValueError."""
        given, every = np.asarray(rows), np.arange(self.batch)
        is_mask = given.dtype == bool and given.shape == every.shape
        if given.size and not is_mask and not (given.dtype.kind in "iu" and np.isin(given, every).all()):
            raise ValueError(
                f"rows={rows!r} must hold integers from 0 to {self.batch - 1}, the sequences of the cache."
            )
        released = given if is_mask else np.isin(every, given)
        table = None if self.page_table is None else np.where(released[:, None], np.int32(-1), self.page_table)
        return dataclasses.replace(self, lengths=np.where(released, np.int32(0), self.lengths), page_table=table)


def slot_shapes(
    config: ModelConfig, batch: int, capacity: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """The shape of each layer's keys, and of its values."""

    def shape(kind: AttentionType, *, is_key: bool) -> tuple[int, ...]:
        if kind == "latent":
            return (batch, 1, capacity, (config.latent.rank + config.latent.rope) * is_key)
        return (batch, config.kv_heads, capacity, config.dim)

    keys, values = (tuple(shape(kind, is_key=is_key) for kind in config.layer_types) for is_key in (True, False))
    return keys, values


def default_dtype(config: ModelConfig) -> str:
    """The default dtype of a cache: the config's, but float32 on CPUs."""
    return "float32" if jax.default_backend() == "cpu" else config.dtype


def write(slots: Slots, new: Float[Array, "batch length kv_heads head_dim"], start: Int[Array, " batch"]) -> Slots:
    """``new`` written into ``slots`` from each sequence's ``start``, in the dtype of the slots."""
    return _put(slots, new, lambda array, rows: _write_rows(array, rows, start))


def _put(slots: Slots, new: Array, put: Callable[[Array, Array], Array]) -> Slots:
    """``put(array, rows)`` writes ``rows [batch, length, kv_heads, dim]`` into slots, numbers or scales."""
    if not isinstance(slots, Quantised):
        return put(slots, new)
    numbers, scales = quantize(new, str(slots.dtype))
    return Quantised(put(slots.numbers, numbers), put(slots.scales, scales[..., None]))


def _write_rows(array: Array, rows: Array, start: Int[Array, " batch"]) -> Array:
    rows, zero = jnp.swapaxes(rows, 1, 2).astype(array.dtype), jnp.zeros((), start.dtype)  # not int64, as 0 may be
    if rows.shape[0] == 1:
        written = jax.lax.dynamic_update_slice(array, rows, (zero, zero, start[0], zero))
        # Without the barrier XLA (JAX 0.12, CPU) fuses the write into each reader, and copies the cache for each.
        return jax.lax.optimization_barrier(written)
    return jax.vmap(lambda s, x, at: jax.lax.dynamic_update_slice(s, x, (zero, at, zero)))(array, rows, start)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class SlotMapping:
    """Where new tokens go in a paged cache. A token whose page is not in the pool goes nowhere."""

    pages: Int[Array, "batch length"]
    offsets: Int[Array, "batch length"]

    @staticmethod
    def of(
        page_table: Int[Array, "sequences pages_per_sequence"],
        sequences: Int[Array, "#batch length"],
        slots: Int[Array, "batch length"],
        real: Bool[Array, "batch length"],
        pages: tuple[int, int],
    ) -> SlotMapping:
        """The mapping of ``slots`` of ``sequences`` to a pool of ``pages``, their number and size; padding has none."""
        num_pages, page_size = pages
        at = page_table[sequences, jnp.minimum(slots // page_size, page_table.shape[1] - 1)]
        return SlotMapping(jnp.where(real & (at >= 0), at, num_pages), slots % page_size)


def write_pages(slots: Slots, new: Float[Array, "batch length kv_heads head_dim"], slot_mapping: SlotMapping) -> Slots:
    """``new`` written into pages, in the dtype of the slots."""

    def put(array: Array, rows: Array) -> Array:
        return array.at[slot_mapping.pages, :, slot_mapping.offsets].set(rows.astype(array.dtype), mode="drop")

    return _put(slots, new, put)


def read(slots: Slots) -> Num[Array, "rows kv_heads slots head_dim"]:
    """The slots, or the pages, as ``"HND"``; of a quantised cache the numbers."""
    return slots.numbers if isinstance(slots, Quantised) else slots


def with_scales(terms: Terms, keys: Slots, values: Slots | None) -> Terms:
    """The terms with the scales of a layer's slots, if they are quantised.

    Latents are their own values. ``values=None`` says that the spec has them in the keys: they have no scales then.
    """
    if not isinstance(keys, Quantised):
        return terms
    key_scales = keys.scales[..., 0]
    if values is None:
        return dataclasses.replace(terms, key_scales=key_scales)
    value_scales = values.scales[..., 0] if isinstance(values, Quantised) else key_scales
    return dataclasses.replace(terms, key_scales=key_scales, value_scales=value_scales)


def _empty(shape: tuple[int, ...], dtype: str) -> Slots:
    if dtype not in KV_DTYPES:
        return jnp.zeros(shape, dtype)
    if not shape[-1]:  # the values of a latent layer
        return jnp.zeros(shape, jnp.float32)
    return Quantised(jnp.zeros(shape, dtype), jnp.ones((*shape[:-1], 1), jnp.float32))
