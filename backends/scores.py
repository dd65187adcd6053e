"""Scores as a function: what a user's own function makes of each score, by head and positions.

The idea is that of FlexAttention's ``score_mod`` (PyTorch; arXiv 2412.05496). A score function takes a scaled and
soft-capped score, and the indices of its batch entry, its query head and its two positions. It returns another score of
the same shape and dtype. The five arrays broadcast against each other. A bias and ALiBi are added to what the function
returns, so that their gradients do not depend on the function. The backward pass takes the derivative by JAX.

>>> import jax.numpy as jnp
>>> def softer_far_away(score, batch, head, query, key):
...     return score / (1 + 0.01 * jnp.abs(query - key))
>>> check(softer_far_away)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

# (score, batch, head, query position, key position) -> score
ScoreFunction = Callable[[Any, Any, Any, Any, Any], Any]

_SHAPE = (1, 2, 2, 3)  # batch, heads, queries and keys of the scores that a function is tried on


def check(function: Any) -> None:
    """Raise ValueError unless ``function`` is None or a score function, which is tried on twelve scores.

    It has to be hashable, keep shape and dtype, give a finite score and derivative, and treat each score alone: blocks
    of scores would change what a maximum over keys, say, means. Masks are no business of a score function.
    """
    expected = "(score, batch, head, query position, key position), such as one made by def outside of the step"
    check_function("score_function", function, expected, _fault)


def check_function(field: str, function: Any, expected: str, fault: Any) -> None:
    """Raise ValueError unless ``function`` is None, or hashable and one in which the cached ``fault`` finds none."""
    if function is None:
        return
    if not callable(function) or not isinstance(function, Hashable):
        raise ValueError(f"{field}={function!r} must be a hashable function of {expected}.")  # noqa: TRY004 (as others)
    try:
        reason = fault(function)
    except TypeError:  # it has a hash by its type, but holds an array that has none
        reason = fault.__wrapped__(function)
    if reason:
        raise ValueError(f"{field}={function!r} {reason}")


@functools.lru_cache(maxsize=64)
def _fault(function: ScoreFunction) -> str:
    """Why a function is no score function; empty if it is one."""
    scores = np.linspace(-1.0, 2.0, 12, dtype=np.float32).reshape(_SHAPE)
    other = scores.copy()
    other[0, 0, 0, 0] = 40.0
    try:
        with jax.ensure_compile_time_eval():  # a spec may be made inside of jit
            indices = _indices()
            made, slope = derived(function, jnp.asarray(scores), *indices)
            again, _ = derived(function, jnp.asarray(other), *indices)
    except Exception as error:  # noqa: BLE001 (whatever the function raises)
        return (
            f"raises {type(error).__name__} ({error}); it takes five arrays (score, batch, head, query position, key "
            "position), returns a score, and uses jnp.where for `if`."
        )
    if isinstance(made, Tracer):
        return "depends on a traced array; learned numbers go into bias, alibi or sinks."
    dtype, shape = getattr(made, "dtype", type(made).__name__), np.shape(made)
    if dtype != jnp.float32 or shape != _SHAPE:
        return f"gives {dtype} {shape} for float32 scores {_SHAPE}; it has to keep shape and dtype."
    if not (np.isfinite(made).all() and np.isfinite(slope).all()):
        return "gives a score or a derivative that is not finite; use mask_function to hide a key."
    if (np.asarray(made) != np.asarray(again)).ravel()[1:].any():
        return "changes other scores with one of them; it has to treat each score alone."
    return ""


def derived(function: ScoreFunction, scores: Any, *indices: Any) -> tuple[Any, Any]:
    """What the function makes of the scores, and its derivative by each of them."""
    return jax.jvp(lambda x: function(x, *indices), (scores,), (jnp.ones_like(scores),))


def _indices() -> tuple[Any, ...]:
    """Batch entry, head, query position and key position of the scores that a function is tried on."""
    whole = np.ogrid[tuple(map(slice, _SHAPE))]
    return tuple(jnp.asarray(index, jnp.int32) for index in whole)
