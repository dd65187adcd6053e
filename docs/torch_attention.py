"""PyTorch's attention as a function of JAX arrays, for ``attnsuite judge docs/torch_attention.py:torch_sdpa``.

It needs torch, and computes on the CPU in a callback. Arrays are ``[B, T, H, D]``.
"""

import functools
from typing import Any

import jax
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from torch.nn.functional import scaled_dot_product_attention  # pyright: ignore[reportMissingImports]


def _tensor(x: Any) -> Any:
    """``x`` as ``[B, H, T, D]`` in its own dtype, through float32: PyTorch does not know NumPy's bfloat16."""
    return torch.from_numpy(np.array(x, np.float32)).to(getattr(torch, str(x.dtype))).transpose(1, 2)


def _array(x: Any, dtype: Any) -> np.ndarray:
    return x.detach().transpose(1, 2).float().numpy().astype(dtype)


def _forward(is_causal: bool, query: Any, key: Any, value: Any) -> np.ndarray:
    with torch.no_grad():
        output = scaled_dot_product_attention(*map(_tensor, (query, key, value)), is_causal=is_causal, enable_gqa=True)
    return _array(output, query.dtype)


def _backward(is_causal: bool, query: Any, key: Any, value: Any, cotangent: Any) -> tuple[np.ndarray, ...]:
    leaves = [_tensor(x).requires_grad_() for x in (query, key, value)]
    output = scaled_dot_product_attention(*leaves, is_causal=is_causal, enable_gqa=True)
    return tuple(_array(x, query.dtype) for x in torch.autograd.grad(output, leaves, _tensor(cotangent)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(is_causal: bool, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    call = functools.partial(_forward, is_causal)
    output = jax.ShapeDtypeStruct((*query.shape[:3], value.shape[-1]), query.dtype)
    return jax.pure_callback(call, output, query, key, value, vmap_method="sequential")


def _vjp(is_causal: bool, inputs: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[jax.Array, ...]:
    call = functools.partial(_backward, is_causal)
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs)
    return jax.pure_callback(call, shapes, *inputs, cotangent, vmap_method="sequential")


_attend.defvjp(lambda is_causal, *inputs: (_attend(is_causal, *inputs), inputs), _vjp)


def torch_sdpa(query: jax.Array, key: jax.Array, value: jax.Array, *, is_causal: bool = False) -> jax.Array:
    """``[B, T, H, D]`` in the query's dtype; the gradient is PyTorch's own."""
    return _attend(is_causal, query, key, value)
