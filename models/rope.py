"""Rotary position embedding (arXiv 2104.09864) in the half-split layout of Hugging Face's Llama.

Dimension ``i`` is rotated with dimension ``i + head_dim/2``. Frequencies are computed in float64 and rounded
once; angles and the rotation itself are float32 whatever the dtype of the activations. The stretching of
slow frequencies is Llama 3.1's (arXiv 2407.21783, section 3.4.1 and transformers' ``llama3`` rope type).
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .config import RopeScaling


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Radians per position of each of the ``head_dim/2`` pairs, float32.

    >>> inverse_frequencies(4, 16.0).tolist()
    [1.0, 0.25]
    """
    frequencies = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is not None:
        wavelengths = 2 * math.pi / frequencies
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = (scaling.original_max_length / wavelengths - low) / (high - low)
        keep = np.clip(keep, 0.0, 1.0)  # 1: short wavelength, unchanged; 0: long one, stretched by the whole factor
        frequencies = frequencies * (keep + (1.0 - keep) / scaling.factor)
    return frequencies.astype(np.float32)


def angles(
    positions: Int[Array, "batch length"], inverse_frequency: np.ndarray
) -> tuple[Float[Array, "batch length half"], Float[Array, "batch length half"]]:
    """Cosine and sine of every position and pair, float32; computed once and used by all layers."""
    turned = positions.astype(jnp.float32)[:, :, None] * inverse_frequency
    return jnp.cos(turned), jnp.sin(turned)


def rotate(
    x: Float[Array, "batch length heads head_dim"],
    cos: Float[Array, "#batch length half"],
    sin: Float[Array, "#batch length half"],
) -> Float[Array, "batch length heads head_dim"]:
    """Queries or keys turned to their positions, in the dtype that they came in."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
