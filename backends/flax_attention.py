"""A function for the ``attention_fn`` argument of flax's attention layers, nnx and linen.

nnx passes every keyword that flax's own function has. linen passes only the keywords that it finds in the signature
and drops the others. Therefore :func:`attention_fn` names every parameter of both functions: each has its meaning here,
or changes nothing, or is refused.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .attention import attention
from .devices import Target
from .operands import OPERANDS

# Arrays of the call itself, which the layer passes.
_ARRAYS = {"query", "key", "value", "bias", "mask"}
_OTHERS = {"backend", "return_log_sum_exp", "value_head_dim", "kv_layout"}  # the layer's own, or its layout
_OPTIONS = frozenset(inspect.signature(attention).parameters) - _ARRAYS - _OTHERS

_REFUSED = {
    "module": "the attention weights are never formed, so there are none to sow; leave sow_weights at False.",
    "einsum_dot_general": "the backend computes its own products; leave it at None.",
    "qk_attn_weights_einsum": "the backend computes its own products; leave qk_attn_weights_einsum_cls at None.",
    "attn_weights_value_einsum": "the backend computes its own products; leave attn_weights_value_einsum_cls at None.",
    "input_positions": "flax means rotary embedding by them; rotate query and key in a function around this one.",
}


def attention_fn(backend: str = "auto", **options: Any) -> Callable[..., Array]:
    """An ``attention_fn`` for ``flax.nnx.MultiHeadAttention`` and ``flax.linen.MultiHeadDotProductAttention``.

    ``options`` are those of :func:`attnsuite.backends.attention` (``is_causal=True``, ``on_unavailable="raise"``, ...).
    The arguments that a layer passes:

    - ``mask``, ``bias``, ``is_causal``, ``dtype`` and ``promote_dtype`` mean the same as in flax. Attention is causal
      if the layer or the options ask for it. Any number of batch axes is taken, as in flax.
    - The softmax is float32 whatever ``force_fp32_for_softmax`` says, and a row with no visible key is zero.
    - ``precision`` is accepted if the backends are at least that precise: on CPUs, and for half-precision input.
    - ``dropout_rng`` and ``broadcast_dropout`` change nothing, since active dropout is refused.

    Raises ValueError for an option that :func:`attnsuite.backends.attention` does not have. The returned function
    raises ValueError for active dropout, for weights to be sown, for the caller's einsums and positions, for every
    keyword not named here, and for one query under a mask by position against several keys: flax and JAX give that
    query position 0, but a layer that decodes means the newest position.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> layer = nnx.MultiHeadAttention(num_heads=2, in_features=8, decode=False, rngs=nnx.Rngs(0),
    ...                                attention_fn=attention_fn("standard"))
    >>> layer(jnp.ones((1, 4, 8)), is_causal=True).shape
    (1, 4, 8)
    """
    if "return_log_sum_exp" in options:
        raise ValueError(
            "attention_fn does not take return_log_sum_exp: a flax layer projects the one array that its attention "
            "function returns; call backends.attention between the layer's own projections."
        )
    if strange := sorted(set(options) - _OPTIONS):
        raise ValueError(
            f"attention_fn has no option {', '.join(strange)}; its options are {', '.join(sorted(_OPTIONS))}."
        )
    return functools.partial(_attend, backend, options)  # which is pickled, as no inner function is


def _attend(
    backend: str,
    options: dict[str, Any],
    /,
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    *,
    promote_dtype: Callable[..., Any] | None = None,
    is_causal: bool = False,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Any = None,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    input_positions: Any = None,
    **unknown: Any,
) -> Array:
    """The function of a layer, with the backend and the options of :func:`attention_fn`."""
    query, key, value = _promoted((query, key, value), dtype, promote_dtype)
    _check_shapes(query, key, value)
    _refuse(
        {
            "module": module,
            "einsum_dot_general": einsum_dot_general,
            "qk_attn_weights_einsum": qk_attn_weights_einsum,
            "attn_weights_value_einsum": attn_weights_value_einsum,
            "input_positions": input_positions,
        },
        unknown,
    )
    if dropout_rate > 0.0 and not deterministic:
        raise ValueError(
            f"attention_fn has no dropout on attention weights (dropout_rate={dropout_rate}); "
            "set dropout_rate=0.0, or deterministic=True."
        )
    _check_precision(precision, query.dtype)
    causal = is_causal or options.get("is_causal", False)
    _check_single_query(query, key, {**options, "is_causal": causal})
    lead = query.shape[:-3]
    out = attention(
        *(x.reshape(-1, *x.shape[-3:]) for x in (query, key, value)),
        bias=_with_one_batch_axis("bias", bias, lead),
        mask=_with_one_batch_axis("mask", None if mask is None else jnp.asarray(mask).astype(bool), lead),
        backend=backend,
        **{**options, "is_causal": causal},
    )
    return out.reshape(*lead, *out.shape[-3:])


def _refuse(arguments: dict[str, Any], unknown: dict[str, Any]) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"attention_fn does not take {name}: {_REFUSED[name]}")
    if unknown:
        raise ValueError(
            f"attention_fn does not know the keyword {', '.join(sorted(unknown))}, so it cannot say whether ignoring "
            "it changes the result; call the layer without it."
        )


def _promoted(arrays: tuple[Array, ...], dtype: Any, promote_dtype: Callable[..., Any] | None) -> tuple[Array, ...]:
    """All of one dtype, as flax's ``promote_dtype``, or the caller's function, makes them."""
    if promote_dtype is not None:
        return promote_dtype(arrays, dtype=dtype)
    dtype = jnp.result_type(*arrays) if dtype is None else dtype
    return tuple(jnp.asarray(x, dtype) for x in arrays)


def _check_precision(precision: Any, dtype: Any) -> None:
    """Products of half-precision numbers are exact in float32, and XLA's products on a CPU are never less."""
    exact = dtype != jnp.float32 or Target.here().platform == "cpu"
    accepted = {*lax.Precision} if exact else {lax.Precision.DEFAULT}
    try:
        taken = {
            lax.Precision(one) for one in (precision if isinstance(precision, tuple) else (precision,))
        } <= accepted
    except ValueError:  # an algorithm by name
        taken = False
    if not taken:
        raise ValueError(
            f"attention_fn does not take precision={precision} for {dtype} on {Target.here()}, only "
            f"{', '.join(sorted(one.name for one in accepted))} or None; leave the layer's precision at None and set "
            "jax.default_matmul_precision around the program."
        )


