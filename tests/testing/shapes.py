"""Faults that are said before any number is judged: the shape and dtype of an output, and what JAX itself cannot do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attnsuite.backends import AttentionSpec, Terms

from . import problems

PLATFORM_FAILS = "JAX's own attention fails on this platform"  # how the reason begins
_AXES = ("batch", "length", "heads", "head_dim")


def fault(run: Callable[..., Any], spec: AttentionSpec, inputs: problems.Inputs, terms: Terms) -> str:
    """One sentence where ``run(query, key, value, terms)`` gives no output of the contract's shape and dtype."""
    found = jax.eval_shape(lambda *x: run(*x[:3], terms), *inputs)
    return fault_of(found[0] if spec.return_log_sum_exp and isinstance(found, tuple) and found else found, spec)


def fault_of(found: Any, spec: AttentionSpec) -> str:
    """As :func:`fault`, of an output, or of what stands for its shape and dtype."""
    wanted = (spec.batch, spec.query_length, spec.num_heads, spec.value_head_dim or spec.head_dim)
    if not (hasattr(found, "shape") and hasattr(found, "dtype")):
        return f"it returns a {type(found).__name__}, and the contract says one array {_shape(wanted)}."
    shape = tuple(found.shape)
    if shape != wanted:
        turns = [(i, j) for i in range(4) for j in range(i + 1, 4) if _swapped(wanted, i, j) == shape]
        message = f"output has the shape {list(shape)}, and the contract says {_shape(wanted)}"
        if not turns:
            return f"{message}."
        i, j = turns[0]
        return f"{message}: {_AXES[i]} and {_AXES[j]} are swapped; return output.swapaxes({i}, {j})."
    if str(found.dtype) != spec.dtype:
        return f"output is {found.dtype} for a {spec.dtype} query; return it in the dtype of the query."
    return ""


def platform_fails(error: Exception, spec: AttentionSpec) -> bool:
    """Whether JAX's own attention raises the same on arrays of these sizes and this dtype."""
    B, T, S, N, K = spec.batch, spec.query_length, spec.key_value_length, spec.num_heads, spec.num_kv_heads
    query, key = (jnp.zeros(shape, spec.dtype) for shape in ((B, T, N, spec.head_dim), (B, S, K, spec.head_dim)))
    try:
        jax.jit(jax.grad(lambda x: jax.nn.dot_product_attention(x, key, key).sum()))(query).block_until_ready()
    except Exception as expected:  # noqa: BLE001 (whatever it raises is compared)
        # The second: of a function in its process.
        return _message(expected) in (_message(error), " ".join(str(error).split()))
    return False


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _shape(wanted: tuple[int, ...]) -> str:
    return f"{list(wanted)} ([{', '.join(_AXES)}])"


def _swapped(shape: tuple[int, ...], i: int, j: int) -> tuple[int, ...]:
    turned = list(shape)
    turned[i], turned[j] = turned[j], turned[i]
    return tuple(turned)
