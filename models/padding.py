"""Padding masks: True for the tokens of a prompt, False for what fills a row up, on the left or on the right.

A mask says the same as segment ids of 0 (a token) and -1 (padding), so that the transformer has one form of both. It
has the meaning of Hugging Face's ``attention_mask``.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int

from .packing import PADDING


def segment_ids_of(
    padding_mask: Any, shape: tuple[int, ...], segment_ids: Int[Array, "batch length"] | None = None
) -> Int[Array, "batch length"]:
    """The segment ids that say the same as ``padding_mask``, or ``segment_ids`` where these are given too.

    A row's True entries stand in one run; a row may be all padding. With ``segment_ids`` they may stand anywhere, but
    exactly where these are not negative. Raises ValueError for a mask that is not boolean, of another shape, traced, or
    against these rules.

    >>> segment_ids_of([[False, True, True], [True, True, False]], (2, 3)).tolist()
    [[-1, 0, 0], [0, 0, -1]]
    """
    mask = _checked(padding_mask, shape)
    if segment_ids is None:
        _require_one_run(mask)
        return jnp.asarray(np.where(mask, 0, PADDING), jnp.int32)
    _require_values("segment_ids", segment_ids)
    differs = np.argwhere(mask != (np.asarray(segment_ids) >= 0))
    if len(differs):
        row, token = differs[0].tolist()
        raise ValueError(
            f"padding_mask is {bool(mask[row, token])} at token {token} of row {row}, where segment_ids is "
            f"{int(segment_ids[row, token])}; it must be True exactly where segment_ids is at least 0. "
            "Give one of them."
        )
    return segment_ids


def left_aligned(
    tokens: Int[Array, "batch length"], padding_mask: Any
) -> tuple[Int[Array, "batch length"], Int[np.ndarray, " batch"]]:
    """The rows with their padding moved to the right, and the number of tokens in each. Raises ValueError.

    >>> tokens, lengths = left_aligned(jnp.array([[0, 5, 6], [7, 8, 9]]), np.array([[False, True, True], [True] * 3]))
    >>> tokens.tolist(), lengths.tolist()
    ([[5, 6, 0], [7, 8, 9]], [2, 3])
    """
    mask = _checked(padding_mask, tokens.shape)
    _require_one_run(mask)
    lengths = mask.sum(1, dtype=np.int32)
    slots = (mask.argmax(1)[:, None] + np.arange(mask.shape[1])) % mask.shape[1]
    return jnp.take_along_axis(tokens, jnp.asarray(slots), axis=1), lengths


def _checked(padding_mask: Any, shape: tuple[int, ...]) -> Bool[np.ndarray, "batch length"]:
    _require_values("padding_mask", padding_mask)
    mask = np.asarray(padding_mask)
    if mask.dtype != bool:
        raise ValueError(
            f"padding_mask is {mask.dtype}; expected booleans, True for a token and False for padding. "
            "For an attention_mask of ones and zeros give attention_mask == 1."
        )
    if mask.shape != shape:
        raise ValueError(f"padding_mask has shape {mask.shape}; expected that of tokens, {shape}.")
    return mask


def _require_values(name: str, x: Any) -> None:
    if isinstance(x, Tracer):
        raise ValueError(  # noqa: TRY004  (the sentence is about its values, which are not there)
            f"{name} is traced, so that padding_mask cannot be checked; inside jit give segment_ids alone "
            "(0 for a token, -1 for padding)."
        )


def _require_one_run(mask: Bool[np.ndarray, "batch length"]) -> None:
    begins = mask & ~np.pad(mask, ((0, 0), (1, 0)))[:, :-1]
    broken = np.flatnonzero(begins.sum(1) > 1)
    if len(broken):
        raise ValueError(
            f"padding_mask has padding between the tokens of row {broken[0]}; it must be at the left or right end. "
            "For several documents in a row give segment_ids."
        )
