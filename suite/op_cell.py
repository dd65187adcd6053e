"""An attention call as a program: the arrays of a case and a function of them, planned inside and ready to compile.

On one device, or with its heads (or sequences) divided among all devices of the process.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attnsuite.backends import Backend, Layout, Sharded, Target
from attnsuite.backends import plan as plan_whole
from attnsuite.backends.contract import Mode, Plan

from .cases import OpCase, spec_of
from .measure.inputs import make_inputs
from .measure.program import Program, op_function


def op_program(case: OpCase, backend: Backend, mode: Mode, target: Target, devices: int = 1) -> Program:
    """The program of an op case, see :func:`attnsuite.suite.program.op_function`.

    On several devices the arrays lie divided, as in a model that divides its heads.
    """
    spec, inputs = spec_of(case), make_inputs(case)
    mesh = None if devices == 1 else Mesh(np.array(jax.devices()[:devices]), ("devices",))
    sharded = None if mesh is None else Sharded.among(backend, spec, mesh)

    def plan(layout: Layout) -> Plan:
        return plan_whole(sharded or backend, spec, layout, target=target, mode=mode)

    layout, arrays = inputs.layout, [inputs.query, inputs.key, inputs.value, inputs.d_out]
    if sharded is not None:
        layout = jax.device_put(layout, NamedSharding(sharded.mesh, PartitionSpec()))
        arrays = [jax.device_put(x, sharded.sharding()) for x in arrays]
    query, key, value, d_out = arrays
    function = op_function(case, plan)
    if case.kind == "op_decode":
        return Program(function, (layout, query, *jax.block_until_ready([x.swapaxes(1, 2) for x in (key, value)])))
    return Program(function, (layout, query, key, value, d_out) if case.needs_grad else (layout, query, key, value))
