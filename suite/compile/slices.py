"""Programs for a slice of TPUs: what each axis of the mesh divides, and which chips hold each array.

The KV heads are divided among as many chips as their number allows. The remaining factor divides the batch; where the
batch does not allow that, it divides the length, and the keys are gathered (not for a decode step). Parameters and
optimizer states are divided by both axes (``models/sharding.py``), caches by sequences and heads. The compiler's sizes
are those of one chip.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attnsuite.backends import Backend, Target
from attnsuite.backends.sharding import MeshAxes, Sharded
from attnsuite.models.sharding import shardings

from ..kinds.attention_call import OpCase
from ..kinds.model_case import ModelCase
from ..measure.program import Program
from . import topologies
from .programs import attention_specs


@dataclasses.dataclass(frozen=True, slots=True)
class SliceSharding:
    """A mesh over the chips of a slice, with an axis ``heads`` and the axis :attr:`rest`."""

    mesh: Mesh
    axes: MeshAxes

    @property
    def rest(self) -> str | None:
        """The name of the axis that divides the batch or the length."""
        axis = self.axes.data or self.axes.context
        return axis if isinstance(axis, str) else None

    def backend(self, backend: Backend) -> Sharded:
        """The backend with each chip computing its share."""
        return Sharded(backend, self.mesh, self.axes)

    def note(self) -> str:
        """A sentence for the record."""
        shares = " and ".join(f"{size} of {name}" for name, size in self.mesh.shape.items() if size > 1)
        sharding = f"parts: {shares}, and parameters cut by all" if shares else "every chip has all of it"
        return f"Sizes are of one chip; {sharding}."


def shares(case: OpCase | ModelCase, target: Target) -> tuple[int, int]:
    """Among how many chips of a slice the KV heads are divided, and among how many the batch or the length."""
    heads = math.gcd(target.count, attention_specs(case)[0].num_kv_heads)
    return heads, target.count // heads


def shard(case: OpCase | ModelCase, target: Target) -> SliceSharding | str:
    """How the chips of a slice share ``case``, or the sentence that says why they cannot."""
    spec = attention_specs(case)[0]
    heads, rest = shares(case, target)
    decodes = spec.query_length == 1
    if spec.batch % rest == 0:
        name = "data"
    elif not decodes and spec.query_length % rest == 0 and spec.key_value_length % rest == 0:
        name = "context"
    else:
        shared = f"batch={spec.batch}" if decodes else f"batch={spec.batch} or query_length={spec.query_length}"
        return (
            f"of the {target.count} chips of {target} {heads} share num_kv_heads={spec.num_kv_heads}, and {rest} are "
            f"left, which {shared} cannot be dealt to; give a batch that {rest} divides, or a smaller slice."
        )
    chips = np.array(topologies.devices(target)).reshape(rest, heads)
    axes = MeshAxes(data="data", heads="heads") if name == "data" else MeshAxes(heads="heads", context="context")
    return SliceSharding(Mesh(chips, (name, "heads")), axes)


def placed(program: Program, case: OpCase | ModelCase, sharding: SliceSharding) -> Program:
    """The program with a sharding on every argument."""
    first, *others = program.arguments
    if isinstance(case, ModelCase):
        first = _parameters(first, sharding)
        state = [_parameters(others.pop(0), sharding)] if case.needs_grad else []
        return dataclasses.replace(program, arguments=(first, *state, *(_data(x, sharding) for x in others)))
    first = jax.tree.map(lambda x: _at(x, sharding, PartitionSpec()), first)
    arrays = PartitionSpec(sharding.axes.data, sharding.axes.context, "heads")
    cached = PartitionSpec(sharding.axes.data, "heads")
    where = [arrays, cached, cached, arrays][: len(others)] if case.kv_layout == "HND" else [arrays] * len(others)
    return dataclasses.replace(
        program, arguments=(first, *(_at(x, sharding, spec) for x, spec in zip(others, where, strict=True)))
    )


def _parameters(tree: Any, sharding: SliceSharding) -> Any:
    """Shardings of parameters, and of optimizer states, whose trees have the same shape."""
    where_ = shardings(tree, sharding.mesh, heads="heads", rest=sharding.rest)
    return jax.tree.map(lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree, where_)


def _data(tree: Any, sharding: SliceSharding) -> Any:
    """Tokens ``[batch, length]``, caches ``[batch, kv_heads, length, dim]`` and lengths ``[batch]``.

    A dimension that its axis does not divide stays whole: a latent layer keeps one head for all.
    """
    data, context = sharding.axes.data, sharding.axes.context
    axes = {1: (data,), 2: (data, context), 4: (data, "heads", context)}

    def place(x: Any) -> Any:
        where = axes[len(x.shape)]
        divides = [
            axis is None or size % sharding.mesh.shape[axis] == 0 for size, axis in zip(x.shape, where, strict=False)
        ]
        return _at(x, sharding, PartitionSpec(*(axis if ok else None for axis, ok in zip(where, divides, strict=True))))

    return jax.tree.map(place, tree)


def _at(x: Any, sharding: SliceSharding, spec: PartitionSpec) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(sharding.mesh, spec))
