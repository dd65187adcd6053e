"""What a cell times or compiles: a function of arrays, and the arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from attnsuite.backends import Layout
from attnsuite.backends.contract import Plan

from ..cases import OpCase


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A function of arrays, and the arrays. JAX compiles it, unless ``arrays`` is given.

    With ``arrays`` the function belongs to another framework: it is called as it stands, returns when it is
    done, and ``arrays`` makes of its outputs what a compiled program would have returned.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    arrays: Callable[[Any], Any] | None = None


def op_function(case: OpCase, plan: Callable[[Layout], Plan]) -> Callable[..., Any]:
    """The function of an attention call: ``(layout, query, key, value) -> output``.

    With gradients it takes ``d_out`` too and gives ``(out, dq, dk, dv)``. Planning is part of it, as in a model's
    forward pass, and the layout is an argument: no backend can bake the mask of one case into its code. A decode step
    finds its keys and values as a cache holds them (``models.KVCache``: ``[batch, kv_heads, length, head_dim]``) and
    hands them over transposed, which XLA folds into the products; in the contract's own layout a CPU transposes them
    in memory first.
    """

    def forward(layout: Layout, query: Any, key: Any, value: Any) -> Any:
        return plan(layout).run(query, key, value)[0]

    def forward_backward(layout: Layout, query: Any, key: Any, value: Any, d_out: Any) -> Any:
        return with_gradients(lambda q, k, v: forward(layout, q, k, v))(query, key, value, d_out)

    def decode(layout: Layout, query: Any, keys: Any, values: Any) -> Any:
        return forward(layout, query, keys.swapaxes(1, 2), values.swapaxes(1, 2))

    if case.kind == "op_decode":
        return decode
    return forward_backward if case.needs_grad else forward


def with_gradients(attend: Callable[..., Any]) -> Callable[..., Any]:
    """``(query, key, value, d_out) -> (out, dq, dk, dv)`` of an attention."""

    def forward_backward(query: Any, key: Any, value: Any, d_out: Any) -> Any:
        out, pull_back = jax.vjp(attend, query, key, value)
        return out, *pull_back(d_out)

    return forward_backward
