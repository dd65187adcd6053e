"""PyTorch's ``scaled_dot_product_attention`` on the CPU, with as many threads as it takes by itself."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import torch  # pyright: ignore[reportMissingImports]  (extra "peers")
from torch.nn.functional import scaled_dot_product_attention  # pyright: ignore[reportMissingImports]

from attnsuite.backends.contract import may_attend

from ..kinds.attention_call import OpCase, spec_of
from ..kinds.inputs import make_inputs
from ..measure.program import Draw, Program


def program(case: OpCase, draw: Draw | None = None) -> Program:
    """The program of an op case; tensors are [batch, heads, length, dim] as PyTorch wants them."""
    inputs = make_inputs(case, draw)
    query, d_out = (to_torch(x).transpose(1, 2).contiguous() for x in (inputs.query, inputs.d_out))
    key, value = (to_torch(x) for x in (inputs.key, inputs.value))
    if case.kv_layout == "NHD":
        key, value = (x.transpose(1, 2).contiguous() for x in (key, value))
    grouped = case.kv_heads != case.heads
    causal = case.causal and not case.is_decode  # one token at the end of its keys sees all of them
    how: dict[str, Any] = {"is_causal": causal, "enable_gqa": grouped}
    if case.window_size is not None or case.documents > 1:  # what is_causal does not say, as an array
        mask = may_attend(spec_of(case), inputs.layout)
        how = {"attn_mask": torch.from_numpy(np.array(mask)), "enable_gqa": grouped}

    def forward() -> Any:
        with torch.no_grad():
            return scaled_dot_product_attention(query, key, value, **how)

    def forward_backward() -> Any:
        leaves = [x.requires_grad_() for x in (query, key, value)]
        out = scaled_dot_product_attention(*leaves, **how)
        return out, *torch.autograd.grad(out, leaves, d_out)

    def arrays(outputs: Any) -> Any:
        if isinstance(outputs, tuple):
            return tuple(to_jax(x.transpose(1, 2)) for x in outputs)
        return to_jax(outputs.transpose(1, 2))

    return Program(forward_backward if case.needs_grad else forward, (), arrays=arrays)


def to_torch(x: Any) -> Any:
    """A JAX array as a tensor of the same dtype (through float32: PyTorch does not know NumPy's bfloat16)."""
    return torch.from_numpy(np.array(x, np.float32)).to(getattr(torch, str(x.dtype)))


def to_jax(x: Any) -> Any:
    """A tensor as a JAX array of the same dtype."""
    return jnp.asarray(x.detach().float().numpy(), str(x.dtype).removeprefix("torch."))
