"""How OmniKV (ICLR 2025) and LessIsMore (arXiv 2508.07101) rank keys: one selection for all heads of a layer.

In both methods a few layers attend to everything and select; the layers until the next of them attend to that
selection. The functions here give the score of each unit from dense attention probabilities. The same number of units
is then chosen as in every other row, and the local region is attended to besides. The authors' code selects in layers
that are named by hand, by single keys, in decoding alone. Here the anchors of the case's schedule select, by the case's
unit, in prefill too.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attnsuite.backends.kascade import Tiling, reference

Score = Callable[[Tiling, Array, Array], Array]


def omnikv(
    tiling: Tiling,
    probabilities: Float[Array, "batch heads q_len kv_len"],
    candidate: Bool[Array, "batch query_tiles units"],
) -> Float[Array, "batch query_tiles units"]:
    """Per pair of query and key the largest probability of any head, summed over query tile and unit."""
    del candidate
    return reference.pooled(tiling, probabilities.max(1))


def lessismore(
    tiling: Tiling,
    probabilities: Float[Array, "batch heads q_len kv_len"],
    candidate: Bool[Array, "batch query_tiles units"],
) -> Float[Array, "batch query_tiles units"]:
    """The latest quarter of the budget comes first, then every head's best unit, every head's second best, and so on.

    Heads rank the candidates before the latest ones by their attention mass. Ties go to the earlier unit.
    """
    heads = probabilities.shape[1]
    budget = jnp.asarray(tiling.budgets, jnp.int32)[jnp.minimum(candidate.sum(-1), len(tiling.budgets) - 1)]
    by_heads = budget * 3 // 4
    from_end = jnp.cumsum(candidate[..., ::-1], axis=-1)[..., ::-1]  # 1: the latest candidate
    recent = candidate & (from_end <= (budget - by_heads)[..., None])
    mass = jnp.where((candidate & ~recent)[:, None], reference.pooled(tiling, probabilities), -1.0)
    rank = jnp.argsort(jnp.argsort(mass, axis=-1, descending=True), axis=-1)
    turn = (rank * heads + jnp.arange(heads).reshape(1, -1, 1, 1)).min(1)
    turns = tiling.units * heads
    return jnp.where(recent, turns + 1, turns - turn).astype(jnp.float32)


SCORES: dict[str, Score] = {"omnikv": omnikv, "lessismore": lessismore}
