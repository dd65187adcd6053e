"""One attention problem as a value: everything about it that is known before there is data."""

from __future__ import annotations

import dataclasses
import functools
import operator

import numpy as np

from . import masks, scores
from .features import DTYPES, KV_DTYPES, KV_LAYOUTS, Feature, requested
from .operands import Announced

# A scale or a soft cap. Above it, logits are so large that their rounding is infinite in an exponential.
_MOST = 1e6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(Announced):
    """One attention problem: everything about it that is known before there is data. Static and hashable.

    ``query [batch, query_length, num_heads, head_dim]``, ``key [batch, key_value_length, num_kv_heads, head_dim]``,
    ``value [batch, key_value_length, num_kv_heads, value_head_dim]``; query head ``n`` reads KV head
    ``n // (num_heads // num_kv_heads)``. ``scale=None`` means ``1/sqrt(head_dim)``; a number, as
    ``logits_soft_cap``, is at most 1e6. ``value_head_dim=None`` means ``head_dim``; ``local_window_size=w`` means
    ``(w, w)``: a query at position p sees key positions p-left to p+right, both included. The ``has_*`` fields say
    which arrays a :class:`Layout` brings, and which :class:`Terms` do.
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
    needs_grad: bool = True
    return_log_sum_exp: bool = False
    num_pages: int | None = None
    page_size: int | None = None
    kv_layout: str = "NHD"

    def __post_init__(self) -> None:
        if self.value_head_dim is None:
            object.__setattr__(self, "value_head_dim", self.head_dim)
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _in_one_form(field.name, getattr(self, field.name)))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" or field.name == "value_head_dim":
                _require_positive_int(field.name, value)
            if field.type == "bool" and not isinstance(value, bool):
                raise ValueError(f"{field.name}={value!r} must be True or False.")
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
            is_real = _is_int(value) or isinstance(value, float)
            if value is not None and not (is_real and 0 < value <= _MOST):
                raise ValueError(f"{name}={value!r} must be a finite Python float above 0, at most {_MOST:g}, or None.")
        _check_keys_and_values(self)

    def features(self) -> frozenset[Feature]:
        """The features that the spec asks for beyond plain attention, by the names that a backend declares."""
        return requested(self)

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
    def masks_anything(self) -> bool:
        """Whether any query-key pair could be masked."""
        return bool(self.positional_mask is not None or self.has_segment_ids or self.has_seq_lengths or self.has_mask)


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


def _in_one_form(name: str, value: object) -> object:
    """The value as specs of equal meaning have it: a window as a pair, a truth value and a float as Python's."""
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, np.floating):
        return float(value)
    if name == "local_window_size":
        return (value, value) if _is_int(value) else tuple(value) if isinstance(value, list) else value
    return value


def _is_int(x: object) -> bool:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def _is_window(x: object) -> bool:
    return isinstance(x, tuple) and len(x) == 2 and all(_is_int(side) and 0 <= side <= 2**30 for side in x)


def _require_positive_int(name: str, value: object) -> None:
    if not _is_int(value) or value < 1:  # pyright: ignore[reportOperatorIssue]
        raise ValueError(f"{name}={value!r} must be an integer of at least 1.")
