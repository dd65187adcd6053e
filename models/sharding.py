"""The sharding of a model's parameters on a mesh of devices; XLA adds the communication.

Tensor parallelism is Megatron-LM's (arXiv 1909.08053): queries, keys, values and the MLP's inner dimension are divided
by the axis of the heads, so that one sum per block is communicated. The other axis (data or context) divides the other
dimension, as in ZeRO's third stage and FSDP (arXiv 1910.02054): no device holds a whole matrix. The backend divides the
attention (``backends.sharding.Sharded``).
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .parameters import LAYER, TOP, Params


def parameter_sharding(
    name: str, shape: tuple[int, ...], mesh: Mesh, *, heads: str | None, rest: str | None
) -> NamedSharding:
    """Where one parameter lies: ``heads`` and ``rest`` are axes of the mesh, None for none.

    ``name`` is its own in the tree of ``models.parameters``. Vectors, unknown names and dimensions that an axis does
    not divide are whole on every device.
    """
    row = TOP.get(name) or LAYER.get(name)
    if len(shape) != 2 or row is None or row.divided is None:
        return NamedSharding(mesh, PartitionSpec())
    if name in TOP:
        # Both axes divide the vocabulary. A hidden dimension divided by the axis of the batch would be passed on to the
        # hidden states, which XLA then computes whole on every device to divide them by the batch.
        both = tuple(axis for axis in (heads, rest) if axis is not None)
        while both and shape[0] % math.prod(mesh.shape[axis] for axis in both):
            both = both[:-1]
        return NamedSharding(mesh, PartitionSpec(both or None, None))
    axes = (rest, heads) if row.divided else (heads, rest)
    partitions = (
        axis if axis and size % mesh.shape[axis] == 0 else None for size, axis in zip(shape, axes, strict=True)
    )
    return NamedSharding(mesh, PartitionSpec(*partitions))


def shardings(tree: Any, mesh: Mesh, *, heads: str | None, rest: str | None = None) -> Any:
    """Where parameters lie, and what is built like them: gradients, optimizer states. Adapters lie everywhere."""

    def of_leaf(path: tuple[Any, ...], x: Any) -> NamedSharding:
        name = str(path[-1].key) if path and isinstance(path[-1], jax.tree_util.DictKey) else ""
        return parameter_sharding(name, x.shape, mesh, heads=heads, rest=rest)

    return jax.tree.map_with_path(of_leaf, tree)


def shard_parameters(params: Params, mesh: Mesh, *, heads: str | None, rest: str | None = None) -> Params:
    """The tree of arrays, each where :func:`parameter_sharding` says.

    >>> import numpy as np
    >>> from attnsuite.models import Transformer, ModelConfig
    >>> mesh = Mesh(np.array(jax.devices()[:1]), ("model",))
    >>> params = shard_parameters(Transformer(ModelConfig.from_preset("debug")).arrays(), mesh, heads="model")
    >>> tuple(params["layers"][0]["q_proj"].sharding.spec)
    ('model', None)
    """
    return jax.device_put(params, shardings(params, mesh, heads=heads, rest=rest))
