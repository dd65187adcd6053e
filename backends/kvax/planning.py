"""Plan one forward pass on a given copy of Kvax: native, interpreted, or one that records its launches.

``backend.py`` plans with this module; ``build.py`` traces a plan to record the launches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..contract import AttentionSpec, Carry, Layout, Plan
from . import layout as layouts
from .blocks import Passes
from .mesh import OneDevice, OnMesh

if TYPE_CHECKING:
    from .upstream import Upstream


def plan_with(kvax: Upstream, spec: AttentionSpec, layout: Layout, blocks: Passes, devices: OnMesh | OneDevice) -> Plan:
    """The plan on a given copy of Kvax."""
    lengths = layouts.padded_lengths(spec, blocks, devices.context_size)
    converted = layouts.convert(spec, layout, *lengths)
    kernel = devices.kernel(kvax, spec, blocks)
    arrays = devices.prepare(kvax, spec, blocks, converted)
    run = _in_the_dtype_of_its_input(kernel, spec.needs_grad)

    def attend(
        query: Float[Array, "b t n h"],
        key: Float[Array, "b s k h"],
        value: Float[Array, "b s k v"],
        layer: int | None,
        carry: Carry,
    ) -> tuple[Float[Array, "b t n v"], Carry]:
        query, key, value = (
            jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, 0)))
            for x, length in ((query, lengths[0]), (key, lengths[1]), (value, lengths[1]))
        )
        out = run(query, key, value, arrays)[:, : spec.query_length]
        if converted.seen is None:
            return out, carry
        return jnp.where(converted.seen[:, :, None, None], out, jnp.zeros_like(out)), carry

    return Plan(attend)


def _in_the_dtype_of_its_input(kernel: Callable[..., Array], needs_grad: bool) -> Callable[..., Array]:
    """``kernel(query, key, value, arrays)`` with gradients in their input's dtype: Kvax's dk, dv are float32."""

    @jax.custom_vjp
    def run(query: Array, key: Array, value: Array, arrays: Any) -> Array:
        return kernel(query, key, value, arrays)

    def forward(query: Array, key: Array, value: Array, arrays: Any) -> tuple[Array, Any]:
        if not needs_grad:
            raise ValueError("this was planned with needs_grad=False; plan with needs_grad=True to differentiate it.")
        return jax.vjp(functools.partial(_last, kernel, arrays), query, key, value)

    def backward(pullback: Any, d_out: Array) -> tuple[Any, ...]:
        return *(x.astype(d_out.dtype) for x in pullback(d_out)), None

    run.defvjp(forward, backward)
    return run


def _last(kernel: Callable[..., Array], arrays: Any, *inputs: Array) -> Array:
    return kernel(*inputs, arrays)
