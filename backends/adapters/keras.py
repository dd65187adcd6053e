"""Keras 3's ``dot_product_attention`` through a backend of this package.

``keras.ops.dot_product_attention``, and with it ``keras.layers.MultiHeadAttention`` and
``GroupQueryAttention``, call one function of Keras's JAX backend. :func:`keras_attention` replaces this function for
the length of a ``with`` block. The function's parameters were read in Keras 3.15.1
(``keras/src/backend/jax/nn.py``).
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from ..attention import attention
from .hook import check_options, signature_of

PARAMETERS = (
    *("query", "key", "value", "bias", "mask", "scale"),
    *("is_causal", "flash_attention", "attn_logits_soft_cap"),
)
READ = "Keras 3.15.1"


@contextlib.contextmanager
def keras_attention(backend: str = "auto", **options: Any) -> Iterator[None]:
    """Inside the ``with`` block Keras's ``dot_product_attention`` runs ``backend``.

    ``options`` are ``on_unavailable``, ``mode``, ``needs_grad``, ``backend_options``, ``policy`` and ``layer`` of
    :func:`attnsuite.backends.attention`. The arguments of Keras's function keep their meaning; three are limited:

    - ``mask`` and ``bias`` have four axes, as Keras's layers give them.
    - ``flash_attention=True`` is refused: Keras's own kernel is asked for. False and None change nothing.
    - ``attn_logits_soft_cap`` is refused: Keras documents another formula than its kernel computes.

    A row with no visible key is zero. Keras has no such rule.

    The replaced function belongs to the process: other threads see it too. A function that JAX compiled before the
    block keeps what it was compiled with, and one that is compiled inside keeps the backend behind it. A layer that
    has dropout, or returns its scores, computes attention without ``dot_product_attention``.

    Raises ValueError for an unknown option, where Keras does not compute with JAX, and for a Keras whose function has
    a parameter that this adapter does not know. At the end of the block RuntimeError is raised if Keras did not call
    the function once, since then no attention ran through the backend.
    """
    check_options("keras_attention", options)
    where = _module()
    original = where.dot_product_attention
    attend, calls = _function(original, backend, options)
    where.dot_product_attention = attend
    try:
        yield
    finally:
        where.dot_product_attention = original
    if not calls:
        raise RuntimeError(
            "Keras did not call dot_product_attention inside keras_attention, so no attention ran through "
            f"{backend}: the model was compiled before the block, or its layers compute attention another way "
            "(dropout, returned scores). Build or compile the model inside the block, with dropout=0."
        )


def _module() -> Any:
    """Keras's module of functions for JAX."""
    keras = importlib.import_module("keras")
    if (used := keras.backend.backend()) != "jax":
        raise ValueError(f"Keras computes with {used}, not with JAX; set KERAS_BACKEND=jax before Keras is imported.")
    return importlib.import_module("keras.src.backend").nn


def _function(
    original: Callable[..., Any], backend: str, options: dict[str, Any]
) -> tuple[Callable[..., Array], list[None]]:
    """A function with the parameters of ``original``, and a list that has one entry per call."""
    signature = signature_of(original, PARAMETERS, name="Keras's dot_product_attention", read=READ)
    calls: list[None] = []

    def dot_product_attention(*args: Any, **keywords: Any) -> Array:
        calls.append(None)
        return _attend(signature.bind(*args, **keywords), backend, options)

    return dot_product_attention, calls


def _attend(bound: inspect.BoundArguments, backend: str, options: dict[str, Any]) -> Array:
    arguments = dict.fromkeys(PARAMETERS) | bound.arguments
    if arguments["flash_attention"]:
        raise ValueError(
            "flash_attention=True asks for Keras's own kernel, and keras_attention names the backend; leave "
            "flash_attention at None, and call keras.config.disable_flash_attention()."
        )
    if arguments["attn_logits_soft_cap"] is not None:
        raise ValueError(
            f"attn_logits_soft_cap={arguments['attn_logits_soft_cap']} is not taken: Keras documents another formula "
            "than its kernel computes; leave it at None, or call attnsuite.backends.attention(logits_soft_cap=...)."
        )
    arrays = [jnp.asarray(arguments[name]) for name in ("query", "key", "value")]
    dtype = jnp.result_type(*arrays)
    query, key, value = (x.astype(dtype) for x in arrays)
    return attention(
        query,
        key,
        value,
        bias=_with_four_axes("bias", arguments["bias"], dtype),
        mask=_with_four_axes("mask", arguments["mask"], None),
        scale=arguments["scale"],
        is_causal=bool(arguments["is_causal"]),
        backend=backend,
        **options,
    )


def _with_four_axes(name: str, x: Any, dtype: Any) -> Array | None:
    if x is None:
        return None
    x = jnp.asarray(x, dtype)
    if x.ndim != 4:
        raise ValueError(f"{name} has shape {x.shape}; expected four axes, [batch, heads, query, key].")
    return x
