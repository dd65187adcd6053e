"""One call for one attention: plan and run together.

:func:`attention` is the public call; :func:`dot_product_attention` has the signature of JAX's own, and
``flax_attention.py`` makes functions for flax's layers. A model with many layers resolves and plans once instead; see
``models/transformer.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Num

from backends.contract import Layout, Terms
from backends.features import Mode
from backends.layout import make_spec
from backends.resolve import OnUnavailable, resolve

Scale = float | Num[Array, ""] | Num[np.ndarray, ""] | np.number  # known when the program is compiled


def attention(
    query: Float[Array, "batch q_len heads head_dim"],
    key: Float[Array, "batch kv_len kv_heads head_dim"],
    value: Float[Array, "batch kv_len kv_heads v_dim"],
    *,
    is_causal: bool = False,
    scale: Scale | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    chunk_size: int | None = None,
    logits_soft_cap: float | None = None,
    query_segment_ids: Int[Array, "batch q_len"] | None = None,
    key_value_segment_ids: Int[Array, "batch kv_len"] | None = None,
    query_positions: Int[Array, "batch q_len"] | None = None,
    key_value_positions: Int[Array, "batch kv_len"] | None = None,
    key_value_seq_lengths: Int[Array, " batch"] | None = None,
    mask: Bool[Array, "#batch #heads #q_len #kv_len"] | None = None,
    bias: Float[Array, "#batch #heads #q_len #kv_len"] | None = None,
    backend: str = "auto",
    mode: Mode = "native",
    on_unavailable: OnUnavailable = "fallback",
    needs_grad: bool = True,
    backend_options: Mapping[str, Any] | None = None,
) -> Float[Array, "batch q_len heads v_dim"]:
    """Attention through a registered backend; semantics as :mod:`backends.contract` says.

    Inputs share one dtype (float32, bfloat16 or float16), which is also the output's; ``heads`` is a
    multiple of ``kv_heads``. ``mode="interpret"`` runs a kernel backend's own kernel in an interpreter, for
    verification. ``needs_grad=False`` admits backends that have no backward pass. Raises ValueError for
    shapes, dtypes and options that do not fit, UnknownBackendError for a name nobody registered, and
    BackendUnavailableError where ``on_unavailable="raise"`` and the backend refuses; otherwise a refusal
    falls back with one BackendFallbackWarning that lists every reason.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 4, 2, 8))
    >>> attention(x, x, x, is_causal=True).shape
    (1, 4, 2, 8)
    """
    layout = Layout(
        query_segment_ids=_as_array(query_segment_ids),
        key_value_segment_ids=_as_array(key_value_segment_ids),
        query_positions=_as_array(query_positions),
        key_value_positions=_as_array(key_value_positions),
        key_value_seq_lengths=_as_array(key_value_seq_lengths),
        mask=_as_array(mask),
    )
    terms = Terms(bias=_as_array(bias))
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    spec = make_spec(
        query,
        key,
        value,
        layout,
        terms,
        is_causal=is_causal,
        scale=_as_float(scale),
        local_window_size=local_window_size,
        chunk_size=chunk_size,
        logits_soft_cap=logits_soft_cap,
        needs_grad=needs_grad,
    )
    resolution = resolve(backend, spec, mode=mode, on_unavailable=on_unavailable, options=backend_options)
    return resolution.plan(layout, backend_options).run(query, key, value, terms=terms)[0]


def dot_product_attention(
    query: Float[Array, "*batch q_len heads head_dim"],
    key: Float[Array, "*batch kv_len kv_heads head_dim"],
    value: Float[Array, "*batch kv_len kv_heads head_dim"],
    bias: Float[Array, "#batch #heads #q_len #kv_len"] | None = None,
    mask: Bool[Array, "#batch #heads #q_len #kv_len"] | None = None,
    *,
    scale: Scale | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, " batch"] | None = None,
    key_value_seq_lengths: Int[Array, " batch"] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    backend: str = "auto",
) -> Float[Array, "*batch q_len heads head_dim"]:
    """``jax.nn.dot_product_attention`` with a choice of backend: same arguments, same meaning, 3-D input too.

    Where JAX leaves rows beyond ``query_seq_lengths`` or rows without a visible key unspecified, they are zero here.
    """
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    unbatched = query.ndim == 3
    if unbatched:
        query, key, value = query[None], key[None], value[None]
    lengths = None if key_value_seq_lengths is None else jnp.atleast_1d(key_value_seq_lengths)
    out = attention(
        query,
        key,
        value,
        bias=_as_4d(bias),
        mask=_as_4d(mask),
        scale=scale,
        is_causal=is_causal,
        key_value_seq_lengths=lengths,
        local_window_size=local_window_size,
        backend=backend,
    )
    if query_seq_lengths is not None:
        valid = jnp.arange(query.shape[1])[None] < jnp.atleast_1d(query_seq_lengths)[:, None]
        out = jnp.where(valid[:, :, None, None], out, jnp.zeros((), out.dtype))
    return out[0] if unbatched else out


def _as_float(scale: Any) -> Any:
    """The number in a scalar array; the spec checks what it is."""
    if isinstance(scale, Tracer):
        raise ValueError(  # noqa: TRY004 (of the right type, but not known yet)
            "scale is traced by jax.jit, jax.grad or jax.vmap, and has to be known when the program is compiled; give "
            "a Python float such as head_dim ** -0.5 (jnp.sqrt is traced inside jit, math.sqrt is not), or None for "
            "1/sqrt(head_dim)."
        )
    if isinstance(scale, jax.Array | np.ndarray | np.generic):
        if scale.ndim:
            raise ValueError(f"scale has shape {scale.shape}; expected one number.")
        return scale.item()
    return scale


def _as_array(x: Any) -> Array | None:
    return None if x is None else jnp.asarray(x)


def _as_4d(x: Any) -> Array | None:
    if x is None:
        return None
    x = jnp.asarray(x)
    return x[(None,) * (4 - x.ndim)] if x.ndim < 4 else x
