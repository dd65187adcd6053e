"""The mask of a splash kernel: the visibility that follows from slots alone, as the kernels' block sorting asks for it.

JAX's splash and tokamax's sort the same mask into blocks (``splash.py``, ``tokamax_splash.py``).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from . import blocks, masks
from .spec import AttentionSpec


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
