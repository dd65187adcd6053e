"""One attention call: plan and run together.

:func:`attention` is the public call. :func:`dot_product_attention` has the signature of JAX's function.
``flax_attention.py`` makes functions for flax's layers. A model with many layers resolves and plans once instead; see
``models/transformer.py``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Num

from .choices import AnyPolicy
from .contract import Carry
from .derivatives import forward_mode_explained
from .features import Mode
from .layer_stack import LayerStack, Number, StackedLayer, check_layer
from .layout import Layout, as_array, check_layout, check_result, known, make_spec
from .manual_axes import varying
from .masks import MaskFunction
from .operands import EitherArray, Terms
from .resolve import OnUnavailable, Resolution, resolve
from .scores import ScoreFunction
from .sharding import shares

Scale = float | Num[Array, ""] | Num[np.ndarray, ""] | np.number  # known when the program is compiled

_IMPLEMENTATIONS = {"xla": "standard", "cudnn": "cudnn"}  # JAX's names -> backends


class _Options(TypedDict, total=False):
    """The keywords of :func:`attention` that do not decide what the result is."""

    value_head_dim: int | None
    kv_layout: str
    is_causal: bool
    scale: Scale | None
    local_window_size: int | tuple[int, int] | None
    chunk_size: int | None
    mask_function: MaskFunction | None
    score_function: ScoreFunction | None
    logits_soft_cap: float | None
    query_segment_ids: EitherArray | None
    key_value_segment_ids: EitherArray | None
    query_positions: EitherArray | None
    key_value_positions: EitherArray | None
    key_value_seq_lengths: EitherArray | None
    page_table: EitherArray | None
    mask: EitherArray | None
    bias: EitherArray | None
    sinks: EitherArray | None
    alibi: EitherArray | None
    key_scales: EitherArray | None
    value_scales: EitherArray | None
    backend: str
    mode: Mode
    on_unavailable: OnUnavailable
    needs_grad: bool
    backend_options: Mapping[str, Any] | None
    policy: AnyPolicy | None
    isolate: bool
    layer: LayerStack | StackedLayer | None


@overload
def attention(
    query: EitherArray,
    key: EitherArray,
    value: EitherArray | None,
    *,
    return_log_sum_exp: Literal[False] = ...,
    **options: Unpack[_Options],
) -> Array: ...


@overload
def attention(
    query: EitherArray,
    key: EitherArray,
    value: EitherArray | None,
    *,
    return_log_sum_exp: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Array, Array]: ...


def attention(
    query: Float[EitherArray, "batch q_len heads head_dim"],
    key: Num[EitherArray, "rows slots kv_heads head_dim"],
    value: Num[EitherArray, "rows slots kv_heads v_dim"] | None,
    *,
    value_head_dim: int | None = None,
    kv_layout: str = "NHD",
    is_causal: bool = False,
    scale: Scale | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    chunk_size: int | None = None,
    mask_function: MaskFunction | None = None,
    score_function: ScoreFunction | None = None,
    logits_soft_cap: float | None = None,
    query_segment_ids: Int[EitherArray, "batch q_len"] | None = None,
    key_value_segment_ids: Int[EitherArray, "batch kv_len"] | None = None,
    query_positions: Int[EitherArray, "batch q_len"] | None = None,
    key_value_positions: Int[EitherArray, "batch kv_len"] | None = None,
    key_value_seq_lengths: Int[EitherArray, " batch"] | None = None,
    page_table: Int[EitherArray, "batch pages_per_sequence"] | None = None,
    mask: Bool[EitherArray, "#batch #heads #q_len #kv_len"] | None = None,
    bias: Float[EitherArray, "#batch #heads #q_len #kv_len"] | None = None,
    sinks: Float[EitherArray, " heads"] | None = None,
    alibi: Float[EitherArray, " heads"] | None = None,
    key_scales: Float[EitherArray, "#rows #slots #kv_heads"] | None = None,
    value_scales: Float[EitherArray, "#rows #slots #kv_heads"] | None = None,
    backend: str = "auto",
    mode: Mode = "native",
    on_unavailable: OnUnavailable = "fallback",
    needs_grad: bool = True,
    return_log_sum_exp: bool = False,
    backend_options: Mapping[str, Any] | None = None,
    policy: AnyPolicy | None = None,
    isolate: bool = False,
    layer: LayerStack | StackedLayer | None = None,
) -> (
    Float[Array, "batch q_len heads v_dim"]
    | tuple[Float[Array, "batch q_len heads v_dim"], Float[Array, "batch q_len heads"]]
):
    """Attention through a registered backend; semantics as :mod:`attnsuite.backends.contract` says.

    Inputs share one dtype (float32, bfloat16 or float16), which is also the output's; ``heads`` is a
    multiple of ``kv_heads``. ``mask_function`` decides by positions (:mod:`attnsuite.backends.masks`);
    ``score_function`` changes each score by its head and positions (:mod:`attnsuite.backends.scores`).
    ``scale`` (None: ``1/sqrt(head_dim)``) and ``logits_soft_cap`` are at most 1e6.
    ``bias`` may have axes of 1; ``sinks`` and ``alibi`` are a learned number per query head.
    The result is ``[batch, q_len, heads, v_dim]``. With ``return_log_sum_exp`` it is the pair of this output and the
    log-sum-exp of each row's visible logits, float32 ``[batch, q_len, heads]``, which has a gradient and is ``-inf``
    where a row sees nothing; :func:`merge_parts` puts such pairs together.
    ``kv_layout="HND"`` says that keys and values, pages and scales have the heads before the slots, ``[batch, kv_heads,
    kv_len, dim]``.
    With ``page_table`` key and value are pages ``[num_pages, page_size, kv_heads, dim]``; int8 and float8 keys and
    values come with their scales (:class:`Layout`, :class:`Terms`; ``needs_grad=False`` for both).
    ``value=None`` with ``value_head_dim=r`` says that the first ``r`` numbers of each key are its value, as in
    multi-head latent attention; nothing cuts them out, so that no copy of the keys is made.
    ``mode="interpret"`` runs a kernel backend's own kernel in an interpreter, for
    verification. ``needs_grad=False`` admits backends that have no backward pass. ``policy`` is a file that ``attnsuite
    choose`` or ``tune`` wrote, whose backends and options ``auto`` takes (default: ``$ATTNSUITE_POLICY``).
    ``isolate=True`` sets keys and values behind the lengths and in padding to zero first, for a backend that would let
    NaN there reach other rows. ``layer`` is one of a :class:`LayerStack`, for a backend whose layers hand something on
    (``kascade`` with a schedule).
    Outside of ``jit`` a call runs one program, which is compiled once for each problem. Raises ValueError for
    shapes, dtypes and options that do not fit, UnknownBackendError for a name nobody registered, and
    BackendUnavailableError where ``on_unavailable="raise"`` and the backend refuses; otherwise a refusal
    falls back with one BackendFallbackWarning that lists every reason.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 4, 2, 8))
    >>> attention(x, x, x, is_causal=True).shape
    (1, 4, 2, 8)
    """
    layout = Layout(
        query_segment_ids=known("query_segment_ids", query_segment_ids),
        key_value_segment_ids=known("key_value_segment_ids", key_value_segment_ids),
        query_positions=known("query_positions", query_positions),
        key_value_positions=known("key_value_positions", key_value_positions),
        key_value_seq_lengths=known("key_value_seq_lengths", key_value_seq_lengths),
        page_table=known("page_table", page_table),
        mask=as_array("mask", mask),
    )
    return _attend(
        query,
        key,
        value,
        layout,
        Terms(
            bias=as_array("bias", bias),
            sinks=as_array("sinks", sinks),
            alibi=as_array("alibi", alibi),
            key_scales=as_array("key_scales", key_scales),
            value_scales=as_array("value_scales", value_scales),
        ),
        backend,
        {"mode": mode, "on_unavailable": on_unavailable, "options": backend_options, "policy": policy},
        isolate=isolate,
        layer=layer,
        value_head_dim=value_head_dim,
        kv_layout=kv_layout,
        is_causal=is_causal,
        scale=scale,
        local_window_size=local_window_size,
        chunk_size=chunk_size,
        mask_function=mask_function,
        score_function=score_function,
        logits_soft_cap=logits_soft_cap,
        needs_grad=needs_grad,
        return_log_sum_exp=return_log_sum_exp,
    )


@overload
def dot_product_attention(
    query: EitherArray,
    key: EitherArray,
    value: EitherArray,
    bias: EitherArray | None = None,
    mask: EitherArray | None = None,
    *,
    scale: Scale | None = None,
    is_causal: bool = False,
    query_seq_lengths: EitherArray | None = None,
    key_value_seq_lengths: EitherArray | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: Literal[False] = ...,
    backend: str = "auto",
) -> Array: ...


@overload
def dot_product_attention(
    query: EitherArray,
    key: EitherArray,
    value: EitherArray,
    bias: EitherArray | None = None,
    mask: EitherArray | None = None,
    *,
    scale: Scale | None = None,
    is_causal: bool = False,
    query_seq_lengths: EitherArray | None = None,
    key_value_seq_lengths: EitherArray | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: Literal[True],
    backend: str = "auto",
) -> tuple[Array, Array]: ...


def dot_product_attention(
    query: Float[EitherArray, "*batch q_len heads head_dim"],
    key: Float[EitherArray, "*batch kv_len kv_heads head_dim"],
    value: Float[EitherArray, "*batch kv_len kv_heads v_dim"],
    bias: Float[EitherArray, "..."] | None = None,
    mask: Bool[EitherArray, "..."] | None = None,
    *,
    scale: Scale | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[EitherArray, " batch"] | None = None,
    key_value_seq_lengths: Int[EitherArray, " batch"] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
    backend: str = "auto",
) -> (
    Float[Array, "*batch q_len heads v_dim"]
    | tuple[Float[Array, "*batch q_len heads v_dim"], Float[Array, "*batch q_len heads"]]
):
    """``jax.nn.dot_product_attention`` with a choice of backend: same arguments, same meaning.

    Without a batch axis the lengths have shape ``(1,)``; ``bias`` and ``mask`` broadcast to
    ``[batch, heads, q_len, kv_len]`` and may lack leading axes. ``implementation`` is JAX's way to choose: "xla" is the
    backend ``standard``, "cudnn" is ``cudnn``, and one that cannot run is an error, as in JAX; with ``backend`` a
    refusal falls back with a warning. ``return_residual`` adds the log-sum-exp of each row's visible logits, in the
    inputs' dtype and without a gradient, as in JAX.

    Rows beyond ``query_seq_lengths`` are zero, whatever the query holds there, and so is a row with no visible key,
    where JAX averages all values; the log-sum-exp of both is ``-inf``. Raises what :func:`attention` raises (also for
    an axis of size zero, which JAX takes), and ValueError where both ``implementation`` and ``backend`` are given.
    """
    request = {}
    if implementation is not None:
        backend, request = _named(implementation, backend), {"on_unavailable": "raise"}
    unbatched = np.ndim(query) == 3
    query, key, value = _as_4d("query", query, 3), _as_4d("key", key, 3), _as_4d("value", value, 3)
    visible = None
    if query_seq_lengths is not None:
        visible = _leading(query.shape, jnp.asarray(query_seq_lengths))
        query = jnp.where(visible[..., None], query, jnp.zeros((), query.dtype))
    result = _attend(
        query,
        key,
        value,
        Layout(mask=_as_4d("mask", mask), key_value_seq_lengths=known("key_value_seq_lengths", key_value_seq_lengths)),
        Terms(bias=_as_4d("bias", bias)),
        backend,
        request,
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        return_log_sum_exp=bool(return_residual),
    )
    out, log_sum_exp = result if return_residual else (result, None)
    if visible is not None:
        out = jnp.where(visible[..., None], out, jnp.zeros((), out.dtype))
    out = out[0] if unbatched else out
    if log_sum_exp is None:
        return out
    if visible is not None:
        log_sum_exp = jnp.where(visible, log_sum_exp, -jnp.inf)
    residual = lax.stop_gradient(log_sum_exp).astype(out.dtype)
    return out, residual[0] if unbatched else residual


def _attend(
    query: Any,
    key: Any,
    value: Any,
    layout: Layout,
    terms: Terms,
    backend: str,
    request: Mapping[str, Any],
    *,
    scale: Any,
    isolate: bool = False,
    layer: LayerStack | StackedLayer | None = None,
    **options: Any,
) -> Any:
    """Spec and resolution of one call, and its program: compiled once, however often and from wherever it is called.

    ``request`` are the other arguments of :func:`resolve`.
    """
    check_layer(layer)
    query, key, value = as_array("query", query), as_array("key", key), as_array("value", value)
    spec = make_spec(query, key, value, layout, terms, scale=_as_float(scale), **options)
    asked = resolve(backend, spec, **request)
    # Equal programs are one, whatever was asked for and refused before.
    same: dict[str, Any] = {"requested": asked.backend.name, "rejections": (), "policy": ""}
    resolution = dataclasses.replace(asked, backend=shares(asked, query, key, value), **same)
    operands = (query, key, value, check_layout(spec, layout), terms)

    def call(number: Number | None, carry: Carry) -> tuple[Any, Carry]:
        known, traced = (None, number) if isinstance(number, jax.Array) else (number, None)
        program = _Program(resolution, isolate, known, None if layer is None else layer.num_layers)
        try:
            hash(program)
        except TypeError:  # an option's value that cannot name a program
            return program(*operands, traced, carry)
        with forward_mode_explained():
            return _compiled(*operands, traced, carry, program=program)

    if layer is not None:
        return layer.attend(call)
    return call(None, ())[0]


@dataclasses.dataclass(frozen=True, slots=True)
class _Program:
    """What one call computes: all that is known when it is compiled. The backend has accepted it."""

    resolution: Resolution
    isolate: bool
    layer: int | None = None
    stacked: int | None = None  # the layers of the caller's stack

    def __call__(
        self,
        query: Array,
        key: Array,
        value: Array | None,
        layout: Layout,
        terms: Terms,
        layer: Array | None,
        carry: Carry,
    ) -> tuple[Any, Carry]:
        query = varying(query, layout)  # Plan.run sees no layout
        made = self.resolution.plan(layout, isolate=self.isolate)
        if None not in (self.stacked, made.num_layers) and self.stacked != made.num_layers:
            raise ValueError(
                f"the LayerStack has {self.stacked} layers and the schedule {made.num_layers}; make them of one number."
            )
        found = made.run(query, key, value, terms=terms, layer=self.layer if layer is None else layer, carry=carry)
        check_result(self.resolution.backend.name, self.resolution.spec, found[0])
        return found


@functools.partial(jax.jit, static_argnames="program")
def _compiled(*operands: Any, program: _Program) -> tuple[Any, Carry]:
    """A program of its own where the caller compiles nothing; equal layers of a caller's program are traced once."""
    return program(*operands)


