"""Attention in plain float64 NumPy, and the rule that judges every backend against it.

:func:`forward` and :func:`gradients` compute the semantics of :mod:`attnsuite.backends.contract` from their text, not
from its code. The mask, the softmax and the gradient formulas (FlashAttention-2, arXiv 2307.08691, section 2.2, with
soft cap, score function, bias, ALiBi and sinks) are written out again here, so that a mistake in one of the two shows.
Only a score function itself, and its derivative, are JAX's, in float64. :func:`judge` is the noise-floor rule.
Quadratic in time, linear in memory (blocks of query rows); not for training.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float64, Int64

from .layout import Layout
from .operands import NO_TERMS, Terms
from .scores import ScoreFunction, derived
from .spec import AttentionSpec

Kind = Literal["forward", "gradient"]

# Distance from 1.0 to the next number of each dtype.
EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}

_BLOCK_ELEMENTS = 2**19  # scores held at a time: 4 MiB of float64 per temporary


def forward(
    spec: AttentionSpec, layout: Layout, query: Any, key: Any, value: Any, terms: Terms = NO_TERMS
) -> Float64[np.ndarray, "b t n v"]:
    """The output in float64, from NumPy or JAX arrays of any dtype in the layout of the contract."""
    q, k = _float64(query), contiguous(spec, layout, key, terms.key_scales)
    in_keys = spec.values_in_keys
    v = k[..., : spec.value_head_dim] if in_keys else contiguous(spec, layout, value, terms.value_scales)
    out = np.zeros((*q.shape[:3], v.shape[3]))
    for b, group, head, rows in _blocks(spec):
        probs, _, _ = _probabilities(spec, layout, terms, b, group, rows, q[b, rows, group], k[b, :, head])
        out[b, rows, group] = np.swapaxes(probs @ v[b, :, head], 0, 1)
    return out


def log_sum_exp(
    spec: AttentionSpec, layout: Layout, query: Any, key: Any, terms: Terms = NO_TERMS
) -> Float64[np.ndarray, "b t n"]:
    """The log-sum-exp of each row's visible logits and its sink in float64; -inf where there are none."""
    q, k = _float64(query), contiguous(spec, layout, key, terms.key_scales)
    result = np.full(q.shape[:3], -np.inf)
    for b, group, head, rows in _blocks(spec):
        _, _, lse = _probabilities(spec, layout, terms, b, group, rows, q[b, rows, group], k[b, :, head])
        result[b, rows, group] = lse.T
    return result


def gradients(
    spec: AttentionSpec,
    layout: Layout,
    query: Any,
    key: Any,
    value: Any,
    d_out: Any,
    *,
    d_log_sum_exp: Any = None,
    terms: Terms = NO_TERMS,
) -> dict[str, Float64[np.ndarray, "..."]]:
    """Gradients in float64: ``dq``, ``dk``, ``dv``, and that of each term given (``dbias``); shapes are the inputs'.

    Where the values are in the keys there is no ``dv``, and ``dk`` holds both.

    ``d_out [batch, query, heads, value_head_dim]`` is the cotangent of the output,
    ``d_log_sum_exp [batch, query, heads]`` that of the log-sum-exp (None: it is not used).
    """
    q, k, g = (_float64(x) for x in (query, key, d_out))
    v = k[..., : spec.value_head_dim] if spec.values_in_keys else _float64(value)
    if spec.kv_layout == "HND":
        k, v = np.swapaxes(k, 1, 2), np.swapaxes(v, 1, 2)
    found = {"dq": np.zeros_like(q), "dk": np.zeros_like(k), "dv": np.zeros_like(v)}
    found |= {f"d{name}": np.zeros(x.shape) for name, x in terms.given().items()}
    for b, group, head, rows in _blocks(spec):
        q_block, g_block = q[b, rows, group], np.swapaxes(g[b, rows, group], 0, 1)
        probs, slope, lse = _probabilities(spec, layout, terms, b, group, rows, q_block, k[b, :, head])
        found["dv"][b, :, head] += _sum_over_rows(probs, g_block)
        d_logits = g_block @ v[b, :, head].T
        of_all = -np.einsum("gts,gts->gt", probs, d_logits)
        if d_log_sum_exp is not None:
            of_all += _float64(d_log_sum_exp)[b, rows, group].T
        if terms.sinks is not None:  # a logit whose value is zero
            found["dsinks"][group] += (np.exp(_sinks(terms)[group, None] - lse) * of_all).sum(-1)
        d_logits += of_all[..., None]
        d_logits *= probs
        if terms.alibi is not None:
            found["dalibi"][group] -= (d_logits * np.abs(_behind(spec, layout, b, rows))).sum((1, 2))
        if terms.bias is not None:
            axes = tuple(axis for axis, size in enumerate(found["dbias"].shape[1:]) if size == 1)
            found["dbias"][_place(found["dbias"], b, group, rows)] += d_logits.sum(axes, keepdims=True)
        if slope is not None:
            d_logits *= slope
        d_logits *= _scale(spec)
        found["dq"][b, rows, group] = np.swapaxes(d_logits @ k[b, :, head], 0, 1)
        found["dk"][b, :, head] += _sum_over_rows(d_logits, np.swapaxes(q_block, 0, 1))
    if spec.values_in_keys:
        found["dk"][..., : spec.value_head_dim] += found.pop("dv")
    if spec.kv_layout == "HND":
        found |= {name: np.swapaxes(found[name], 1, 2) for name in ("dk", "dv") if name in found}
    return found


