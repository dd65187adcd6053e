"""One attention call as a program that can be lowered, compiled, judged and timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from backends import Backend, Layout, Target
from backends.contract import Mode
from suite.cases import OpCase, spec_of
from suite.inputs import make_inputs


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A function of arrays, and the arrays: what a cell compiles and times."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def op_program(case: OpCase, backend: Backend, mode: Mode, target: Target) -> Program:
    """The program of an op case: the output, and with gradients ``(out, dq, dk, dv)``.

    Planning is part of it, as in a model's forward pass, and the layout is an argument: no backend can
    bake the mask of this one case into its code. A decode step finds its keys and values as a cache holds
    them (``models.KVCache``: ``[batch, kv_heads, length, head_dim]``) and hands them over transposed, which
    XLA folds into the products; in the contract's own layout a CPU transposes them in memory first.
    """
    spec, inputs = spec_of(case), make_inputs(case)

    def forward(layout: Layout, query: Any, key: Any, value: Any) -> Any:
        return backend.plan(spec, layout, target=target, mode=mode).run(query, key, value)[0]

    def forward_backward(layout: Layout, query: Any, key: Any, value: Any, d_out: Any) -> Any:
        out, pull_back = jax.vjp(lambda q, k, v: forward(layout, q, k, v), query, key, value)
        return out, *pull_back(d_out)

    def decode(layout: Layout, query: Any, keys: Any, values: Any) -> Any:
        return forward(layout, query, keys.swapaxes(1, 2), values.swapaxes(1, 2))

    arguments = (inputs.layout, inputs.query, inputs.key, inputs.value)
    if case.kind == "op_decode":
        caches = (x.swapaxes(1, 2) for x in (inputs.key, inputs.value))
        return Program(decode, (inputs.layout, inputs.query, *caches))
    if case.needs_grad:
        return Program(forward_backward, (*arguments, inputs.d_out))
    return Program(forward, arguments)