def _named(implementation: str, backend: str) -> str:
    """The backend that JAX's ``implementation`` names."""
    if backend != "auto":
        raise ValueError(
            f"implementation={implementation!r} and backend={backend!r} both say what is to run; give one of them."
        )
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r} is not one of JAX's ({', '.join(map(repr, _IMPLEMENTATIONS))} or "
            f"None); a backend of this package is named by backend={implementation!r}."
        )
    return _IMPLEMENTATIONS[implementation]


def _leading(shape: tuple[int, ...], lengths: Array) -> Bool[Array, "batch q_len 1"]:
    """True for the rows of queries of that shape that lie within the lengths."""
    if lengths.shape != shape[:1] or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"query_seq_lengths has shape {lengths.shape} and dtype {lengths.dtype}; expected {shape[:1]} and an "
            "integer dtype."
        )
    return (jnp.arange(shape[1])[None, :] < lengths[:, None])[..., None]


def _as_float(scale: Any) -> Any:
    """The number in a scalar array; the spec checks what it is."""
    if isinstance(scale, Tracer):
        raise ValueError(  # noqa: TRY004 (of the right type, but traced)
            "scale is traced by jax.jit, jax.grad or jax.vmap, and has to be known when the program is compiled; give "
            "a Python float such as head_dim ** -0.5 (jnp.sqrt is traced inside jit, math.sqrt is not), or None for "
            "1/sqrt(head_dim)."
        )
    if isinstance(scale, jax.Array | np.ndarray | np.generic):
        if scale.ndim:
            raise ValueError(f"scale has shape {scale.shape}; expected one number.")
        return scale.item()
    return scale


def _as_4d(name: str, x: Any, least: int = 0) -> Any:
    """The array with axes of size one in front, up to four, as JAX accepts it."""
    if x is None:
        return None
    x = as_array(name, x)
    if not least <= x.ndim <= 4:
        raise ValueError(
            f"{name} has shape {x.shape}; expected {f'{least} or 4' if least else 'at most 4'} dimensions."
        )
    return x.reshape((1,) * (4 - x.ndim) + x.shape)
