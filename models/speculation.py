"""Keep what was accepted of a draft: the end of a step of speculative decoding.

A draft of several tokens is verified in one call of ``Transformer.prefill`` against the cache. The logits say what the
model would have written behind each token (arXiv 2211.17192). The draft is a line, or a tree of alternatives
(``parents``; SpecInfer, arXiv 2305.09781). Afterwards all drafted tokens lie in the cache. :func:`keep` keeps one path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from attnsuite.backends import masks

from .cache import KVCache, SlotMapping, Slots, write, write_pages
from .checks import require_positive_int


def keep(cache: KVCache, drafted: int | Sequence[int] | np.ndarray, path: Any, lengths: Any = None) -> KVCache:
    """The cache with the accepted tokens of the last drafted ones, in the order of ``path``, and no other of them.

    ``drafted`` is the number of tokens of a line, or the ``parents`` of a tree. ``path [batch, tokens]`` holds the
    indices of drafted tokens, from the first accepted one to the last: those of a line are 0, 1, 2, ..., those of a
    tree follow its parents. ``lengths [batch]`` says how many entries of each row count (from 0; default: all). The
    given cache is donated. Raises ValueError for what is no path, and for shapes and indices out of range.

    >>> from attnsuite.models import ModelConfig, Transformer
    >>> model = Transformer(ModelConfig.from_preset("debug"))
    >>> _, cache = model.prefill([[1, 2, 3]], model.new_cache(1, 8))
    >>> parents = (-1, 0, 0, 2)
    >>> _, cache = model.prefill([[4, 5, 6, 7]], cache, parents=parents)
    >>> keep(cache, parents, [[0, 2, 3]]).lengths.tolist()
    [6]
    """
    KVCache.check(cache)
    if isinstance(drafted, Sequence | np.ndarray):
        parents, count = np.asarray(masks.Tree(tuple(drafted)).parents), len(drafted)
    else:
        drafted = require_positive_int("drafted", drafted)
        parents, count = np.arange(-1, drafted - 1), drafted
    path = np.asarray(path)
    if path.ndim != 2 or path.shape[0] != cache.batch or not 0 < path.shape[1] <= count:
        raise ValueError(f"path has shape {path.shape}; expected [{cache.batch}, 1 to {count}].")
    if not np.issubdtype(path.dtype, np.integer):
        raise ValueError(f"path has dtype {path.dtype}; expected integers, the indices of drafted tokens.")
    if path.min() < 0 or path.max() >= count or count > cache.lengths.min():
        raise ValueError(
            f"path reaches from {path.min()} to {path.max()} in a draft of {count} tokens, and the cache holds "
            f"{cache.lengths.tolist()}; a path has indices from 0 to drafted - 1, of tokens that are in the cache."
        )
    accepted = np.asarray(np.full(cache.batch, path.shape[1]) if lengths is None else lengths)
    whole = accepted.shape == (cache.batch,) and np.issubdtype(accepted.dtype, np.integer)
    if not whole or accepted.min() < 0 or accepted.max() > path.shape[1]:
        raise ValueError(f"lengths={accepted.tolist()} must hold {cache.batch} integers from 0 to {path.shape[1]}.")
    follows = parents[path] == np.pad(path[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    counts = np.arange(path.shape[1]) < accepted[:, None]
    if not follows[counts].all():
        row = int(np.argwhere(counts & ~follows)[0, 0])
        raise ValueError(
            f"path {path[row, : accepted[row]].tolist()} of row {row} does not follow the parents "
            f"{parents.tolist()} from -1 on; give a path of the draft, and for a tree its parents in place of a number."
        )
    path, start = path.astype(np.int32), cache.lengths - count
    keys, values = _moved((cache.keys, cache.values), start, path, cache.page_table)
    return dataclasses.replace(cache, keys=keys, values=values, lengths=start + accepted.astype(np.int32))


def _move(
    slots: Any,
    start: Int[Array, " batch"],
    path: Int[Array, "batch tokens"],
    page_table: Int[Array, "batch pages_per_sequence"] | None,
) -> Any:
    """The slots with those of the path copied to ``start`` and behind it."""

    def moved(x: Array) -> Slots:
        if page_table is not None:
            pool, rows = (x.shape[0], x.shape[2]), jnp.arange(path.shape[0], dtype=jnp.int32)[:, None]
            to = start[:, None] + jnp.arange(path.shape[1], dtype=jnp.int32)[None]
            taken, placed = (SlotMapping.of(page_table, rows, at, at >= 0, pool) for at in (start[:, None] + path, to))
            return write_pages(x, x[taken.pages, :, taken.offsets], placed)
        taken = jnp.take_along_axis(x, (start[:, None] + path)[:, None, :, None], axis=2)
        return write(x, taken.swapaxes(1, 2), start)

    return jax.tree.map(moved, slots)


_moved = jax.jit(_move, donate_argnums=0)
