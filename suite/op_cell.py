"""An attention call as a program: the arrays of a case and a function of them, planned inside and ready to compile.

On one device, or with its heads (or sequences) divided among all devices of the process.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attnsuite.backends import Backend, Layout, Target, plan_sharded
from attnsuite.backends import plan as plan_whole
from attnsuite.backends.contract import Mode, Plan
from attnsuite.backends.sharding import sharding

from .cases import OpCase, spec_of
from .measure.inputs import make_inputs
from .measure.program import Program, op_function


def op_program(case: OpCase, backend: Backend, mode: Mode, target: Target, devices: int = 1) -> Program:
    """The program of an op case, see :func:`attnsuite.suite.program.op_function`.

    On several devices the arrays lie divided, as in a model that divides its heads.
    """
    spec, inputs = spec_of(case), make_inputs(case)
    mesh = None if devices == 1 else Mesh(np.array(jax.devices()[:devices]), ("devices",))

    def plan(layout: Layout) -> Plan:
        if mesh is None:
            return plan_whole(backend, spec, layout, target=target, mode=mode)
        return plan_sharded(backend, spec, layout, mesh, target=target, mode=mode)

    layout, arrays = inputs.layout, [inputs.query, inputs.key, inputs.value, inputs.d_out]
    if mesh is not None:
        placed = sharding(spec, mesh)
        layout = jax.device_put(layout, NamedSharding(mesh, PartitionSpec()))
        arrays = [jax.device_put(x, placed) for x in arrays]
    query, key, value, d_out = arrays
    function = op_function(case, plan)
    if case.kind == "op_decode":
        return Program(function, (layout, query, *jax.block_until_ready([x.swapaxes(1, 2) for x in (key, value)])))
    return Program(function, (layout, query, key, value, d_out) if case.needs_grad else (layout, query, key, value))
