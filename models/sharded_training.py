"""Training on a mesh of devices: where parameters, optimizer state and batches lie.

A mesh has four axes. ``data`` and ``fsdp`` divide the rows of a batch; ``fsdp`` divides parameters and optimizer state
too, so that no device holds a whole matrix (ZeRO's third stage, arXiv 1910.02054). ``heads`` divides heads and
matrices (Megatron-LM's tensor parallelism, arXiv 1909.08053). ``context`` divides the tokens of a row. The step is the
one of ``models/training.py``: XLA adds the communication, and ``backends.Sharded`` divides the attention. Losses and
updates are those of one device, up to the order of float sums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Wrapped

from attnsuite.backends import MeshAxes, Sharded, support

from .planning import Resolutions
from .sharding import shardings
from .training import Batch, Step, Trained

_ROWS = ("data", "fsdp")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeshSizes:
    """The number of devices along each axis of a training mesh. Raises ValueError.

    >>> sizes = MeshSizes(data=2, heads=4)
    >>> sizes.count, str(sizes)
    (8, 'data=2,heads=4')
    """

    data: int = 1
    fsdp: int = 1
    heads: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        for name, size in dataclasses.asdict(self).items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name}={size!r} must be an integer of at least 1, the devices along that axis.")

    @property
    def count(self) -> int:
        """The number of devices."""
        return self.data * self.fsdp * self.heads * self.context

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in dataclasses.asdict(self).items() if size > 1) or "data=1"


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Where the arrays of a training lie. Made by :func:`place_on`."""

    mesh: Mesh

    def resolutions(self, resolutions: Resolutions) -> Resolutions:
        """The same backends, none a fallback, with their problems divided. Raises ValueError for a refused share."""
        # Rows are divided by two axes here, and by one in MeshAxes: the same devices in the same order.
        sizes = self.mesh.shape
        names = {"data": sizes["data"] * sizes["fsdp"], "heads": sizes["heads"], "context": sizes["context"]}
        mesh = Mesh(self.mesh.devices.reshape(*names.values()), tuple(names))
        divided: dict[str, Any] = {name: name for name, size in names.items() if size > 1} or {"data": "data"}
        found = []
        for kind, resolution in resolutions:
            backend = Sharded(resolution.backend, mesh, MeshAxes(**divided))
            mode, options = resolution.mode_and()
            if reasons := support(backend, resolution.spec, resolution.target, mode, options).reasons:
                raise ValueError(f"{backend.name} cannot train this: {' '.join(reasons)}")
            found.append((kind, dataclasses.replace(resolution, backend=backend)))
        return tuple(found)

    def shardings(self, tree: Any) -> Any:
        """Where parameters lie, or what is built like them (:func:`attnsuite.models.sharding.shardings`)."""
        return shardings(tree, self.mesh, heads="heads", rest="fsdp")

    def put(self, tree: Any) -> Any:
        """The arrays of :meth:`shardings` in their places."""
        return jax.device_put(tree, self.shardings(tree))

    def state(self, update: optax.GradientTransformation, trained: Trained) -> Any:
        """The optimizer's first state, made where it lies."""
        state_shardings = self.shardings(jax.eval_shape(update.init, trained))
        return jax.jit(update.init, out_shardings=state_shardings)(trained)

    def batch(self, batch: Batch) -> Batch:
        """The tokens of a step in their places. Raises ValueError where the mesh does not divide them."""
        place = NamedSharding(self.mesh, PartitionSpec(None, _ROWS, "context"))
        return jax.tree.map(lambda x: jax.device_put(x, place), batch)

    def compiled_step(self, step: Step, trained: Trained, state: Any) -> Wrapped:
        """The step under ``jax.jit``, whose results lie where ``trained`` and ``state`` do; these are donated."""
        result_shardings = jax.tree.map(lambda x: x.sharding, (trained, state))
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        return jax.jit(step, donate_argnums=(0, 1), out_shardings=(*result_shardings, everywhere))


def place_on(sizes: MeshSizes, devices: Sequence[Any] | None = None) -> Placement:
    """The placement on a mesh of the first of ``devices`` (default: all of this process).

    Raises ValueError where there are too few.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) < sizes.count:
        raise ValueError(f"{sizes} needs {sizes.count} devices; there are {len(devices)} ({devices[0].device_kind}).")
    shape = dataclasses.asdict(sizes)
    return Placement(Mesh(np.array(devices[: sizes.count]).reshape(*shape.values()), tuple(shape)))
