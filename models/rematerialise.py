"""Policies of ``jax.checkpoint`` by name: what the backward pass keeps of each layer, and what it computes again.

``none`` keeps everything. ``dots`` keeps the results of the projections (matrix products without a batch dimension);
attention and elementwise operations are computed again. ``layer`` keeps only the input of each layer. Memory falls in
that order, and time rises by up to a third (arXiv 1604.06174).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax

Remat = Literal["none", "dots", "layer"]


def rematerialised(policy: Remat, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` under a policy. Raises ValueError for a name that is none.

    >>> rematerialised("layers", abs)
    Traceback (most recent call last):
    ValueError: remat='layers' is not a policy; use one of none, dots, layer.
    """
    match policy:
        case "none":
            return function
        case "dots":
            return jax.checkpoint(function, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
        case "layer":
            return jax.checkpoint(function, policy=jax.checkpoint_policies.nothing_saveable)
    raise ValueError(f"remat={policy!r} is not a policy; use one of {', '.join(get_args(Remat))}.")
