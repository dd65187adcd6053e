"""Calls on a mesh with explicit axes: each device computes its share of the batch and of the heads.

On such a mesh (``jax.make_mesh``'s default since JAX 0.9) the type of an array says how it is sharded, and JAX asks
each operation what becomes of it. Blocked and native kernels cannot say it of their parts. Their shares are independent
where batch and heads are sharded, so they run inside ``jax.shard_map``, without moving keys or values.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AxisType
from jaxtyping import Array

from .contract import Backend
from .devices import Target
from .features import INSTEAD, Mode, Options
from .sharding import MeshAxes, Sharded
from .spec import AttentionSpec
from .support import support

_DIMENSIONS = ("batch", "length", "heads", "head_dim")


def shares(
    backend: Backend,
    spec: AttentionSpec,
    how: tuple[Target, Mode, Options],
    query: Array,
    key: Array,
    value: Array | None,
) -> Backend:
    """``backend`` on each device's share where an explicit mesh shards batch or heads; else ``backend`` itself.

    ``how`` is target, mode and options. ``standard`` is left to JAX, which follows each of its operations, and a
    :class:`Sharded` says itself what each device computes. Raises ValueError, with what to do, where query, key and
    value are sharded otherwise than along batch and heads, each alike, and where the share is not supported.
    """
    found = [_sharding(x) for x in (query, key, value) if x is not None]
    if spec.kv_layout == "HND":
        found[1:] = [(batch, length, heads, dim) for batch, heads, length, dim in found[1:]]
    mesh = jax.typeof(query).sharding.mesh
    if backend.name == "standard" or isinstance(backend, Sharded) or not any(any(each) for each in found):
        return backend
    batch, length, heads, head_dim = found[0]
    if length or head_dim or any(each != found[0] for each in found):
        descriptions = [
            f"{name} {dict(zip(_DIMENSIONS, each, strict=True))}"
            for name, each in zip(("query", "key", "value"), found, strict=False)
        ]
        raise ValueError(
            f"{backend.name} runs on each device's share where batch or heads of query, key and value are sharded over "
            f"the same axes of an explicit mesh; given are {'; '.join(descriptions)}. Use jax.sharding.reshard, "
            "or Sharded(backend, mesh, MeshAxes(context=...)) for a sharded length."
        )
    sharded = Sharded(backend, mesh, MeshAxes(data=batch, heads=heads))
    if reasons := support(sharded, spec, *how).reasons:
        sentences = " ".join(reasons).replace(INSTEAD, "use backend='standard', which JAX divides itself")
        raise ValueError(f"{sharded.name} cannot run this on {how[0]}: {sentences}")
    return sharded


def _sharding(x: Array) -> tuple[Any, ...]:
    """The explicit axes of each dimension, None where it is whole."""
    sharding = jax.typeof(x).sharding
    explicit = {
        name
        for name, kind in zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True)
        if kind == AxisType.Explicit
    }
    names = [each if isinstance(each, tuple) else (each,) for each in (*sharding.spec, *(None,) * x.ndim)][: x.ndim]
    of_each = [tuple(name for name in each if name in explicit) for each in names]
    return tuple(each[0] if len(each) == 1 else each or None for each in of_each)
