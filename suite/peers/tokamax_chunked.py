"""tokamax's chunked XLA attention: another implementation with linear memory that runs on every platform."""

from __future__ import annotations

from typing import Any

import tokamax  # pyright: ignore[reportMissingImports]  (extra "peers")

from ..kinds.inputs import make_inputs
from ..kinds.op_case import OpCase
from ..measure.fresh import Draw
from ..measure.program import Program, with_gradients


def program(case: OpCase, draw: Draw | None = None) -> Program:
    """The program of an op case."""
    inputs = make_inputs(case, draw)
    causal = case.causal and not case.is_decode  # one token at the end of its keys sees all of them

    def attend(query: Any, key: Any, value: Any) -> Any:
        key, value = (x.swapaxes(1, 2) if case.kv_layout == "HND" else x for x in (key, value))
        return tokamax.dot_product_attention(query, key, value, is_causal=causal, implementation="xla_chunked")

    arguments = (inputs.query, inputs.key, inputs.value)
    if case.needs_grad:
        return Program(with_gradients(attend), (*arguments, inputs.d_out), renewed=(0, 1, 2, 3))
    return Program(attend, arguments, renewed=(0, 1, 2))
