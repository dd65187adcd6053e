"""Rotary position embedding (arXiv 2104.09864) in the half-split layout of Hugging Face's Llama.

Dimension ``i`` is rotated with dimension ``i + head_dim/2``. Frequencies are computed in float64 and rounded
once; angles and the rotation itself are float32 whatever the dtype of the activations. ``rope_scaling.py`` has the
ways to stretch frequencies. Those of dynamic scaling follow from the length of each document, so that they are computed
with the angles, in float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .rope_scaling import AnyScaling, DynamicScaling


def along_last(x: Array | np.ndarray, rank: int) -> Array:
    """``x`` with axes of one in front, up to ``rank``: what JAX adds only where a caller lets it promote ranks."""
    return jnp.expand_dims(x, tuple(range(rank - x.ndim)))


def inverse_frequencies(head_dim: int, theta: float, scaling: AnyScaling | None = None) -> np.ndarray:
    """Radians per position of each of the ``head_dim/2`` pairs, float32.

    >>> inverse_frequencies(4, 16.0).tolist()
    [1.0, 0.25]
    """
    frequencies = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    return (frequencies if scaling is None else scaling.stretched(frequencies, theta)).astype(np.float32)


def grown_frequencies(
    head_dim: int, theta: float, scaling: DynamicScaling, lengths: Int[Array, "*shape"]
) -> Float[Array, "*shape half"]:
    """Radians per position under dynamic scaling, float32, for documents of these ``lengths``."""
    over = jnp.maximum(lengths.astype(jnp.float32) / scaling.original_max_length, 1.0)
    # The base grows by `growth`: each frequency theta ** -x, x = 2i / head_dim, shrinks by growth ** -x.
    growth = (scaling.factor * over - (scaling.factor - 1.0)) ** (head_dim / (head_dim - 2))
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    powers = growth[..., None] ** -along_last(exponents, growth.ndim + 1)
    return along_last(inverse_frequencies(head_dim, theta), powers.ndim) * powers


def angles(
    positions: Int[Array, "batch length"], inverse_frequency: np.ndarray | Float[Array, "#batch length half"]
) -> tuple[Float[Array, "batch length half"], Float[Array, "batch length half"]]:
    """Cosine and sine of every position and pair, float32; ``inverse_frequency`` may differ between positions."""
    turned = positions.astype(jnp.float32)[:, :, None] * along_last(inverse_frequency, 3)
    if turned.shape[1] == 1:
        return jnp.cos(turned), jnp.sin(turned)
    return jax.lax.platform_dependent(turned, cpu=_in_a_loop, default=lambda x: (jnp.cos(x), jnp.sin(x)))


def _in_a_loop(turned: Float[Array, "*shape"]) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """Cosine and sine. Without the loop XLA on a CPU fuses both into every use, once per head and layer."""
    both = jax.lax.map(lambda i: jax.lax.switch(i, (jnp.cos, jnp.sin), turned), jnp.arange(2))
    return both[0], both[1]


def rotate(
    x: Float[Array, "batch length heads head_dim"],
    cos: Float[Array, "#batch length half"],
    sin: Float[Array, "#batch length half"],
) -> Float[Array, "batch length heads head_dim"]:
    """Queries or keys turned to their positions, in the dtype that they came in."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
