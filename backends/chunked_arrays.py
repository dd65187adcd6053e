"""What one block of ``chunked`` reads of a mask and a bias array, and how it keeps out slots that are not finite.

A mask and a bias broadcast to ``[batch, heads, query, key]``. A block slices its part of the caller's own array, with
axes of size one where the array has them. The gradient of a bias has the bias's shape and is added up block by block.
The arrays are copied only to pad them where the blocks do not divide their lengths.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool

from .operands import EitherArray
from .spec import AttentionSpec

Corner = tuple[Array, Array, Array]  # tile, first query and first key of a block


def fitted(x: EitherArray, rows: int, columns: int) -> Any:
    """``x`` padded with zeros to whole blocks of ``rows`` queries and ``columns`` keys."""
    amounts = [0 if n == 1 else -n % size for n, size in zip(x.shape[2:], (rows, columns), strict=True)]
    if not any(amounts):
        return x
    xp: Any = np if isinstance(x, np.ndarray) else jnp
    return xp.pad(x, [(0, 0), (0, 0), *((0, amount) for amount in amounts)])


def of_blocks(mask: Bool[EitherArray, "#b #n #t #s"], rows: int, columns: int) -> tuple[Any, Any]:
    """Whether a fitted mask shows some, and whether it shows every pair of each block; an axis of size one stays."""
    b, n, t, s = mask.shape
    rows, columns = min(rows, t), min(columns, s)
    apart = mask.reshape(b, n, t // rows, rows, s // columns, columns)
    return apart.any((1, 3, 5)), apart.all((1, 3, 5))


def part(x: Array, spec: AttentionSpec, heads: int, corner: Corner, rows: int, columns: int) -> Array:
    """One block of a fitted array for a tile of ``heads`` KV heads: [heads or 1, group or 1, rows or 1, columns or 1].

    A tile of heads belongs to one batch entry where there is such an array.
    """
    found = lax.dynamic_slice(x, _starts(x, spec, heads, corner), _sizes(x, spec, heads, rows, columns))
    return found.reshape(*((1, 1) if x.shape[1] == 1 else (heads, spec.group_size)), *found.shape[2:])


def added(total: Array, x: Array, spec: AttentionSpec, corner: Corner) -> Array:
    """``total``, the gradient of a fitted bias, with that of one block of logits: [heads, group, rows, columns]."""
    heads, group, rows, columns = x.shape
    x = x.reshape(1, heads * group, rows, columns)
    x = x.sum([axis for axis in (1, 2, 3) if total.shape[axis] == 1], keepdims=True)
    starts, sizes = _starts(total, spec, heads, corner), _sizes(total, spec, heads, rows, columns)
    return lax.dynamic_update_slice(total, lax.dynamic_slice(total, starts, sizes) + x, starts)


def not_finite(k: Array, v: Array) -> Bool[Array, "heads width"]:
    """Slots of a block whose key or value holds NaN or infinity."""
    return ~(jnp.isfinite(k).all(-1) & jnp.isfinite(v).all(-1))


def _starts(x: Array, spec: AttentionSpec, heads: int, corner: Corner) -> list[Any]:
    tile, query_start, key_start = corner
    first = tile * heads  # KV head, counted over all batch entries
    at = (first // spec.num_kv_heads, first % spec.num_kv_heads * spec.group_size, query_start, key_start)
    return [jnp.int32(0) if n == 1 else jnp.asarray(i, jnp.int32) for i, n in zip(at, x.shape, strict=True)]


def _sizes(x: Array, spec: AttentionSpec, heads: int, rows: int, columns: int) -> tuple[int, ...]:
    return tuple(min(n, size) for n, size in zip(x.shape, (1, heads * spec.group_size, rows, columns), strict=True))
