"""One attention over several devices: its heads, or the sequences of its batch, divided among them.

No head needs another and no sequence needs another, so nothing is communicated. On a CPU this is how all
cores are used: XLA runs the steps of a loop one after the other on one device, so a process that calls one
core one device (``jax.config.update("jax_num_cpu_devices", n)`` before JAX starts) works on n heads at once.
Dividing the length (context parallelism) is a matter of the kernels that can.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from backends.contract import AttentionSpec, Backend, Carry, Layout, Mode, Plan
from backends.devices import Target

Divided = Literal["heads", "batch"]


def divided(spec: AttentionSpec, devices: int) -> Divided | None:
    """What can be shared out evenly among ``devices``: KV heads with their queries, else sequences, else nothing.

    >>> divided(AttentionSpec(batch=4, query_length=8, key_value_length=8, num_heads=8, num_kv_heads=2,
    ...                       head_dim=64), 4)
    'batch'
    """
    if spec.num_kv_heads % devices == 0:
        return "heads"
    return "batch" if spec.batch % devices == 0 else None


def sharding(spec: AttentionSpec, mesh: Mesh) -> NamedSharding:
    """How query, key, value and output ``[batch, length, heads, dim]`` lie on the devices of a 1-D ``mesh``.

    Raises ValueError where neither heads nor batch can be divided.
    """
    return NamedSharding(mesh, _partition(spec, mesh))


def plan_sharded(
    backend: Backend,
    spec: AttentionSpec,
    layout: Layout,
    mesh: Mesh,
    *,
    target: Target,
    mode: Mode = "native",
    options: Mapping[str, Any] | None = None,
) -> Plan:
    """As ``backend.plan``, with each device of the 1-D ``mesh`` computing its share.

    Arrays that lie as :func:`sharding` says stay where they are; others are moved. Raises ValueError where
    neither heads nor batch can be divided, and for a backend that hands a carry from layer to layer.

    >>> import jax, jax.numpy as jnp, numpy as np
    >>> from backends import registry
    >>> x = jnp.ones((1, 8, 2, 16))
    >>> spec = AttentionSpec(batch=1, query_length=8, key_value_length=8, num_heads=2, num_kv_heads=2, head_dim=16)
    >>> mesh = Mesh(np.array(jax.devices()[:1]), ("cores",))
    >>> plan = plan_sharded(registry.get("standard"), spec, Layout(), mesh, target=Target.here())
    >>> plan.run(x, x, x)[0].shape
    (1, 8, 2, 16)
    """
    arrays, rows = _partition(spec, mesh), _rows(spec, layout, mesh)
    share = dataclasses.replace(spec, **_share(spec, mesh.size))

    def attend(query: Array, key: Array, value: Array, layer: int, carry: Carry) -> tuple[Array, Carry]:
        if jax.tree.leaves(carry):
            raise ValueError(
                f"{backend.name} hands a carry from layer to layer, which plan_sharded does not divide; "
                "use backend.plan on one device."
            )

        def local(layout: Layout, query: Array, key: Array, value: Array) -> Array:
            plan = backend.plan(share, layout, target=target, mode=mode, options=options)
            return plan.run(query, key, value, layer=layer)[0]

        run = jax.shard_map(
            local, mesh=mesh, in_specs=(rows, arrays, arrays, arrays), out_specs=arrays, check_vma=False
        )
        return run(layout, query, key, value), carry

    return Plan(attend)


def _partition(spec: AttentionSpec, mesh: Mesh) -> PartitionSpec:
    if len(mesh.axis_names) != 1:
        raise ValueError(f"the mesh has the axes {mesh.axis_names}; plan_sharded takes a mesh of one axis.")
    axis = mesh.axis_names[0]
    match divided(spec, mesh.size):
        case "heads":
            return PartitionSpec(None, None, axis)
        case "batch":
            return PartitionSpec(axis)
    raise ValueError(
        f"num_kv_heads={spec.num_kv_heads} and batch={spec.batch} cannot be divided among {mesh.size} devices; "
        "use a number of devices that divides one of them."
    )


def _share(spec: AttentionSpec, devices: int) -> dict[str, int]:
    if divided(spec, devices) == "heads":
        return {"num_heads": spec.num_heads // devices, "num_kv_heads": spec.num_kv_heads // devices}
    return {"batch": spec.batch // devices}


def _rows(spec: AttentionSpec, layout: Layout, mesh: Mesh) -> Layout:
    """Where each array of a layout goes: its batch with the batch, its heads with the heads, else everywhere."""
    axis, by_heads = mesh.axis_names[0], divided(spec, mesh.size) == "heads"
    at, size = (1, spec.num_heads) if by_heads else (0, spec.batch)

    def place(x: Array | None) -> Any:  # a Layout of PartitionSpecs: the same tree, with other leaves
        if x is None:
            return None
        is_divided = x.ndim > at and x.shape[at] == size and (x.ndim == 4 or not by_heads)
        return PartitionSpec(*[None] * at, axis) if is_divided else PartitionSpec()

    names = [field.name for field in dataclasses.fields(layout)]
    return Layout(**{name: place(getattr(layout, name)) for name in names})
