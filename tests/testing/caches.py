"""Turn keys and values of a problem into a cache: pages in any order, quantised numbers, slots that nobody reads."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from attnsuite.backends import Layout, Terms
from attnsuite.backends.kv_cache import quantize

_SPARE = 3  # pages of the pool that no sequence has


@dataclasses.dataclass(frozen=True, slots=True)
class Cache:
    """How keys and values are kept. ``axes`` share a scale, as :func:`attnsuite.backends.kv_cache.quantize` says."""

    page_size: int | None = None
    kv_dtype: str | None = None
    axes: tuple[int, ...] = (3,)


def cached(
    cache: Cache, layout: Layout, terms: Terms, key: jax.Array, value: jax.Array, rng: np.random.Generator
) -> tuple[Layout, Terms, jax.Array, jax.Array]:
    """The layout, terms, keys and values of the same problem over a cache.

    Pages lie in any order. The first page of the last sequence is also that of the first, whose keys it then has. Table
    entries behind a length are stale: no page, or a page of another sequence.
    """
    if cache.page_size is not None:
        batch, length = key.shape[:2]
        per_sequence = length // cache.page_size
        order = rng.permutation(batch * per_sequence + _SPARE)
        table = order[: batch * per_sequence].reshape(batch, per_sequence).astype(np.int32)
        key, value = (jax.device_put(pool(np.asarray(x), table, len(order), 1.0)) for x in (key, value))
        table[-1, 0] = table[0, 0]
        if layout.key_value_seq_lengths is not None:
            used = -(-np.asarray(layout.key_value_seq_lengths)[:, None] // cache.page_size)
            stale = rng.choice(np.array([-1, len(order), 2**31 - 1, table[0, 0]], np.int32), table.shape)
            table = np.where(np.arange(per_sequence)[None] < used, table, stale)
        layout = dataclasses.replace(layout, page_table=jax.device_put(table))
    if cache.kv_dtype is not None:
        key, of_keys = quantize(key, cache.kv_dtype, axes=cache.axes)
        value, of_values = quantize(value, cache.kv_dtype, axes=cache.axes)
        terms = dataclasses.replace(terms, key_scales=of_keys, value_scales=of_values)
    return layout, terms, key, value


def pool(x: np.ndarray, table: np.ndarray, pages: int, rest: float) -> np.ndarray:
    """The ``pages`` of ``x [batch, length, heads, dim]``; those that are in no row of ``table`` hold ``rest``."""
    found = np.full((pages, x.shape[1] // table.shape[1], *x.shape[2:]), rest, x.dtype)
    found[table] = x.reshape(*table.shape, *found.shape[1:])
    return found
