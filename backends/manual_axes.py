"""Arrays inside of ``jax.shard_map``, whose types say over which mesh axes they vary.

JAX refuses a loop or a gradient whose arrays differ in it. So the operands of a call are made to vary over the axes of
all of them, and so is what a loop starts from and what a kernel returns.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax


def varying(x: Any, like: Any) -> Any:
    """The arrays of ``x``, with a type that varies over every manual axis over which an array of ``like`` does."""
    axes = frozenset().union(*map(_axes, jax.tree.leaves(like)))

    def over_all(part: Any) -> Any:
        missing = axes - _axes(part)
        return lax.pcast(part, tuple(sorted(missing)), to="varying") if missing else part

    return jax.tree.map(over_all, x)


def _axes(x: Any) -> frozenset[str]:
    kind = getattr(jax.typeof(x), "manual_axis_type", None)
    return frozenset() if kind is None else kind.varying
