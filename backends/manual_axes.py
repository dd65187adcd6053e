"""Arrays inside of ``jax.shard_map``, whose types say over which mesh axes they vary.

JAX refuses a loop or a gradient whose arrays differ in it. So the operands of a call are made to vary over the axes of
all of them, and so is what a loop starts from and what a kernel returns.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def varying(x: Any, like: Any) -> Any:
    """The arrays of ``x``, with a type that varies over every manual axis over which an array of ``like`` does.

    Where an array of ``like`` lies on an explicit mesh, outside of ``jax.set_mesh`` too, so does each array of ``x``.
    """
    leaves = jax.tree.leaves(like)
    axes = frozenset().union(*map(_axes, leaves))
    mesh = next((mesh for each in leaves if AxisType.Explicit in (mesh := _mesh(each)).axis_types), None)

    def over_all(part: Any) -> Any:
        if mesh is not None and _mesh(part).empty:
            part = jax.sharding.reshard(part, NamedSharding(mesh, PartitionSpec()))
        missing = axes - _axes(part)
        return lax.pcast(part, tuple(sorted(missing)), to="varying") if missing else part

    return jax.tree.map(over_all, x)


def _axes(x: Any) -> frozenset[str]:
    kind = getattr(jax.typeof(x), "manual_axis_type", None)
    return frozenset() if kind is None else kind.varying


def _mesh(x: Any) -> Any:
    return jax.typeof(x).sharding.mesh
