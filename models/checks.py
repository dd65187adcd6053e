"""Checks of the numbers in a configuration, each with the sentence of its refusal."""

from __future__ import annotations

import math
import operator
from typing import Any

import jax.numpy as jnp
import numpy as np

LARGEST_SIZE = 2**31 - 1  # the largest int32 index of XLA


def require_positive_int(name: str, value: Any, most: int = LARGEST_SIZE) -> int:
    """``value``, an integer of Python, NumPy or JAX, as Python's. Raises ValueError unless it is from 1 to ``most``."""
    try:
        whole = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        whole = 0
    if whole < 1:
        raise ValueError(f"{name}={value!r} must be an integer of at least 1.")
    if whole > most:
        raise ValueError(f"{name} is above {most}, the most that is accepted.")
    return whole


def is_number(value: Any) -> bool:
    """Whether ``value`` is one real number, of Python, NumPy or JAX, and no bool."""
    found = np.asarray(value)
    return found.ndim == 0 and any(jnp.issubdtype(found.dtype, kind) for kind in (jnp.integer, jnp.floating))


def require_positive_real(name: str, value: object) -> None:
    """Raise ValueError unless ``value`` is a finite number above 0."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name}={value!r} must be a finite number above 0.")
