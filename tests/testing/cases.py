"""The named attention problems: what a backend must compute or refuse, by sizes and options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from attnsuite.backends import masks
from attnsuite.backends.operands import OPERANDS

from . import layouts
from .caches import Cache


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One named problem: sizes ``(batch, query length, key length, heads, KV heads, head_dim, value_head_dim)``.

    With ``value_head_dim`` in the options, the values are in the keys.
    """

    sizes: tuple[int, int, int, int, int, int, int]
    dtype: str
    options: Mapping[str, Any]
    layout: Callable[[tuple[int, ...], np.random.Generator], dict[str, np.ndarray]]
    magnitude: float
    cache: Cache | None = None


def leaning(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
    """A score function that reads all of its arguments; its result is at most 21 and its derivative at most 1."""
    turn = (0.1 * (query - key).astype(score.dtype) + 0.7 * (head + 5 * batch).astype(score.dtype)).astype(score.dtype)
    return 20.0 * jnp.tanh(score / 20.0) + jnp.cos(turn)


def case(
    *,
    B: int = 2,
    T: int = 160,
    S: int | None = None,
    N: int = 4,
    K: int = 2,
    H: int = 32,
    Hv: int | None = None,
    dtype: str = "float32",
    magnitude: float = 1.0,
    layout: Callable[..., dict[str, np.ndarray]] = lambda *_: {},
    cache: Cache | None = None,
    values_in_keys: bool = False,
    **options: Any,
) -> Case:
    options |= {} if cache is None else {"needs_grad": False}
    options |= {"value_head_dim": Hv} if values_in_keys else {}
    return Case((B, T, S or T, N, K, H, Hv or H), dtype, options, layout, magnitude, cache)


def _decode(*cached: int, also: Callable[..., dict[str, np.ndarray]] | None = None, **options: Any) -> Case:
    """A step of sequences that fill ``cached`` slots of a longer cache, one token of each if not said."""
    layout = layouts.decoding(*cached)
    layout = layout if also is None else layouts.together(layout, also)
    return case(**{"B": len(cached), "T": 1, "is_causal": True, "layout": layout} | options)


_PACKED = layouts.segments([0, 50, 1, 70, 2, 40])
_PADDED = layouts.segments([layouts.TRAILING, 20, 0, 60, 1, 50, layouts.TRAILING, 30])
_EVERYTHING = {
    "K": 1,
    "is_causal": True,
    "local_window_size": (24, 0),
    "logits_soft_cap": 5.0,
    "layout": _PADDED,
}

CASES: dict[str, Case] = {
    # heads
    "plain": case(),
    "heads-equal": case(K=4),
    "heads-equal-bfloat16": case(K=4, dtype="bfloat16"),
    "causal": case(is_causal=True),
    "gqa-1": case(N=4, K=4, is_causal=True),
    "gqa-4": case(N=8, K=2, is_causal=True),
    "gqa-8": case(N=16, K=2, is_causal=True),
    "mqa": case(N=6, K=1, is_causal=True),
    "scale": case(is_causal=True, scale=0.5),
    # head dimensions
    **{f"head-dim-{H}": case(B=1, N=2, K=1, H=H, is_causal=True) for H in (33, 64, 72, 80, 96, 128, 192, 256)},
    "value-dim-wider": case(H=32, Hv=64, is_causal=True),
    "value-dim-narrower": case(H=48, Hv=32, is_causal=True),
    # lengths
    **{f"length-{T}": case(T=T, is_causal=True) for T in (1, 127, 128, 129)},
    "length-1000": case(B=1, T=1000, N=2, K=1, is_causal=True),
    "length-2100": case(B=1, T=2100, N=2, K=1, is_causal=True),
    "more-keys": case(T=100, S=230),
    "more-queries": case(T=230, S=100),
    "more-keys-causal": case(T=100, S=230, is_causal=True),
    "more-queries-causal": case(T=230, S=100, is_causal=True),
    # up to 16 queries chunked and flash_cpu (with a gradient) take the plain formula
    **{f"few-queries-{T}": case(B=1, T=T, S=1100, N=2, K=1) for T in (16, 17)},
    "one-key": case(T=40, S=1),
    "decode-1": _decode(513, 200, 1, S=513),
    "decode-4": _decode(700, 300, 4, T=4, S=700),
    "decode-window": _decode(400, 30, S=513, local_window_size=64),
    "chunk-of-prefill": _decode(300, 150, T=64, S=300),
    # windows and chunks
    "window-int": case(local_window_size=16),
    "window-asymmetric": case(local_window_size=(7, 30)),
    "window-zero": case(local_window_size=0),
    "window-right-only": case(local_window_size=(0, 20)),
    "window-causal": case(local_window_size=(16, 0), is_causal=True),
    "window-int-causal": case(local_window_size=16, is_causal=True),
    "window-wider-than-all": case(local_window_size=(10_000, 2**30)),
    "window-1300": case(B=1, T=1300, N=2, K=1, local_window_size=(200, 3)),
    "window-more-queries": case(T=230, S=100, local_window_size=(10, 5)),
    "chunk-causal": case(chunk_size=48, is_causal=True),
    "chunk-bidirectional": case(chunk_size=48),
    "chunk-1": case(chunk_size=1, is_causal=True),
    # soft cap
    "soft-cap": case(logits_soft_cap=30.0, is_causal=True),
    "soft-cap-tight": case(logits_soft_cap=1.5, magnitude=2.0),
    # segments and padding
    "segments": case(layout=_PACKED),
    "segments-causal": case(is_causal=True, layout=_PACKED),
    "segments-returning": case(is_causal=True, layout=layouts.segments([1, 50, 0, 70, 1, 40])),
    "segments-large-ids": case(is_causal=True, layout=layouts.segments([2**31 - 1, 50, 7, 70, 10**9, 40])),
    "segments-1300": case(B=2, T=1300, N=2, K=1, is_causal=True, layout=layouts.segments([0, 300, 1, 701, 2, 299])),
    "segments-more-keys": case(T=100, S=230, layout=layouts.segments([0, 60, 1, 40], [0, 100, 1, 130])),
    "segments-unmatched": case(layout=layouts.segments([0, 80, 3, 80], [0, 80, 5, 80])),
    "padding-right": case(is_causal=True, layout=layouts.segments([0, 130, layouts.TRAILING, 30])),
    "padding-left": case(is_causal=True, layout=layouts.segments([layouts.TRAILING, 30, 0, 130])),
    "padding-both-ends": case(layout=_PADDED),
    "padding-many-ids": case(layout=layouts.segments([-7, 20, 0, 60, 1, 50, -(2**31), 30])),
    "padding-only": case(layout=layouts.segments([layouts.TRAILING, 160])),
    # lengths per batch entry
    "ragged": case(B=4, layout=layouts.lengths(160, 77, 1, 0)),
    "ragged-causal": case(B=4, is_causal=True, layout=layouts.lengths(160, 77, 1, 0)),
    "ragged-empty": case(B=1, layout=layouts.lengths(0)),
    "ragged-beyond-all-keys": case(B=4, layout=layouts.lengths(300, 161, 160, -3)),
    # positions
    "positions-shifted": case(is_causal=True, layout=layouts.positions(lambda i: i + 1000, lambda i: i + 1000)),
    "positions-query-ahead": case(T=100, S=230, is_causal=True, layout=layouts.positions(lambda i: i + 130)),
    "positions-reversed": case(is_causal=True, layout=layouts.positions(lambda i: i[::-1], lambda i: i[::-1])),
    "positions-shuffled": case(
        is_causal=True, local_window_size=40, layout=layouts.positions(layouts.shuffled, layouts.shuffled)
    ),
    "positions-repeated": case(is_causal=True, layout=layouts.positions(lambda i: i // 3, lambda i: i // 2)),
    "positions-key-only": case(is_causal=True, layout=layouts.positions(None, lambda i: i * 2)),
    "positions-negative-chunks": case(
        chunk_size=32, is_causal=True, layout=layouts.positions(lambda i: i - 75, lambda i: i - 75)
    ),
    "rows-before-every-key": case(is_causal=True, layout=layouts.positions(lambda i: i - 40)),
    # combinations
    "combination": case(**_EVERYTHING),
    "combination-bidirectional": case(**{**_EVERYTHING, "is_causal": False, "local_window_size": (24, 9)}),
    "combination-ragged": case(
        B=3,
        is_causal=True,
        local_window_size=(40, 0),
        layout=layouts.together(layouts.lengths(160, 60, 0), layouts.positions(lambda i: i + 3, lambda i: i)),
    ),
    # mask and bias arrays
    "mask-per-head": case(layout=layouts.mask(heads=True)),
    "mask-broadcast": case(is_causal=True, layout=layouts.mask(heads=False)),
    "mask-dead-rows": case(layout=layouts.mask(heads=True, dead_rows=True)),
    "bias-per-head": case(layout=layouts.bias(heads=True)),
    "bias-broadcast": case(is_causal=True, logits_soft_cap=4.0, layout=layouts.bias(heads=False)),
    "bias-of-minus-infinity": case(layout=layouts.closing_bias),
    "bias-of-minus-infinity-and-mask": case(layout=layouts.together(layouts.mask(heads=True), layouts.closing_bias)),
    "mask-and-bias": case(layout=layouts.together(layouts.mask(heads=False, dead_rows=True), layouts.bias(heads=True))),
    "bias-bfloat16": case(dtype="bfloat16", N=4, K=2, layout=layouts.bias(heads=False)),
    # log-sum-exp
    "log-sum-exp": case(is_causal=True, return_log_sum_exp=True),
    "log-sum-exp-of-nothing": case(layout=_PADDED, return_log_sum_exp=True, local_window_size=(30, 4)),
    "log-sum-exp-soft-cap": case(B=1, T=100, S=230, N=8, logits_soft_cap=5.0, return_log_sum_exp=True),
    "log-sum-exp-decode": _decode(513, 200, 1, S=513, return_log_sum_exp=True),
    "log-sum-exp-bfloat16": case(dtype="bfloat16", is_causal=True, layout=_PADDED, return_log_sum_exp=True),
    "log-sum-exp-and-bias": case(
        layout=layouts.together(layouts.mask(heads=False, dead_rows=True), layouts.bias(heads=True)),
        return_log_sum_exp=True,
    ),
    # mask functions
    "function-prefix": case(mask_function=masks.Causal() | masks.Prefix(40)),
    "function-dilated": case(
        T=300, N=2, K=1, is_causal=True, mask_function=masks.Dilated(4) & masks.Window(120), logits_soft_cap=5.0
    ),
    "function-neighbourhood": case(mask_function=masks.Neighbourhood(16, 2) & masks.Documents((96, 48))),
    "function-positions": case(
        T=100,
        S=230,
        mask_function=~masks.Dilated(3) & masks.Causal(),
        layout=layouts.together(layouts.positions(lambda i: i * 2 + 5, layouts.shuffled), layouts.lengths(230, 90)),
    ),
    "function-decode": _decode(
        300, 90, S=300, is_causal=False, mask_function=masks.Causal() & masks.Dilated(2), dtype="bfloat16"
    ),
    # score functions
    "score": case(N=8, is_causal=True, score_function=leaning),
    "score-soft-cap": case(
        N=8,
        logits_soft_cap=3.0,
        score_function=leaning,
        layout=layouts.together(_PADDED, layouts.positions(lambda i: i[::-1] // 2), layouts.alibi),
        return_log_sum_exp=True,
    ),
    "bias-and-score": case(T=40, score_function=leaning, logits_soft_cap=3.0, layout=layouts.bias(heads=True)),
    "score-decode": _decode(300, 90, S=300, score_function=leaning, dtype="bfloat16"),
    # ALiBi
    # each operand with a number per head alone
    **{x.name: case(is_causal=True, layout=layouts.learned(x)) for x in OPERANDS if x.axes == ("heads",)},
    "alibi-soft-cap": case(
        N=8,
        logits_soft_cap=2.0,
        layout=layouts.together(_PADDED, layouts.positions(lambda i: i[::-1] // 2), layouts.alibi, layouts.sinks),
    ),
    "alibi-decode": _decode(300, 90, S=300, also=layouts.alibi, dtype="bfloat16"),
    # sinks
    "sinks-of-nothing": case(layout=layouts.together(_PADDED, layouts.sinks), logits_soft_cap=5.0, scale=0.5),
    "sinks-decode": _decode(513, 200, 1, S=513, also=layouts.sinks, dtype="bfloat16"),
    "sinks-log-sum-exp": case(T=100, S=230, N=8, layout=layouts.sinks, return_log_sum_exp=True),
    # caches
    "pages": _decode(
        *(96, 60, 40),
        T=40,
        S=96,
        local_window_size=(60, 0),
        logits_soft_cap=5.0,
        also=layouts.sinks,
        cache=Cache(page_size=12),
        return_log_sum_exp=True,
    ),
    "pages-decode": _decode(256, 100, 1, S=256, N=8, H=128, cache=Cache(page_size=16), dtype="bfloat16"),
    "pages-ragged": case(
        B=1,
        T=72,
        S=176,
        is_causal=True,
        layout=layouts.ragged(16, (40, 40, 4), (1, 50, 4), (0, 0, 1), (24, 32, 2)),
        cache=Cache(page_size=16),
    ),
    "pages-float8": _decode(128, 70, S=128, cache=Cache(page_size=16, kv_dtype="float8_e4m3fn", axes=(1, 3))),
    # the heads before the slots
    "cross-hnd": case(T=100, S=230, N=8, kv_layout="HND"),
    "decode-hnd": _decode(513, 200, S=513, N=8, kv_layout="HND", needs_grad=False),
    "kv-int8-pages-hnd": _decode(128, 70, S=128, cache=Cache(page_size=16, kv_dtype="int8"), kv_layout="HND"),
    "kv-int8": _decode(230, 90, T=40, S=230, cache=Cache(kv_dtype="int8"), dtype="bfloat16", return_log_sum_exp=True),
    # values in the keys
    "values-in-keys": case(N=6, K=1, H=48, Hv=32, is_causal=True, values_in_keys=True),
    "values-in-keys-bfloat16": case(
        N=8,
        H=40,
        Hv=24,
        dtype="bfloat16",
        layout=_PADDED,
        logits_soft_cap=5.0,
        return_log_sum_exp=True,
        values_in_keys=True,
    ),
    "values-in-keys-decode": _decode(300, 90, S=300, N=6, K=1, H=48, Hv=32, dtype="bfloat16", values_in_keys=True),
    "values-in-keys-pages": _decode(
        *(128, 70),
        T=40,
        S=128,
        H=48,
        Hv=32,
        also=layouts.sinks,
        cache=Cache(page_size=16, kv_dtype="int8"),
        values_in_keys=True,
    ),
    # dtypes
    **{
        f"{name}-{dtype}": case(dtype=dtype, **options)
        for dtype in ("bfloat16", "float16")
        for name, options in {
            "causal": {"is_causal": True},
            "cross": {"T": 100, "S": 230, "N": 8},
            "combination": _EVERYTHING,
        }.items()
    },
    "causal-1000-bfloat16": case(B=1, T=1000, N=2, K=1, H=64, dtype="bfloat16", is_causal=True),
    "window-bfloat16": case(dtype="bfloat16", local_window_size=(30, 12)),
    "decode-bfloat16": _decode(513, 200, S=513, dtype="bfloat16"),
    # big logits: unscaled scores up to 6.5e4, the end of float16 (float32 rounds such logits by 4e-3, so less there)
    "big-logits-float32": case(H=64, magnitude=4.0, is_causal=True),
    "big-logits-bfloat16": case(H=64, magnitude=40.0, dtype="bfloat16", is_causal=True),
    "big-logits-float16": case(H=64, magnitude=40.0, dtype="float16", is_causal=True),
}