def _check_shapes(query: Array, key: Array, value: Array) -> None:
    """Check the batch axes, which folding them into one would hide; then the other axes, in flax's order."""
    fits = {
        "expected the same rank, [batch..., length, heads, head_dim]": query.ndim == key.ndim == value.ndim >= 3,
        "batch dims must match": query.shape[:-3] == key.shape[:-3] == value.shape[:-3],
        "key and value lengths must match": key.shape[-3:-2] == value.shape[-3:-2],
        "query and key depths must match": query.shape[-1:] == key.shape[-1:],
    }
    for requirement, met in fits.items():
        if not met:
            raise ValueError(f"query {query.shape}, key {key.shape}, value {value.shape}: {requirement}.")


def _check_single_query(query: Array, key: Array, options: dict[str, Any]) -> None:
    """Refuse one query under a mask by position: its place in the sequence is not known."""
    by_position = ["is_causal"] if options["is_causal"] else []
    others = ["local_window_size", "chunk_size", "mask_function", "score_function"]
    others += [operand.name for operand in OPERANDS if operand.by_position]
    by_position += [name for name in others if options.get(name) is not None]
    if query.shape[-3] == 1 < key.shape[-3] and by_position and options.get("query_positions") is None:
        raise ValueError(
            f"attention_fn got {by_position[0]}={options[by_position[0]]} with 1 query and {key.shape[-3]} keys, where "
            "flax counts the query as position 0. In a layer that decodes flax's mask by cache index is causal "
            "already: leave is_causal out of attention_fn's options and pass layer(..., is_causal=not decode). Windows "
            "and functions of positions need query_positions there, which backends.attention takes."
        )


def _with_one_batch_axis(name: str, x: Any, lead: Sequence[int]) -> Array | None:
    """An array that broadcasts to ``[*lead, heads, query, key]``, with the axes ``lead`` folded into one."""
    if x is None:
        return None
    x = jnp.asarray(x)
    missing = len(lead) + 3 - x.ndim
    if missing < 0:
        raise ValueError(
            f"{name} has shape {x.shape}; expected at most {len(lead) + 3} dimensions, "
            f"[{'batch..., ' if lead else ''}heads, query, key]."
        )
    x = x.reshape((1,) * missing + x.shape)
    if len(lead) == 1:
        return x
    tail = x.shape[-3:]
    if math.prod(x.shape[:-3]) == 1:
        return x.reshape(1, *tail)
    return jnp.broadcast_to(x, (*lead, *tail)).reshape(-1, *tail)
