"""The mask as numbers that a kernel compares, one query per lane.

Masks of positions leave a query one interval (``masks.Mask.interval``). Segments, padding and lengths restrict
identity: each key and query gets an id. So every mask but a mask array is::

    first[q] <= position[k] <= last[q]   and   key_id[k] == query_id[q]

Where the interval of a mask function is not exact, the kernel evaluates the function inside of it (``added.py``).
Padding of keys and queries has ids that match nothing. As in ``backends/blocks.py``, the bounds of these numbers over a
strip of keys and a group of queries decide whether the pair is empty, mixed or all visible.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from .. import masks
from ..contract import AttentionSpec, EitherArray, Layout, positions

NO_KEY, NO_QUERY = -1, -2  # ids of what is padding: they match nothing
_LEAST, _MOST = -(2**31), 2**31 - 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Visibility:
    """int32 arrays, of NumPy if nothing is traced; ``rows`` is the batch, or 1 if all sequences share one layout."""

    first: Int[EitherArray, "rows q_len"]
    last: Int[EitherArray, "rows q_len"]
    query_id: Int[EitherArray, "rows q_len"]
    position: Int[EitherArray, "rows kv_len"]
    key_id: Int[EitherArray, "rows kv_len"]

    @property
    def by_name(self) -> dict[str, Any]:
        """The arrays under the names of the kernels' operands."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def visibility(spec: AttentionSpec, layout: Layout) -> Visibility:
    """The mask of a problem; of a mask array only what :func:`pairs` leaves: padding of keys or of queries."""
    static = all(isinstance(x, np.ndarray) for x in jax.tree.leaves(layout))
    xp: Any = np if static else jnp
    q_pos, k_pos = (xp.asarray(x).astype(xp.int32) for x in positions(spec, layout))
    mask = spec.positional_mask
    ends = (masks.Interval() if mask is None else mask.interval(q_pos))[:2]
    first, last = (xp.full_like(q_pos, end) if x is None else x for x, end in zip(ends, (_LEAST, _MOST), strict=True))
    q_seg, k_seg = layout.query_segment_ids, layout.key_value_segment_ids
    if q_seg is None or k_seg is None:
        query_id = np.zeros((1, spec.query_length), np.int32)
        key_id: Any = np.zeros((1, spec.key_value_length), np.int32)
    else:
        query_id = xp.where(q_seg >= 0, q_seg, NO_QUERY)
        key_id = xp.where(k_seg >= 0, k_seg, NO_KEY)
    if layout.key_value_seq_lengths is not None:
        slots = np.arange(spec.key_value_length, dtype=np.int32)[None]
        key_id = xp.where(slots < layout.key_value_seq_lengths[:, None], key_id, NO_KEY)
    if layout.mask is not None and pairs(layout.mask) is None:
        mask = xp.asarray(layout.mask)[:, 0]
        if mask.shape[1] == 1:
            key_id = xp.where(mask[:, 0], key_id, NO_KEY)
        else:
            query_id = xp.where(mask[:, :, 0], query_id, NO_QUERY)
    arrays = (first, last, query_id, k_pos, key_id)
    rows = max(x.shape[0] for x in arrays)
    return Visibility(*(xp.broadcast_to(x, (rows, x.shape[1])).astype(xp.int32) for x in arrays))


def without(seen: Visibility, slots: Bool[Array, "batch kv_len"]) -> tuple[Visibility, Bool[Array, "batch q_len"]]:
    """The same without these slots, which no query sees any more; and the queries that saw one of them."""
    rows = slots.shape[0]
    first, last, query_id, position, key_id = (jnp.broadcast_to(x, (rows, x.shape[1])) for x in seen.by_name.values())
    place, name = position[:, None], key_id[:, None]
    sees = (first[..., None] <= place) & (place <= last[..., None]) & (name == query_id[..., None])
    hidden = Visibility(first, last, query_id, position, jnp.where(slots, NO_KEY, key_id))
    return hidden, (sees & slots[:, None]).any(-1)


def by_interval(spec: AttentionSpec) -> bool:
    """Whether the positions that a query sees are one interval; else the mask function is evaluated for each pair."""
    if spec.mask_function is None:
        return True
    return isinstance(spec.mask_function, masks.Mask) and spec.mask_function.interval(np.zeros(1, np.int32)).exact


def pairs(mask: EitherArray | None) -> EitherArray | None:
    """A mask array, unless it is the same for all heads and for all queries or all keys: that is padding."""
    if mask is None or (mask.shape[1] == 1 and 1 in mask.shape[2:]):
        return None
    return mask
