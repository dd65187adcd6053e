"""Attention functions of JAX arrays by XLA: JAX's own, which its users have without this project, and tokamax's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..kinds.formulas import document_ids
from ..kinds.inputs import make_inputs
from ..kinds.op_case import OpCase, spec_of
from ..measure.program import Draw, Program, with_gradients


def jax_nn(case: OpCase, draw: Draw | None = None) -> Program:
    """The program of an op case by ``jax.nn.dot_product_attention``."""
    documents, window = jnp.asarray(document_ids(case)), spec_of(case).window

    def attention(query: Any, key: Any, value: Any, **how: Any) -> Any:
        mask = (documents[:, None] == documents[None])[None, None] if case.documents > 1 else None
        how |= {"local_window_size": window, "mask": mask, "implementation": "xla"}
        return jax.nn.dot_product_attention(query, key, value, **how)

    return _program(case, draw, attention)


def chunked_tokamax(case: OpCase, draw: Draw | None = None) -> Program:
    """The program of an op case by tokamax's chunked attention, whose memory is linear in the length."""
    import tokamax  # noqa: PLC0415  # pyright: ignore[reportMissingImports]  (extra "peers")

    return _program(case, draw, functools.partial(tokamax.dot_product_attention, implementation="xla_chunked"))


def _program(case: OpCase, draw: Draw | None, attention: Callable[..., Any]) -> Program:
    inputs = make_inputs(case, draw)
    # One token at the end of its keys sees all of them. "causal" would hide them: JAX counts query positions from 0.
    causal = case.causal and not case.is_decode

    def attend(query: Any, key: Any, value: Any) -> Any:
        key, value = (x.swapaxes(1, 2) if case.kv_layout == "HND" else x for x in (key, value))
        return attention(query, key, value, is_causal=causal)

    arguments = (inputs.query, inputs.key, inputs.value)
    if case.needs_grad:
        return Program(with_gradients(attend), (*arguments, inputs.d_out), renewed=(0, 1, 2, 3))
    return Program(attend, arguments, renewed=(0, 1, 2))
