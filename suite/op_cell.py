"""An attention call as a program: the arrays of a case and a function of them, planned inside and ready to compile.

On one device, or with its heads (or sequences) divided among all devices of the process.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from backends import Backend, Layout, Target, plan_sharded
from backends.contract import Mode, Plan
from backends.sharding import sharding
from suite.cases import OpCase, spec_of
from suite.inputs import make_inputs
from suite.program import Program, with_gradients


def op_program(case: OpCase, backend: Backend, mode: Mode, target: Target, devices: int = 1) -> Program:
    """The program of an op case: the output, and with gradients ``(out, dq, dk, dv)``.

    Planning is part of it, as in a model's forward pass, and the layout is an argument: no backend can
    bake the mask of this one case into its code. A decode step finds its keys and values as a cache holds
    them (``models.KVCache``: ``[batch, kv_heads, length, head_dim]``) and hands them over transposed, which
    XLA folds into the products; in the contract's own layout a CPU transposes them in memory first. On
    several devices the arrays lie divided, as in a model that divides its heads.
    """
    spec, inputs = spec_of(case), make_inputs(case)
    mesh = None if devices == 1 else Mesh(np.array(jax.devices()[:devices]), ("devices",))

    def plan(layout: Layout) -> Plan:
        if mesh is None:
            return backend.plan(spec, layout, target=target, mode=mode)
        return plan_sharded(backend, spec, layout, mesh, target=target, mode=mode)

    def forward(layout: Layout, query: Any, key: Any, value: Any) -> Any:
        return plan(layout).run(query, key, value)[0]

    def forward_backward(layout: Layout, query: Any, key: Any, value: Any, d_out: Any) -> Any:
        return with_gradients(lambda q, k, v: forward(layout, q, k, v))(query, key, value, d_out)

    def decode(layout: Layout, query: Any, keys: Any, values: Any) -> Any:
        return forward(layout, query, keys.swapaxes(1, 2), values.swapaxes(1, 2))

    layout, arrays = inputs.layout, [inputs.query, inputs.key, inputs.value, inputs.d_out]
    if mesh is not None:
        placed = sharding(spec, mesh)
        layout = jax.device_put(layout, NamedSharding(mesh, PartitionSpec()))
        arrays = [jax.device_put(x, placed) for x in arrays]
    query, key, value, d_out = arrays
    if case.kind == "op_decode":
        return Program(decode, (layout, query, *jax.block_until_ready([x.swapaxes(1, 2) for x in (key, value)])))
    if case.needs_grad:
        return Program(forward_backward, (layout, query, key, value, d_out))
    return Program(forward, (layout, query, key, value))