def unseen_rows(spec: AttentionSpec, layout: Layout, terms: Terms = NO_TERMS) -> Bool[np.ndarray, "b t n"]:
    """True for each query row of a head that may attend to nothing: its output and its dq are exactly zero."""
    unseen = np.zeros((spec.batch, spec.query_length, spec.num_heads), bool)
    for b, group, _, rows in _blocks(spec):
        unseen[b, rows, group] = ~_visible(spec, layout, terms, b, group, rows).any(-1).T
    return unseen


def unseen_keys(spec: AttentionSpec, layout: Layout, terms: Terms = NO_TERMS) -> Bool[np.ndarray, "b s k"]:
    """True for each key of a KV head that no query attends to: its dk and dv are exactly zero.

    Of a paged cache the shape is that of the pages, ``[num_pages, page_size, kv_heads]``; in ``"HND"`` the heads come
    first.
    """
    seen = np.zeros((spec.batch, spec.key_value_length, spec.num_kv_heads), bool)
    for b, group, head, rows in _blocks(spec):
        seen[b, :, head] |= _visible(spec, layout, terms, b, group, rows).any((0, 1))
    if layout.page_table is not None and spec.num_pages is not None and spec.page_size is not None:
        pages = np.zeros((spec.num_pages, spec.page_size, spec.num_kv_heads), bool)
        for b, slot in zip(*np.nonzero(seen.any(-1)), strict=True):
            entry = np.asarray(layout.page_table)[b, slot // spec.page_size]
            pages[entry, slot % spec.page_size] |= seen[b, slot]
        seen = pages
    return ~(np.swapaxes(seen, 1, 2) if spec.kv_layout == "HND" else seen)


# What the rule allows, in epsilons of the dtype: a floor added to twice the standard backend's largest error, a floor
# added to twice its root-mean-square error, and a bound of the total. `attnsuite judge standard` records
# the errors behind the first and the last: over its named problems, on a CPU, the standard backend is off by at most 7
# (forward) and 9 (gradient) epsilons in float32, 23 and 22 where logits reach 80, and by 0.6 in half precision. The
# floor is for problems where the standard backend is exact by luck (one key). For gradients it also covers the error of
# the flash backward pass, which takes rowsum(dO * O) for rowsum(P * dP). Half precision is judged after rounding the
# result, so the floor cannot be below half an epsilon.
_ALLOWED: dict[tuple[str, Kind], tuple[float, float, float]] = {
    ("float32", "forward"): (4.0, 1 / 4, 128.0),
    ("float32", "gradient"): (8.0, 1 / 4, 256.0),
    ("bfloat16", "forward"): (0.5, 1 / 32, 1.0),
    ("bfloat16", "gradient"): (1.0, 1 / 16, 2.0),
    ("float16", "forward"): (0.5, 1 / 32, 1.0),
    ("float16", "gradient"): (1.0, 1 / 16, 2.0),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """The distance of a result from the oracle, and whether the result passes.

    Errors are relative to the oracle's largest magnitude (absolute if the oracle is zero everywhere).
    ``standard_error`` is the largest error of the standard backend in the same dtype, None if it was not given.
    ``allowed`` bounds ``max_error`` and ``allowed_rms`` bounds ``rms_error``. Both errors are infinite for a result of
    the wrong shape or dtype, or with a NaN or an infinity.
    """

    max_error: float
    rms_error: float
    standard_error: float | None
    allowed: float
    passed: bool
    allowed_rms: float = math.inf


def judge(
    actual: Any,
    expected: Float64[np.ndarray, "*shape"],
    standard: Any,
    dtype: str,
    kind: Kind = "forward",
    zero: Bool[np.ndarray, "*leading"] | None = None,
) -> Verdict:
    """Judge ``actual`` by the noise-floor rule against the oracle's ``expected``.

    It passes if all of this holds:

    - Its largest error is at most twice the standard backend's plus a floor, and within an absolute bound.
    - Its root-mean-square error is at most twice the standard backend's plus a smaller floor.
    - Every number is finite; shape and dtype are right.
    - The entries that ``zero`` selects (over leading axes; see :func:`unseen_rows`) are exactly zero.

    ``standard`` is the standard backend's result, or the Verdict on it, or its largest error alone (then the second
    rule is void), or None. With None, or if the oracle is zero everywhere, only the absolute bound holds.
    """
    rms_floor = EPSILON[dtype] * _ALLOWED[dtype, kind][1]
    if isinstance(standard, Verdict):
        standard_error, standard_rms = standard.max_error, standard.rms_error
    elif standard is None or isinstance(standard, float):
        standard_error, standard_rms = standard, None
    else:
        standard_error, standard_rms = _errors(standard, expected)
    relative = bool(expected.any())
    allowed = allowed_error(standard_error if relative else None, dtype, kind)
    allowed_rms = math.inf if standard_rms is None or not relative else 2 * standard_rms + rms_floor
    max_error, rms_error = _errors(actual, expected) if str(actual.dtype) == dtype else (math.inf, math.inf)
    clean = zero is None or (math.isfinite(max_error) and not np.asarray(actual)[zero].any())
    passed = clean and math.isfinite(max_error) and max_error <= allowed and rms_error <= allowed_rms
    return Verdict(max_error, rms_error, standard_error, allowed, bool(passed), allowed_rms)


def allowed_error(standard_error: float | None, dtype: str, kind: Kind) -> float:
    """The largest error that :func:`judge` allows; ``standard_error`` None leaves the absolute bound alone."""
    floor, _, bound = (EPSILON[dtype] * n for n in _ALLOWED[dtype, kind])
    return bound if standard_error is None else min(bound, 2 * standard_error + floor)


def _errors(actual: Any, expected: Float64[np.ndarray, "*shape"]) -> tuple[float, float]:
    """Largest and root-mean-square error; infinite where shapes differ or a number is not finite."""
    if tuple(actual.shape) != expected.shape:
        return math.inf, math.inf
    difference = _float64(actual) - expected
    if not np.isfinite(difference).all():
        return math.inf, math.inf
    unit = float(np.abs(expected).max()) or 1.0
    return float(np.abs(difference).max()) / unit, float(np.sqrt(np.mean(difference**2))) / unit


def _float64(x: Any) -> Float64[np.ndarray, "*shape"]:
    return np.asarray(x).astype(np.float64)


def contiguous(spec: AttentionSpec, layout: Layout, x: Any, scales: Any) -> Float64[np.ndarray, "b s k d"]:
    """Keys or values of every sequence, slot after slot: numbers times scales, looked up in the page table.

    The slots of a page that does not exist are zero here: the oracle takes no problem in which one of them is seen.
    """
    rows = _float64(x)
    if scales is not None:
        rows = rows * np.broadcast_to(_float64(scales)[..., None], (*rows.shape[:3], 1))
    if spec.kv_layout == "HND":
        rows = np.swapaxes(rows, 1, 2)
    if layout.page_table is None or spec.page_size is None:
        return rows
    slots = np.zeros((spec.batch, spec.key_value_length, *rows.shape[2:]))
    for b, entries in enumerate(np.asarray(layout.page_table)):
        for i, page in enumerate(entries):
            if 0 <= page < rows.shape[0]:
                slots[b, i * spec.page_size : (i + 1) * spec.page_size] = rows[page]
    bare = dataclasses.replace(spec, num_pages=None, page_size=None, kv_layout="NHD")
    unseen = unseen_keys(bare, dataclasses.replace(layout, page_table=None)).all(-1, keepdims=True)
    return np.where(unseen[..., None], 0.0, slots)


def _sinks(terms: Terms) -> Float64[np.ndarray, " heads"]:
    return np.minimum(_float64(terms.sinks), 2e30)  # +inf takes all of a row


def _scale(spec: AttentionSpec) -> float:
    return 1.0 / np.sqrt(spec.head_dim) if spec.scale is None else spec.scale


def _blocks(spec: AttentionSpec) -> Iterator[tuple[int, slice, int, slice]]:
    """Every (batch entry, query heads of one KV head, that KV head, block of query rows)."""
    size = spec.num_heads // spec.num_kv_heads
    rows = max(1, _BLOCK_ELEMENTS // (size * spec.key_value_length))
    for b in range(spec.batch):
        for head in range(spec.num_kv_heads):
            for start in range(0, spec.query_length, rows):
                stop = min(start + rows, spec.query_length)
                yield b, slice(head * size, (head + 1) * size), head, slice(start, stop)


def _visible(
    spec: AttentionSpec, layout: Layout, terms: Terms, b: int, group: slice, rows: slice
) -> Bool[np.ndarray, "g t s"]:
    """The keys that each query row of the block may attend to, from the text of the contract."""
    slots = np.arange(spec.key_value_length)
    q_pos = _row(layout.query_positions, b, np.arange(spec.query_length))[rows]
    k_pos = _row(layout.key_value_positions, b, slots)
    behind = _behind(spec, layout, b, rows)
    visible = np.ones(behind.shape, bool)
    if spec.is_causal:
        visible[behind < 0] = False
    if spec.window is not None:
        left, right = spec.window
        visible[(behind > left) | (behind < -right)] = False
    if spec.chunk_size is not None:
        first_of_chunk = q_pos - q_pos % spec.chunk_size
        offset = k_pos[None, :] - first_of_chunk[:, None]
        visible[(offset < 0) | (offset >= spec.chunk_size)] = False
    if spec.mask_function is not None:
        visible &= np.asarray(spec.mask_function(q_pos[:, None], k_pos[None, :]))
    if layout.query_segment_ids is not None:
        q_seg = _row(layout.query_segment_ids, b, slots)[rows]
        k_seg = _row(layout.key_value_segment_ids, b, slots)
        visible[q_seg < 0, :] = False
        visible[:, k_seg < 0] = False
        visible[q_seg[:, None] != k_seg[None, :]] = False
    if layout.key_value_seq_lengths is not None:
        visible[:, slots >= int(np.asarray(layout.key_value_seq_lengths)[b])] = False
    heads = np.broadcast_to(visible, (group.stop - group.start, *visible.shape))
    if layout.mask is not None:
        heads = heads & _select(layout.mask, b, group, rows).astype(bool)
    return heads if terms.bias is None else heads & ~np.isneginf(_float64(_select(terms.bias, b, group, rows)))


def _behind(spec: AttentionSpec, layout: Layout, b: int, rows: slice) -> Int64[np.ndarray, "t s"]:
    """How far each key lies behind each query row of the block, by their positions."""
    q_pos = _row(layout.query_positions, b, np.arange(spec.query_length))[rows]
    return q_pos[:, None] - _row(layout.key_value_positions, b, np.arange(spec.key_value_length))[None, :]


def _row(array: Any, b: int, default: np.ndarray) -> np.ndarray:
    return default if array is None else np.asarray(array)[b].astype(np.int64)


def _select(array: Any, b: int, group: slice, rows: slice) -> np.ndarray:
    """The block of an array that broadcasts to [batch, heads, query, key]."""
    return np.asarray(array)[_place(array, b, group, rows)]


def _place(array: Any, b: int, group: slice, rows: slice) -> tuple[int | slice, ...]:
    """Where the block lies in such an array."""
    batch, heads, length, _ = array.shape
    every = slice(None)
    return b if batch > 1 else 0, group if heads > 1 else every, rows if length > 1 else every


def _probabilities(
    spec: AttentionSpec,
    layout: Layout,
    terms: Terms,
    b: int,
    group: slice,
    rows: slice,
    query: Float64[np.ndarray, "t g h"],
    key: Float64[np.ndarray, "s h"],
) -> tuple[Float64[np.ndarray, "g t s"], Float64[np.ndarray, "g t s"] | None, Float64[np.ndarray, "g t"]]:
    """Softmax of a block (zero in rows that see nothing), the logits' derivative by the scaled scores, log-sum-exp.

    The derivative is that of soft cap and score function; None without either.
    """
    size = group.stop - group.start
    logits = np.ascontiguousarray(np.swapaxes(query, 0, 1)).reshape(-1, key.shape[1]) @ key.T
    logits = logits.reshape(size, -1, key.shape[0])
    logits *= _scale(spec)
    slope = None
    if spec.logits_soft_cap is not None:
        squashed = np.tanh(logits / spec.logits_soft_cap)
        logits = spec.logits_soft_cap * squashed
        slope = 1.0 - squashed**2
    if spec.score_function is not None:
        logits, derivative = _modified(spec, spec.score_function, layout, b, group, rows, logits)
        slope = derivative if slope is None else slope * derivative
    if terms.bias is not None:
        logits += _float64(_select(terms.bias, b, group, rows))
    if terms.alibi is not None:
        logits -= _float64(terms.alibi)[group, None, None] * np.abs(_behind(spec, layout, b, rows))
    if spec.masks_anything:
        logits[~_visible(spec, layout, terms, b, group, rows)] = -np.inf
    top = logits.max(-1, keepdims=True)
    sink = np.full((size, 1, 1), -np.inf) if terms.sinks is None else _sinks(terms)[group, None, None]
    top = np.maximum(top, sink)
    logits -= np.where(np.isneginf(top), 0.0, top)
    probs = np.exp(logits, out=logits)
    total = probs.sum(-1, keepdims=True) + np.exp(sink - np.where(np.isneginf(top), 0.0, top))
    total = np.where(total == 0.0, 1.0, total)
    probs /= total
    return probs, slope, (top + np.log(total))[..., 0]


def _modified(
    spec: AttentionSpec,
    function: ScoreFunction,
    layout: Layout,
    b: int,
    group: slice,
    rows: slice,
    logits: Float64[np.ndarray, "g t s"],
) -> tuple[Float64[np.ndarray, "g t s"], Float64[np.ndarray, "g t s"]]:
    """What the score function makes of a block, and its derivative, both by JAX in float64."""
    q_pos = _row(layout.query_positions, b, np.arange(spec.query_length))[rows]
    k_pos = _row(layout.key_value_positions, b, np.arange(spec.key_value_length))
    at = np.int64(b), np.arange(group.start, group.stop)[:, None, None], q_pos[None, :, None], k_pos[None, None, :]
    with jax.enable_x64(new_val=True):
        made = derived(function, jnp.asarray(logits), *map(jnp.asarray, at))
    return _float64(made[0]), _float64(made[1])


def _sum_over_rows(
    weights: Float64[np.ndarray, "g t s"], x: Float64[np.ndarray, "g t d"]
) -> Float64[np.ndarray, "s d"]:
    return weights.reshape(-1, weights.shape[2]).T @ np.ascontiguousarray(x).reshape(-1, x.shape[2])
