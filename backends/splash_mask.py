"""The mask of a splash kernel: the visibility that follows from slots alone, as the kernels' block sorting asks for it.

JAX's splash and tokamax's sort the same mask into blocks (``splash_kernel.py``, ``tokamax_splash.py``).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from . import masks
from .contract import AttentionSpec


@dataclasses.dataclass(frozen=True, slots=True)
class Masking:
    """The visibility that follows from slots alone, known before there is data. Hashable: the key of the cache."""

    query_length: int
    key_value_length: int
    is_causal: bool = False
    window: tuple[int, int] | None = None
    chunk_size: int | None = None
    function: masks.MaskFunction | None = None

    @staticmethod
    def of(spec: AttentionSpec, query_length: int, key_value_length: int) -> Masking:
        """The mask of ``spec`` over padded lengths."""
        if spec.query_length == 1:  # all of it is in the segment ids
            return Masking(query_length, key_value_length)
        return Masking(query_length, key_value_length, spec.is_causal, spec.window, spec.chunk_size, spec.mask_function)

    @property
    def hides_nothing(self) -> bool:
        """Whether every slot sees every slot."""
        return not self.is_causal and (self.window, self.chunk_size, self.function) == (None, None, None)

    @property
    def hides_everything(self) -> bool:
        """Whether no slot sees any. Only a function can do so; kernels cannot be made of such a mask."""
        if self.function is None:
            return False
        keys = np.arange(self.key_value_length, dtype=np.int32)[None]
        strips = (np.arange(row, min(row + 256, self.query_length)) for row in range(0, self.query_length, 256))
        return not any(np.any(self.visible(rows.astype(np.int32)[:, None], keys)) for rows in strips)

    def visible(self, q: Any, k: Any) -> Any:
        """Whether a query slot sees a key slot; NumPy arrays for the block mask, traced ones inside the kernel."""
        terms = [k <= q] if self.is_causal else []
        if self.window is not None:
            terms += [k >= q - self.window[0], k <= q + self.window[1]]
        if self.chunk_size is not None:
            terms.append(q // self.chunk_size == k // self.chunk_size)
        if self.function is not None:
            terms.append(self.function(q, k))
        return functools.reduce(lambda a, b: a & b, terms)


def of_nothing(q: Array, k: Array, v: Array, ids: Any, sinks: Array) -> Array:
    """In place of a kernel where :attr:`Masking.hides_everything`: zero for each row of one batch entry."""
    return jnp.zeros((*q.shape[:2], v.shape[-1]), q.dtype)


def visited_blocks(masking: Masking, block_q: int, block_kv: int) -> int:
    """How many blocks of the score matrix have a visible pair, or nearly so where a mask has several conditions."""
    q = np.arange(0, masking.query_length, block_q)[:, None]
    k = np.arange(0, masking.key_value_length, block_kv)[None]
    q_end, k_end = q + block_q - 1, k + block_kv - 1
    seen = np.ones((q.shape[0], k.shape[1]), bool)
    if masking.is_causal:
        seen &= k <= q_end
    if masking.window is not None:
        seen &= (k_end >= q - masking.window[0]) & (k <= q_end + masking.window[1])
    if masking.chunk_size is not None:
        chunk = masking.chunk_size
        seen &= (q // chunk <= k_end // chunk) & (k // chunk <= q_end // chunk)
    if masking.function is not None:
        rows, keys = (np.arange(n, dtype=np.int32)[None] for n in (masking.query_length, masking.key_value_length))
        seen &= masks.on_blocks(masking.function, rows, keys, rows >= 0, keys >= 0, block_q, block_kv)[0][0]
    return int(seen.sum())


class SlotMask:
    """A :class:`Masking` with the methods of a kernel's mask.

    With ``q_sequence`` and ``mask_function`` the kernel computes the mask of a mixed block by itself.
    """

    def __init__(self, masking: Masking) -> None:
        self.masking = masking
        self.q_sequence = np.arange(masking.query_length, dtype=np.int32)
        self.mask_function = masking.visible

    @property
    def shape(self) -> tuple[int, int]:
        """Query and key slots."""
        return self.masking.query_length, self.masking.key_value_length

    def __getitem__(self, index: tuple[slice, slice]) -> Bool[np.ndarray, "q k"]:
        rows, columns = (np.arange(n, dtype=np.int32)[part] for n, part in zip(self.shape, index, strict=True))
        return self.masking.visible(rows[:, None], columns[None, :])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SlotMask) and self.masking == other.masking

    def __hash__(self) -> int:
        return hash(self.masking)
