"""The contract of every attention backend: what it computes, and its interface.

The semantics are those of ``jax.nn.dot_product_attention`` with the gaps closed:

- A query row that may attend to nothing gives exactly zero, and zero gradients.
- A negative segment id is padding: it matches nothing, not even other padding.
- Softmax and accumulation are float32 whatever the input dtype.
- ``local_window_size=(left, right)`` counts the keys beside the query's own: a row sees at most
  ``left + 1 + right`` keys. A model whose ``sliding_window`` counts the token itself gives ``(sliding_window - 1, 0)``.
- Keys and values that a query may not see change nothing, as long as they are finite. NaN and infinity in slots behind
  the length, in padding and in other documents are kept out by ``standard``, ``chunked``, ``flash_cpu`` and ``kascade``
  on a CPU, forward and backward. In later keys of a causal mask, a window or a mask array ``standard`` and decode steps
  of ``chunked`` do not keep them out: that would take one more pass over the values. Of other kernels it is measured
  (``attnsuite judge``); ``isolate=True`` zeroes what lengths and padding hide before any backend runs.
- A length above the number of slots means all of them.
- A mask function decides by the positions of a query and a key, beside all other masks (``masks.py``).
- A score function changes each scaled and capped score by its head and positions (``scores.py``).
- ALiBi subtracts a head's slope times the distance of the two positions, ``|query - key|``, after the score function.
- A sink is one more logit of every row of its head, without a value: it takes weight from the keys.
- The log-sum-exp of a row is that of its visible logits (scaled, capped, with the bias) and of its sink, float32.
  Without a sink it is ``-inf`` where the row sees nothing. It has a gradient.
- Keys and values of a paged cache are pages, which a page table deals to the sequences. A slot is read only if a query
  sees it; a visible slot whose page is not in the pool gives NaN.
- Quantised keys and values (``kv_dtype``) stand for ``number * scale``. A cache, paged or quantised, has no gradient.
- With ``values_in_keys`` there is no array of values: a key's value is its first ``value_head_dim`` numbers, and the
  gradient of the keys is that of both.
- A backend refuses a problem that it cannot compute before anything is traced (``features.py``, ``support.py``).

``oracle.py`` computes these semantics in float64; ``attnsuite.testing`` tests every backend against them.

An :class:`AttentionSpec` holds everything static, a :class:`Layout` the arrays that follow from the tokens (once per
forward pass), and :class:`Terms` the learned operands (per layer). A caller plans once per forward pass and runs the
plan in each layer; the words ``plan`` and ``run`` are FlashInfer's (arXiv 2501.01005).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num

from . import masks, scores
from .derivatives import forward_mode_explained
from .features import DTYPES, KV_DTYPES, KV_LAYOUTS, Feature, Mode, asked
from .manual_axes import varying
from .operands import check_operands, check_terms

if TYPE_CHECKING:
    from .devices import Target

EitherArray = Array | np.ndarray  # a JAX or a NumPy array
Carry = Any  # a pytree threaded from layer to layer: () for every backend that keeps nothing between layers


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """One attention problem: everything about it that is known before there is data. Static and hashable.

    ``query [batch, query_length, num_heads, head_dim]``, ``key [batch, key_value_length, num_kv_heads, head_dim]``,
    ``value [batch, key_value_length, num_kv_heads, value_head_dim]``; query head ``n`` reads KV head
    ``n // (num_heads // num_kv_heads)``. ``scale=None`` means ``1/sqrt(head_dim)``; ``value_head_dim=None`` means
    ``head_dim``; ``local_window_size=w`` means ``(w, w)``: a query at position p sees key positions p-left to p+right,
    both included. The ``has_*`` fields say which arrays a :class:`Layout` brings, and which :class:`Terms` do.
    With ``return_log_sum_exp`` a plan gives ``(output, log_sum_exp)`` for its output.

    With ``page_size``, key and value are pages ``[num_pages, page_size, num_kv_heads, dim]``, the layout brings a page
    table, and ``key_value_length`` is ``pages_per_sequence * page_size``. With ``kv_dtype`` ("int8" or "float8_e4m3fn")
    they are of that dtype, and the terms bring their scales. With ``values_in_keys`` the value is None: the first
    ``value_head_dim`` numbers of each key are its value. With ``kv_layout="HND"`` keys, values and scales have heads
    before slots: ``[batch, num_kv_heads, key_value_length, dim]``, ``[num_pages, num_kv_heads, page_size, dim]``.
    Raises ValueError naming the field, what was given and what is accepted.

    >>> spec = AttentionSpec(batch=1, query_length=8, key_value_length=8, num_heads=4, num_kv_heads=2,
    ...                      head_dim=64, is_causal=True)
    >>> spec.group_size, spec.softmax_scale
    (2, 0.125)
    """

    batch: int
    query_length: int
    key_value_length: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int | None = None
    dtype: str = "float32"
    scale: float | None = None
    is_causal: bool = False
    local_window_size: int | tuple[int, int] | None = None
    chunk_size: int | None = None
    mask_function: masks.MaskFunction | None = None
    score_function: scores.ScoreFunction | None = None
    logits_soft_cap: float | None = None
    has_segment_ids: bool = False
    has_positions: bool = False
    has_seq_lengths: bool = False
    has_mask: bool = False
    has_bias: bool = False
    has_sinks: bool = False
    has_alibi: bool = False
    needs_grad: bool = True
    return_log_sum_exp: bool = False
    num_pages: int | None = None
    page_size: int | None = None
    kv_dtype: str | None = None
    values_in_keys: bool = False
    kv_layout: str = "NHD"

    def __post_init__(self) -> None:
        if self.value_head_dim is None:
            object.__setattr__(self, "value_head_dim", self.head_dim)
        if isinstance(self.local_window_size, int) and not isinstance(self.local_window_size, bool):
            object.__setattr__(self, "local_window_size", (self.local_window_size, self.local_window_size))
        for name in (
            "batch",
            "query_length",
            "key_value_length",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "value_head_dim",
        ):
            _require_positive_int(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}; "
                "each KV head serves the same number of query heads."
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} is not supported; use one of {', '.join(DTYPES)}.")
        if self.chunk_size is not None:
            _require_positive_int("chunk_size", self.chunk_size)
        if self.local_window_size is not None and not _is_window(self.local_window_size):
            raise ValueError(
                f"local_window_size={self.local_window_size!r} must be an int from 0 to 2**30, or a pair (left, right)."
            )
        masks.check(self.mask_function)
        scores.check(self.score_function)
        for name in ("scale", "logits_soft_cap"):
            value = getattr(self, name)
            if value is not None and not (_is_real(value) and math.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value!r} must be a finite Python float above 0, or None.")
        _check_keys_and_values(self)
        for field in dataclasses.fields(self):
            if field.type == "bool" and not isinstance(getattr(self, field.name), bool):
                raise ValueError(f"{field.name}={getattr(self, field.name)!r} must be True or False.")

    def features(self) -> frozenset[Feature]:
        """The features that the spec asks for beyond plain attention, by the names that a backend declares."""
        return asked(self)

    @property
    def group_size(self) -> int:
        """Query heads per KV head (1: multi-head; num_heads: multi-query)."""
        return self.num_heads // self.num_kv_heads

    @property
    def softmax_scale(self) -> float:
        """The factor on the logits."""
        return self.head_dim**-0.5 if self.scale is None else float(self.scale)

    @property
    def window(self) -> tuple[int, int] | None:
        """``local_window_size`` as (left, right)."""
        return self.local_window_size  # pyright: ignore[reportReturnType]  (normalised in __post_init__)

    @property
    def positional_mask(self) -> masks.Mask | None:
        """What restricts positions, as one value: causality, window, chunks and the mask function; None without any."""
        window, chunk, function = self.window, self.chunk_size, self.mask_function
        parts = (
            masks.Causal() if self.is_causal else None,
            None if window is None else masks.Window(*window),
            None if chunk is None else masks.Chunk(chunk),
            function if function is None or isinstance(function, masks.Mask) else masks.Where(function),
        )
        return functools.reduce(operator.and_, found) if (found := [x for x in parts if x is not None]) else None

    @property
    def announced_terms(self) -> frozenset[str]:
        """The names of the :class:`Terms` that come with each layer."""
        scales = () if self.kv_dtype is None else ("key_scales", "value_scales")[: 1 if self.values_in_keys else 2]
        return frozenset({*scales, *(name for name in ("bias", "sinks", "alibi") if getattr(self, f"has_{name}"))})

    @property
    def masks_anything(self) -> bool:
        """Whether any query-key pair could be masked."""
        return bool(self.positional_mask is not None or self.has_segment_ids or self.has_seq_lengths or self.has_mask)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The arrays that, with the spec, decide which query attends to which key in a batch.

    All int32. A row with a negative segment id is padding. ``None`` positions mean ``arange`` on both sides.
    ``key_value_seq_lengths`` counts the leading valid slots of each key sequence. ``mask`` (True: may attend)
    broadcasts to ``[batch, heads, query, key]``; most kernels refuse it. Slot ``s`` of sequence ``b`` in a paged cache
    is slot ``s % page_size`` of page ``page_table[b, s // page_size]``. Entries whose slots nobody sees may hold
    anything. ``kv_cache.ragged_layout`` makes the layout of a ragged batch.
    """

    query_segment_ids: Int[EitherArray, "batch q_len"] | None = None
    key_value_segment_ids: Int[EitherArray, "batch kv_len"] | None = None
    query_positions: Int[EitherArray, "batch q_len"] | None = None
    key_value_positions: Int[EitherArray, "batch kv_len"] | None = None
    key_value_seq_lengths: Int[EitherArray, " batch"] | None = None
    mask: Bool[EitherArray, "#batch #heads #q_len #kv_len"] | None = None
    page_table: Int[EitherArray, "batch pages_per_sequence"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Operands of one layer beside query, key and value: what is learned, and the scales of a quantised cache.

    ``bias`` is added to the logits, after the scale, the soft cap and the score function. ``sinks`` holds a finite
    logit per query head (neither scaled nor capped), which enters the softmax of each of its rows as a key with a value
    of zero would. ``alibi`` holds a slope per query head (ALiBi, arXiv 2108.12409): each logit loses the slope times
    the distance of its positions. The spec announces a term ``x`` of these by ``has_x``.

    ``key_scales`` and ``value_scales`` are the factors of keys and values with ``kv_dtype``, float32. They broadcast to
    keys and values without ``head_dim``: per slot and KV head, or with axes of size one per page and head, per head, or
    one for all.
    """

    bias: Float[EitherArray, "#batch #heads #q_len #kv_len"] | None = None
    sinks: Float[EitherArray, " heads"] | None = None
    alibi: Float[EitherArray, " heads"] | None = None
    key_scales: Float[EitherArray, "#rows #slots #kv_heads"] | None = None
    value_scales: Float[EitherArray, "#rows #slots #kv_heads"] | None = None

    def given(self) -> tuple[str, ...]:
        """The names of the terms that are not None."""
        return tuple(field.name for field in dataclasses.fields(self) if getattr(self, field.name) is not None)


NO_TERMS = Terms()


@dataclasses.dataclass(frozen=True, slots=True)
class Support:
    """Whether a backend takes a spec: true, or false with one sentence for every reason."""

    reasons: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not self.reasons


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A backend's preparation of one forward pass: made once, run by every layer.

    ``attend(query, key, value, layer, carry)`` returns the output and the carry for the next layer; ``layer`` is None
    where a run names none, and traced in a scan over layers. If the spec asks for terms, ``attend`` takes
    :class:`Terms` as a sixth argument. If it asks for the log-sum-exp, the output is the pair ``(output,
    log_sum_exp)``. ``notes`` are sentences that a reader of the result must know (an approximate backend that decided
    to run dense says so here). ``spec`` is the planned problem; :func:`attnsuite.backends.plan` adds it.
    ``num_layers``: how many layers have a role of their own, so that a run which names no layer is an error; None where
    all are alike.
    """

    attend: Callable[..., tuple[Any, Carry]]
    notes: tuple[str, ...] = ()
    spec: AttentionSpec | None = None
    num_layers: int | None = None

    def run(
        self,
        query: Float[Array, "batch q_len heads head_dim"],
        key: Num[Array, "rows slots kv_heads head_dim"],
        value: Num[Array, "rows slots kv_heads v_dim"] | None,
        *,
        terms: Terms = NO_TERMS,
        layer: int | Array | None = None,
        carry: Carry = (),
    ) -> tuple[Any, Carry]:
        """Attend in one layer; returns the output and the carry for the next layer.

        ``value`` is None where the spec has ``values_in_keys``. The output is ``[batch, q_len, heads, v_dim]`` in the
        query's dtype. If the spec asks for the log-sum-exp, the result is the pair of the output and a float32 array
        ``[batch, q_len, heads]``. Raises ValueError for terms that the spec does not announce, for announced terms that
        are missing, for arrays that do not match the spec, and without ``layer`` where the plan needs it.
        """
        if layer is None and self.num_layers is not None:
            raise ValueError(_NO_LAYER)
        if self.spec is not None:
            check_operands(self.spec, query, key, value)
        query, key, value, terms = varying((query, key, value, terms), (query, key, value, terms))
        given = (terms,) if check_terms(self.spec, terms) else ()
        with forward_mode_explained():
            return self.attend(query, key, value, layer, carry, *given)


_NO_LAYER = (
    "this plan gives each layer its role by a schedule, and the call names no layer; a layer 0 that is dense would run "
    "in every place. In a model of your own plan once and run each layer, out, carry = plan.run(query, key, value, "
    "layer=i, carry=carry). In another library's, stack = backends.LayerStack(num_layers), give layer=stack[i] (or "
    "layer=stack) to backends.attention, attention_fn or the adapter, and call the model by stack.run(model, x). "
    "Without the schedule every layer selects for itself."
)


@runtime_checkable
class Backend(Protocol):
    """One implementation of the contract, hashable.

    Two more methods say what the backend takes. ``takes(target, mode) -> Takes`` is its allow-list.
    ``refuses(spec, target, mode, options)`` is optional: it returns the reasons that an allow-list cannot express, one
    sentence each. Callers use :func:`attnsuite.backends.support`, which judges by both, and
    :func:`attnsuite.backends.plan`.
    """

    @property
    def name(self) -> str:
        """The name by which users ask for it."""
        ...

    @property
    def exact(self) -> bool:
        """Whether every visible pair is computed; False for approximations (sparse attention)."""
        ...

    def plan(
        self,
        spec: AttentionSpec,
        layout: Layout,
        *,
        target: Target,
        mode: Mode = "native",
        options: Mapping[str, Any] | None = None,
    ) -> Plan:
        """Prepare one forward pass for ``target``. Raises ValueError for an option that the backend does not have."""
        ...


@runtime_checkable
class BackendWithRoles(Backend, Protocol):
    """A backend whose layers have different roles, so that a single call shows only one of them."""

    def roles(self, spec: AttentionSpec) -> Mapping[str, tuple[Mapping[str, Any], int]]:
        """Maps a role to the options to plan with and to the index of a layer that has this role.

        A layer after another one takes the carry that the layer before it returned.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Attention to a part of the keys, in a form that can be merged with other parts: used by a ring of devices.

    ``forward(query, key, value)`` returns ``(out, top, rest)``: the output over this part, and the log-sum-exp of its
    scores as ``top + rest``, each ``[batch, q_len, heads]``, all float32. If ``top`` is the largest score, ``rest``
    keeps its low bits when logits are large. A kernel that has only the sum returns it as ``top``, with a ``rest`` of
    zero. A row that sees nothing here has an output of zero and a ``top`` of :data:`NOTHING_SEEN`.
    ``backward(query, key, value, out, top, rest, d_out)`` takes output and log-sum-exp over *all* keys. It returns this
    part's contribution to dq, and its dk and dv, float32.
    """

    forward: Callable[..., tuple[Array, Array, Array]]
    backward: Callable[..., tuple[Array, Array, Array]]


NOTHING_SEEN = -1e30  # finite, so that merging parts gives no NaN


@runtime_checkable
class PartBackend(Backend, Protocol):
    """A backend with ``parts`` in its ``takes``: it can attend to some of the keys and return their log-sum-exp."""

    def part(
        self,
        spec: AttentionSpec,
        layout: Layout,
        *,
        target: Target,
        mode: Mode = "native",
        options: Mapping[str, Any] | None = None,
    ) -> Part:
        """As :meth:`Backend.plan`, for a spec whose keys are one part of all."""
        ...


def positions(spec: AttentionSpec, layout: Layout) -> tuple[Array | np.ndarray, Array | np.ndarray]:
    """Query and key positions ``[batch or 1, length]``, with the default ``arange`` filled in."""
    q, k = layout.query_positions, layout.key_value_positions
    return (
        np.arange(spec.query_length, dtype=np.int32)[None] if q is None else q,
        np.arange(spec.key_value_length, dtype=np.int32)[None] if k is None else k,
    )


def modified(spec: AttentionSpec, layout: Layout, logits: Float[Array, "b k g t s"]) -> Float[Array, "b k g t s"]:
    """What the score function makes of all logits of a call, head ``k * group_size + g``; quadratic, as they are."""
    if spec.score_function is None:
        return logits
    batch, head = (jnp.arange(n, dtype=jnp.int32) for n in (spec.batch, spec.num_heads))
    batch, head = batch.reshape(-1, 1, 1, 1, 1), head.reshape(1, spec.num_kv_heads, -1, 1, 1)
    q_pos, k_pos = (jnp.asarray(x)[:, None, None] for x in positions(spec, layout))
    return spec.score_function(logits, batch, head, q_pos[..., None], k_pos[..., None, :])


def distances(spec: AttentionSpec, layout: Layout) -> Int[Array, "#batch q_len kv_len"]:
    """How far apart each query and key are, by their positions. Quadratic: for references and short input."""
    q_pos, k_pos = (jnp.asarray(x) for x in positions(spec, layout))
    return jnp.abs(q_pos[:, :, None] - k_pos[:, None, :])


def may_attend(spec: AttentionSpec, layout: Layout) -> Bool[Array, "#batch #heads q_len kv_len"] | None:
    """The whole mask of a call, or None where every pair may attend. Quadratic: for references and short input."""
    if not spec.masks_anything:
        return None
    q_pos, k_pos = (jnp.asarray(x) for x in positions(spec, layout))  # traced, not a quadratic constant of the program
    q_pos, k_pos = q_pos[:, None, :, None], k_pos[:, None, None, :]
    terms: list[Any] = [jnp.ones((1, 1, spec.query_length, spec.key_value_length), bool)]
    if spec.positional_mask is not None:
        terms.append(spec.positional_mask(q_pos, k_pos))
    if layout.query_segment_ids is not None and layout.key_value_segment_ids is not None:
        q_seg, k_seg = layout.query_segment_ids[:, None, :, None], layout.key_value_segment_ids[:, None, None, :]
        terms.append((q_seg == k_seg) & (q_seg >= 0))
    if layout.key_value_seq_lengths is not None:
        slots = jnp.arange(spec.key_value_length)[None, None, None]
        terms.append(slots < layout.key_value_seq_lengths[:, None, None, None])
    if layout.mask is not None:
        terms.append(layout.mask)
    mask = terms[0]
    for term in terms[1:]:
        mask = mask & term
    return mask


def check_options(
    backend: str,
    options: Mapping[str, Any] | None,
    accepted: Mapping[str, str],
) -> dict[str, Any]:
    """The options as a dict. Raises ValueError for a name that the backend does not have, listing those that it has."""
    given = dict(options or {})
    unknown = sorted(set(given) - set(accepted))
    if unknown:
        have = "; ".join(f"{name}: {meaning}" for name, meaning in accepted.items()) or "none"
        raise ValueError(f"{backend} has no option {', '.join(map(repr, unknown))}; its options are: {have}.")
    return given


def _check_keys_and_values(spec: AttentionSpec) -> None:
    """Raise ValueError unless pages and ``kv_dtype`` are of a cache that there can be, and keys can hold values."""
    if spec.kv_layout not in KV_LAYOUTS:
        raise ValueError(
            f"kv_layout={spec.kv_layout!r} is not supported; use 'NHD' ([batch, length, kv_heads, head_dim]) or 'HND' "
            "([batch, kv_heads, length, head_dim])."
        )
    if spec.values_in_keys and (spec.value_head_dim or 0) > spec.head_dim:
        raise ValueError(
            f"value_head_dim={spec.value_head_dim} is more than head_dim={spec.head_dim}, and the values are to be the "
            "first numbers of the keys; give fewer, or an array of values."
        )
    if (spec.page_size is None) != (spec.num_pages is None):
        raise ValueError(f"page_size={spec.page_size!r} and num_pages={spec.num_pages!r} go together; give both.")
    if spec.page_size is not None:
        _require_positive_int("page_size", spec.page_size)
        _require_positive_int("num_pages", spec.num_pages)
        if spec.key_value_length % spec.page_size:
            raise ValueError(
                f"key_value_length={spec.key_value_length} must be a multiple of page_size={spec.page_size}: it is "
                "pages_per_sequence * page_size; key_value_seq_lengths says how many slots are filled."
            )
    if spec.kv_dtype not in (None, *KV_DTYPES):
        raise ValueError(f"kv_dtype={spec.kv_dtype!r} is not supported; use one of {', '.join(KV_DTYPES)}, or None.")
    if spec.needs_grad and (spec.page_size is not None or spec.kv_dtype is not None):
        what = f"page_size={spec.page_size}" if spec.kv_dtype is None else f"kv_dtype={spec.kv_dtype!r}"
        raise ValueError(
            f"{what} asks for a cache, which has no gradient; give needs_grad=False, or keys and values that are "
            "neither paged nor quantised."
        )


def _is_int(x: object) -> bool:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def _is_real(x: object) -> bool:
    return isinstance(x, (int, float, np.integer, np.floating)) and not isinstance(x, bool)


def _is_window(x: object) -> bool:
    return isinstance(x, tuple) and len(x) == 2 and all(_is_int(side) and 0 <= side <= 2**30 for side in x)


def _require_positive_int(name: str, value: object) -> None:
    if not _is_int(value) or value < 1:  # pyright: ignore[reportOperatorIssue]
        raise ValueError(f"{name}={value!r} must be an integer of at least 1.")
