"""The arrays of an op case, drawn from its seed: equal in every process, for every backend and version."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from attnsuite.backends import Layout

from ..measure.program import Draw, renewed
from .formulas import document_ids
from .op_case import Call, OpCase


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """Query, key and value in the case's layout and a cotangent of the output, all in the case's dtype."""

    query: Float[Array, "b t n h"]
    key: Float[Array, "b ?s ?k h"]
    value: Float[Array, "b ?s ?k v"]
    d_out: Float[Array, "b t n v"]
    layout: Layout


def make_inputs(case: OpCase, draw: Draw | None = None) -> Inputs:
    """Standard normal arrays, renewed by ``draw``, and the layout of ``case`` (initialises JAX)."""
    value_dim = case.value_head_dim or case.head_dim
    rng = np.random.default_rng([case.seed, 0])

    def normal(length: int, heads: int, dim: int) -> Array:
        return jnp.asarray(rng.standard_normal((case.batch, length, heads, dim), np.float32), case.dtype)

    def turned(x: Array) -> Array:
        return x.swapaxes(1, 2) if case.kv_layout == "HND" else x

    arrays = (
        normal(case.query_length, case.heads, case.head_dim),
        turned(normal(case.sequence, case.kv_heads, case.head_dim)),
        turned(normal(case.sequence, case.kv_heads, value_dim)),
        normal(case.query_length, case.heads, value_dim),
    )
    return Inputs(*renewed(arrays, draw), layout=layout_of(case))


def layout_of(case: Call) -> Layout:
    """The position of a decode step, or the documents of a packed sequence."""
    if case.is_decode:
        last = jnp.full((case.batch, 1), case.sequence - 1, jnp.int32)
        return Layout(query_positions=last) if case.causal else Layout()
    if case.documents == 1:
        return Layout()
    ids = jnp.asarray(np.broadcast_to(document_ids(case), (case.batch, case.sequence)))
    return Layout(query_segment_ids=ids, key_value_segment_ids=ids)
