"""``jax.nn.dot_product_attention`` with its XLA implementation, which JAX users have without this project."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..kinds.formulas import document_ids
from ..kinds.inputs import make_inputs
from ..kinds.op_case import OpCase, spec_of
from ..measure.fresh import Draw
from ..measure.program import Program, with_gradients


def program(case: OpCase, draw: Draw | None = None) -> Program:
    """The program of an op case, arrays in JAX's own layout."""
    inputs, documents = make_inputs(case, draw), jnp.asarray(document_ids(case))
    # One token at the end of its keys sees all of them. "causal" would hide them: JAX counts query positions from 0.
    causal = case.causal and not case.is_decode

    def attend(query: Any, key: Any, value: Any) -> Any:
        packed = case.documents > 1
        key, value = (x.swapaxes(1, 2) if case.kv_layout == "HND" else x for x in (key, value))
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            is_causal=causal,
            local_window_size=spec_of(case).window,
            mask=(documents[:, None] == documents[None])[None, None] if packed else None,
            implementation="xla",
        )

    arguments = (inputs.query, inputs.key, inputs.value)
    if case.needs_grad:
        return Program(with_gradients(attend), (*arguments, inputs.d_out), renewed=(0, 1, 2, 3))
    return Program(attend, arguments, renewed=(0, 1, 2))
