"""Arrays of numbers that are drawn."""

import jax
import numpy as np


def draw(*shape: int, seed: int = 0) -> jax.Array:
    """Normal numbers of this shape in float32: the same for the same shape and seed."""
    return jax.device_put(np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32))
