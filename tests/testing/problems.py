"""Named attention problems that every backend is held to, with their oracle results.

``CASES`` names what a backend must compute or refuse; :func:`problem` makes the arrays of one (seeded by its
name), the float64 results and the judge's verdict on the standard backend, once per session.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnsuite.backends import AttentionSpec, Backend, Layout, Target, Terms, make_spec, masks, oracle, plan
from attnsuite.backends.contract import NO_TERMS
from attnsuite.backends.features import Mode
from attnsuite.backends.operands import OPERANDS
from attnsuite.backends.standard import STANDARD

from . import layouts
from .caches import Cache, cached

QUANTITIES = ("output", "dq", "dk", "dv")  # of every problem; some have log_sum_exp, or the gradient of a term, too
PER_HEAD = ("dsinks", "dalibi")  # gradients with one number per head
Inputs = tuple[Any, ...]  # query, key, value (None: in the keys), cotangent of the output


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


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A case with its arrays and the results to compare with, by quantity.

    The quantities are output, dq, dk and dv, log_sum_exp where the spec asks for it, and the gradient of each term.
    ``standard_run`` is the compiled standard backend, kept because compiling is where the suite's time goes.
    """

    spec: AttentionSpec
    layout: Layout
    terms: Terms
    inputs: Inputs
    expected: dict[str, np.ndarray]
    standard: dict[str, oracle.Verdict]
    standard_run: Callable[..., dict[str, jax.Array]]

    @functools.cached_property
    def unseen_rows(self) -> np.ndarray:
        """[batch, query length, heads]: rows that may attend to nothing."""
        return oracle.unseen_rows(self.spec, self.layout, self.terms)

    @functools.cached_property
    def unseen_keys(self) -> np.ndarray:
        """[batch, key length, KV heads]: keys that nobody attends to."""
        return oracle.unseen_keys(self.spec, self.layout, self.terms)

    @functools.cached_property
    def hidden_rows(self) -> np.ndarray:
        """Those of :attr:`unseen_rows` that see nothing by lengths, padding and documents alone."""
        return oracle.unseen_rows(*self._hiding)

    @functools.cached_property
    def hidden_keys(self) -> np.ndarray:
        """Those of :attr:`unseen_keys` that nobody sees by lengths, padding and documents alone."""
        return oracle.unseen_keys(*self._hiding)

    @property
    def _hiding(self) -> tuple[AttentionSpec, Layout]:
        """The problem with no other mask than lengths and segments."""
        bare = dataclasses.replace(
            self.spec,
            is_causal=False,
            local_window_size=None,
            chunk_size=None,
            mask_function=None,
            has_mask=False,
            has_bias=False,
        )
        return bare, dataclasses.replace(self.layout, mask=None)

    def verdict(self, name: str, result: jax.Array) -> oracle.Verdict:
        """The judge's verdict on one quantity; what nobody sees has to be exactly zero."""
        rows, keys = self.unseen_rows, self.unseen_keys
        zero = {"output": rows, "dq": rows, "dk": keys, "dv": keys}.get(name)
        return judge(name, result, self.expected[name], self.standard[name], self.spec, zero)


def leaning(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
    """A score function that reads all of its arguments; its result is at most 21 and its derivative at most 1."""
    turn = (0.1 * (query - key).astype(score.dtype) + 0.7 * (head + 5 * batch).astype(score.dtype)).astype(score.dtype)
    return 20.0 * jnp.tanh(score / 20.0) + jnp.cos(turn)


def _case(
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
    "plain": _case(),
    "heads-equal": _case(K=4),
    "heads-equal-bfloat16": _case(K=4, dtype="bfloat16"),
    "causal": _case(is_causal=True),
    "gqa-1": _case(N=4, K=4, is_causal=True),
    "gqa-4": _case(N=8, K=2, is_causal=True),
    "gqa-8": _case(N=16, K=2, is_causal=True),
    "mqa": _case(N=6, K=1, is_causal=True),
    "scale": _case(is_causal=True, scale=0.5),
    # head dimensions
    **{f"head-dim-{H}": _case(B=1, N=2, K=1, H=H, is_causal=True) for H in (33, 64, 72, 80, 128, 256)},
    "value-dim-wider": _case(H=32, Hv=64, is_causal=True),
    "value-dim-narrower": _case(H=48, Hv=32, is_causal=True),
    # lengths
    **{f"length-{T}": _case(T=T, is_causal=True) for T in (1, 127, 128, 129)},
    "length-1000": _case(B=1, T=1000, N=2, K=1, is_causal=True),
    "length-2100": _case(B=1, T=2100, N=2, K=1, is_causal=True),
    "more-keys": _case(T=100, S=230),
    "more-queries": _case(T=230, S=100),
    "more-keys-causal": _case(T=100, S=230, is_causal=True),
    "more-queries-causal": _case(T=230, S=100, is_causal=True),
    "one-key": _case(T=40, S=1),
    "decode-1": _case(B=3, T=1, S=513, is_causal=True, layout=layouts.decoding(513, 200, 1)),
    "decode-4": _case(B=3, T=4, S=700, is_causal=True, layout=layouts.decoding(700, 300, 4)),
    "decode-window": _case(B=2, T=1, S=513, is_causal=True, local_window_size=64, layout=layouts.decoding(400, 30)),
    "chunk-of-prefill": _case(B=2, T=64, S=300, is_causal=True, layout=layouts.decoding(300, 150)),
    # windows and chunks
    "window-int": _case(local_window_size=16),
    "window-asymmetric": _case(local_window_size=(7, 30)),
    "window-zero": _case(local_window_size=0),
    "window-right-only": _case(local_window_size=(0, 20)),
    "window-causal": _case(local_window_size=(16, 0), is_causal=True),
    "window-int-causal": _case(local_window_size=16, is_causal=True),
    "window-wider-than-all": _case(local_window_size=(10_000, 2**30)),
    "window-1300": _case(B=1, T=1300, N=2, K=1, local_window_size=(200, 3)),
    "window-more-queries": _case(T=230, S=100, local_window_size=(10, 5)),
    "chunk-causal": _case(chunk_size=48, is_causal=True),
    "chunk-bidirectional": _case(chunk_size=48),
    "chunk-1": _case(chunk_size=1, is_causal=True),
    # soft cap
    "soft-cap": _case(logits_soft_cap=30.0, is_causal=True),
    "soft-cap-tight": _case(logits_soft_cap=1.5, magnitude=2.0),
    # segments and padding
    "segments": _case(layout=_PACKED),
    "segments-causal": _case(is_causal=True, layout=_PACKED),
    "segments-returning": _case(is_causal=True, layout=layouts.segments([1, 50, 0, 70, 1, 40])),
    "segments-large-ids": _case(is_causal=True, layout=layouts.segments([2**31 - 1, 50, 7, 70, 10**9, 40])),
    "segments-1300": _case(B=2, T=1300, N=2, K=1, is_causal=True, layout=layouts.segments([0, 300, 1, 701, 2, 299])),
    "segments-more-keys": _case(T=100, S=230, layout=layouts.segments([0, 60, 1, 40], [0, 100, 1, 130])),
    "segments-unmatched": _case(layout=layouts.segments([0, 80, 3, 80], [0, 80, 5, 80])),
    "padding-right": _case(is_causal=True, layout=layouts.segments([0, 130, layouts.TRAILING, 30])),
    "padding-left": _case(is_causal=True, layout=layouts.segments([layouts.TRAILING, 30, 0, 130])),
    "padding-both-ends": _case(layout=_PADDED),
    "padding-many-ids": _case(layout=layouts.segments([-7, 20, 0, 60, 1, 50, -(2**31), 30])),
    "padding-only": _case(layout=layouts.segments([layouts.TRAILING, 160])),
    # lengths per batch entry
    "ragged": _case(B=4, layout=layouts.lengths(160, 77, 1, 0)),
    "ragged-causal": _case(B=4, is_causal=True, layout=layouts.lengths(160, 77, 1, 0)),
    "ragged-empty": _case(B=1, layout=layouts.lengths(0)),
    "ragged-beyond-all-keys": _case(B=4, layout=layouts.lengths(300, 161, 160, -3)),
    # positions
    "positions-shifted": _case(is_causal=True, layout=layouts.positions(lambda i: i + 1000, lambda i: i + 1000)),
    "positions-query-ahead": _case(T=100, S=230, is_causal=True, layout=layouts.positions(lambda i: i + 130)),
    "positions-reversed": _case(is_causal=True, layout=layouts.positions(lambda i: i[::-1], lambda i: i[::-1])),
    "positions-shuffled": _case(
        is_causal=True,
        local_window_size=40,
        layout=layouts.positions(layouts.shuffled, layouts.shuffled),
    ),
    "positions-repeated": _case(is_causal=True, layout=layouts.positions(lambda i: i // 3, lambda i: i // 2)),
    "positions-key-only": _case(is_causal=True, layout=layouts.positions(None, lambda i: i * 2)),
    "positions-negative-chunks": _case(
        chunk_size=32, is_causal=True, layout=layouts.positions(lambda i: i - 75, lambda i: i - 75)
    ),
    "rows-before-every-key": _case(is_causal=True, layout=layouts.positions(lambda i: i - 40)),
    # combinations
    "combination": _case(**_EVERYTHING),
    "combination-bidirectional": _case(**{**_EVERYTHING, "is_causal": False, "local_window_size": (24, 9)}),
    "combination-ragged": _case(
        B=3,
        is_causal=True,
        local_window_size=(40, 0),
        layout=layouts.together(layouts.lengths(160, 60, 0), layouts.positions(lambda i: i + 3, lambda i: i)),
    ),
    # mask and bias arrays
    "mask-per-head": _case(layout=layouts.mask(heads=True)),
    "mask-broadcast": _case(is_causal=True, layout=layouts.mask(heads=False)),
    "mask-dead-rows": _case(layout=layouts.mask(heads=True, dead_rows=True)),
    "bias-per-head": _case(layout=layouts.bias(heads=True)),
    "bias-broadcast": _case(is_causal=True, logits_soft_cap=4.0, layout=layouts.bias(heads=False)),
    "bias-of-minus-infinity": _case(layout=layouts.closing_bias),
    "bias-of-minus-infinity-and-mask": _case(layout=layouts.together(layouts.mask(heads=True), layouts.closing_bias)),
    "mask-and-bias": _case(
        layout=layouts.together(layouts.mask(heads=False, dead_rows=True), layouts.bias(heads=True))
    ),
    "bias-bfloat16": _case(dtype="bfloat16", N=4, K=2, layout=layouts.bias(heads=False)),
    # log-sum-exp
    "log-sum-exp": _case(is_causal=True, return_log_sum_exp=True),
    "log-sum-exp-of-nothing": _case(layout=_PADDED, return_log_sum_exp=True, local_window_size=(30, 4)),
    "log-sum-exp-soft-cap": _case(B=1, T=100, S=230, N=8, logits_soft_cap=5.0, return_log_sum_exp=True),
    "log-sum-exp-decode": _case(
        B=3, T=1, S=513, is_causal=True, layout=layouts.decoding(513, 200, 1), return_log_sum_exp=True
    ),
    "log-sum-exp-bfloat16": _case(dtype="bfloat16", is_causal=True, layout=_PADDED, return_log_sum_exp=True),
    "log-sum-exp-and-bias": _case(
        layout=layouts.together(layouts.mask(heads=False, dead_rows=True), layouts.bias(heads=True)),
        return_log_sum_exp=True,
    ),
    # mask functions
    "function-prefix": _case(mask_function=masks.Causal() | masks.Prefix(40)),
    "function-dilated": _case(
        T=300, N=2, K=1, is_causal=True, mask_function=masks.Dilated(4) & masks.Window(120), logits_soft_cap=5.0
    ),
    "function-neighbourhood": _case(mask_function=masks.Neighbourhood(16, 2) & masks.Documents((96, 48))),
    "function-positions": _case(
        T=100,
        S=230,
        mask_function=~masks.Dilated(3) & masks.Causal(),
        layout=layouts.together(layouts.positions(lambda i: i * 2 + 5, layouts.shuffled), layouts.lengths(230, 90)),
    ),
    "function-decode": _case(
        T=1, S=300, mask_function=masks.Causal() & masks.Dilated(2), layout=layouts.decoding(300, 90), dtype="bfloat16"
    ),
    # score functions
    "score": _case(N=8, is_causal=True, score_function=leaning),
    "score-soft-cap": _case(
        N=8,
        logits_soft_cap=3.0,
        score_function=leaning,
        layout=layouts.together(_PADDED, layouts.positions(lambda i: i[::-1] // 2), layouts.alibi),
        return_log_sum_exp=True,
    ),
    "bias-and-score": _case(T=40, score_function=leaning, logits_soft_cap=3.0, layout=layouts.bias(heads=True)),
    "score-decode": _case(
        T=1, S=300, is_causal=True, score_function=leaning, layout=layouts.decoding(300, 90), dtype="bfloat16"
    ),
    # ALiBi
    # each operand with a number per head alone
    **{x.name: _case(is_causal=True, layout=layouts.learned(x)) for x in OPERANDS if x.axes == ("heads",)},
    "alibi-soft-cap": _case(
        N=8,
        logits_soft_cap=2.0,
        layout=layouts.together(_PADDED, layouts.positions(lambda i: i[::-1] // 2), layouts.alibi, layouts.sinks),
    ),
    "alibi-decode": _case(
        T=1, S=300, is_causal=True, layout=layouts.together(layouts.decoding(300, 90), layouts.alibi), dtype="bfloat16"
    ),
    # sinks
    "sinks-of-nothing": _case(layout=layouts.together(_PADDED, layouts.sinks), logits_soft_cap=5.0, scale=0.5),
    "sinks-decode": _case(
        B=3,
        T=1,
        S=513,
        is_causal=True,
        layout=layouts.together(layouts.decoding(513, 200, 1), layouts.sinks),
        dtype="bfloat16",
    ),
    "sinks-log-sum-exp": _case(T=100, S=230, N=8, layout=layouts.sinks, return_log_sum_exp=True),
    # caches
    "pages": _case(
        B=3,
        T=40,
        S=96,
        is_causal=True,
        local_window_size=(60, 0),
        logits_soft_cap=5.0,
        layout=layouts.together(layouts.decoding(96, 60, 40), layouts.sinks),
        cache=Cache(page_size=12),
        return_log_sum_exp=True,
    ),
    "pages-decode": _case(
        B=3,
        T=1,
        S=256,
        N=8,
        H=128,
        is_causal=True,
        layout=layouts.decoding(256, 100, 1),
        cache=Cache(page_size=16),
        dtype="bfloat16",
    ),
    "pages-ragged": _case(
        B=1,
        T=72,
        S=176,
        is_causal=True,
        layout=layouts.ragged(16, (40, 40, 4), (1, 50, 4), (0, 0, 1), (24, 32, 2)),
        cache=Cache(page_size=16),
    ),
    "pages-float8": _case(
        B=2,
        T=1,
        S=128,
        is_causal=True,
        layout=layouts.decoding(128, 70),
        cache=Cache(page_size=16, kv_dtype="float8_e4m3fn", axes=(1, 3)),
    ),
    # the heads before the slots
    "cross-hnd": _case(T=100, S=230, N=8, kv_layout="HND"),
    "decode-hnd": _case(
        T=1, S=513, N=8, is_causal=True, layout=layouts.decoding(513, 200), kv_layout="HND", needs_grad=False
    ),
    "kv-int8-pages-hnd": _case(
        T=1,
        S=128,
        is_causal=True,
        layout=layouts.decoding(128, 70),
        cache=Cache(page_size=16, kv_dtype="int8"),
        kv_layout="HND",
    ),
    "kv-int8": _case(
        T=40,
        S=230,
        is_causal=True,
        layout=layouts.decoding(230, 90),
        cache=Cache(kv_dtype="int8"),
        dtype="bfloat16",
        return_log_sum_exp=True,
    ),
    # values in the keys
    "values-in-keys": _case(N=6, K=1, H=48, Hv=32, is_causal=True, values_in_keys=True),
    "values-in-keys-bfloat16": _case(
        N=8,
        H=40,
        Hv=24,
        dtype="bfloat16",
        layout=_PADDED,
        logits_soft_cap=5.0,
        return_log_sum_exp=True,
        values_in_keys=True,
    ),
    "values-in-keys-decode": _case(
        T=1,
        S=300,
        N=6,
        K=1,
        H=48,
        Hv=32,
        is_causal=True,
        layout=layouts.decoding(300, 90),
        dtype="bfloat16",
        values_in_keys=True,
    ),
    "values-in-keys-pages": _case(
        T=40,
        S=128,
        H=48,
        Hv=32,
        is_causal=True,
        layout=layouts.together(layouts.decoding(128, 70), layouts.sinks),
        cache=Cache(page_size=16, kv_dtype="int8"),
        values_in_keys=True,
    ),
    # dtypes
    **{
        f"{name}-{dtype}": _case(dtype=dtype, **options)
        for dtype in ("bfloat16", "float16")
        for name, options in {
            "causal": {"is_causal": True},
            "cross": {"T": 100, "S": 230, "N": 8},
            "combination": _EVERYTHING,
        }.items()
    },
    "causal-1000-bfloat16": _case(B=1, T=1000, N=2, K=1, H=64, dtype="bfloat16", is_causal=True),
    "window-bfloat16": _case(dtype="bfloat16", local_window_size=(30, 12)),
    "decode-bfloat16": _case(T=1, S=513, dtype="bfloat16", is_causal=True, layout=layouts.decoding(513, 200)),
    # big logits: unscaled scores up to 6.5e4, the end of float16 (float32 rounds such logits by 4e-3, so less there)
    "big-logits-float32": _case(H=64, magnitude=4.0, is_causal=True),
    "big-logits-bfloat16": _case(H=64, magnitude=40.0, dtype="bfloat16", is_causal=True),
    "big-logits-float16": _case(H=64, magnitude=40.0, dtype="float16", is_causal=True),
}


def arrays(case: Case, name: str, dtype: str | None = None) -> tuple[Layout, Terms, Inputs]:
    """The layout, the terms and (query, key, value, cotangent) of a case, seeded by its name."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    B, T, S, N, K, H, Hv = case.sizes
    # jnp.asarray of JAX 0.12 would compile a copy for every shape.
    made = jax.device_put(case.layout(case.sizes, rng))
    terms = Terms(**{field.name: made.pop(field.name, None) for field in dataclasses.fields(Terms)})
    layout = Layout(**made)
    big = case.magnitude
    shapes = (((B, T, N, H), big), ((B, S, K, H), big), ((B, S, K, Hv), 1.0), ((B, T, N, Hv), 1.0))
    # NumPy converts: a conversion by JAX compiles for every shape.
    query, key, value, cotangent = (
        jax.device_put((rng.standard_normal(shape) * size).astype(jnp.dtype(dtype or case.dtype)))
        for shape, size in shapes
    )
    if case.cache is not None:
        layout, terms, key, value = cached(case.cache, layout, terms, key, value, rng)
    if case.options.get("kv_layout") == "HND":
        key, value, of_keys, of_values = (
            None if x is None else jnp.swapaxes(x, 1, 2) for x in (key, value, terms.key_scales, terms.value_scales)
        )
        terms = dataclasses.replace(terms, key_scales=of_keys, value_scales=of_values)
    if "value_head_dim" in case.options:
        value, terms = None, dataclasses.replace(terms, value_scales=None)
    return layout, terms, (query, key, value, cotangent)


def exact(spec: AttentionSpec, layout: Layout, inputs: Inputs, terms: Terms) -> dict[str, np.ndarray]:
    """The oracle's results, by quantity."""
    query, key, value, cotangent = inputs
    found = {"output": oracle.forward(spec, layout, query, key, value, terms)}
    d_lse = None
    if spec.return_log_sum_exp:
        found["log_sum_exp"] = oracle.log_sum_exp(spec, layout, query, key, terms)
        d_lse = cotangent_of_log_sum_exp(cotangent)
    if not spec.needs_grad:
        return found
    return found | oracle.gradients(spec, layout, *inputs, d_log_sum_exp=d_lse, terms=terms)


def solve(spec: AttentionSpec, layout: Layout, inputs: Inputs, terms: Terms = NO_TERMS) -> Problem:
    """The problem of these arrays: the oracle's results and its verdict on the standard backend."""
    query, key, value, cotangent = inputs
    expected = exact(spec, layout, inputs, terms)
    standard_run = functools.partial(traced(STANDARD, spec, Target("cpu")), layout, terms)
    results = standard_run(*inputs)
    standard = {name: judge(name, results[name], expected[name], None, spec) for name in expected}
    return Problem(spec, layout, terms, (query, key, value, cotangent), expected, standard, standard_run)


@functools.cache
def problem(name: str, dtype: str | None = None) -> Problem:
    """The named problem, in its own dtype or another."""
    case = CASES[name]
    layout, terms, inputs = arrays(case, name, dtype)
    return solve(spec_of(case, layout, terms, inputs), layout, inputs, terms)


def spec_of(case: Case, layout: Layout, terms: Terms, inputs: Inputs) -> AttentionSpec:
    """The spec of a case and its arrays."""
    query, key, value, _ = inputs
    return make_spec(query, key, value, layout, terms, **case.options)


def judge(
    name: str,
    actual: jax.Array,
    expected: np.ndarray,
    standard: oracle.Verdict | None,
    spec: AttentionSpec,
    zero: np.ndarray | None = None,
) -> oracle.Verdict:
    """The oracle's verdict on one quantity; the log-sum-exp and the gradient of a bias are float32 in every dtype.

    Where the log-sum-exp is -inf the result has to be so too; the rest of it is judged as a number. A gradient with one
    number per head is judged in the dtype of the input, whose rounding it carries. It is judged by its largest error
    alone, since the root-mean-square error of so few numbers varies as much.
    """
    if name in PER_HEAD:
        largest = None if standard is None else standard.max_error
        actual = actual.astype(spec.dtype) if str(actual.dtype) == "float32" else actual
        return oracle.judge(actual, expected, largest, spec.dtype, "gradient")
    dtype = "float32" if name in ("log_sum_exp", "dbias") else spec.dtype
    if name == "log_sum_exp":
        zero, expected = np.isneginf(expected), np.where(np.isneginf(expected), 0.0, expected)
        given = np.asarray(actual)
        if given.shape == expected.shape:
            given = np.where(zero, np.where(np.isneginf(given), given.dtype.type(0.0), given.dtype.type(1.0)), given)
        return oracle.judge(given, expected, standard, dtype, kind_of(name), zero=zero)
    return oracle.judge(actual, expected, standard, dtype, kind_of(name), zero=zero)


def cotangent_of_log_sum_exp(cotangent: jax.Array) -> jax.Array:
    """That of the output, as far as the log-sum-exp has entries, float32."""
    return cotangent[..., 0].astype(jnp.float32)


def compiled(run: Callable[..., Any], problem: Problem) -> Callable[..., dict[str, jax.Array]]:
    """``run`` as one compiled function of (query, key, value, cotangent) to all quantities of the problem."""
    spec, terms = problem.spec, problem.terms
    if spec.needs_grad:
        return forward_and_backward(run, terms, log_sum_exp=spec.return_log_sum_exp)
    return jax.jit(lambda *inputs: forward_alone(run, inputs, terms))


def forward_and_backward(
    run: Callable[..., Any], terms: Terms = NO_TERMS, *, log_sum_exp: bool = False
) -> Callable[..., dict[str, jax.Array]]:
    """``run(query, key, value)`` as one compiled function of (query, key, value, cotangent) to all quantities.

    Where there are ``terms``, ``run`` takes them as a fourth argument; with ``log_sum_exp`` it returns that too.
    """

    @jax.jit
    def compute(
        query: jax.Array, key: jax.Array, value: jax.Array | None, cotangent: jax.Array
    ) -> dict[str, jax.Array]:
        return differentiate(run, (query, key, value, cotangent), terms, log_sum_exp=log_sum_exp)

    return compute


def forward_alone(run: Callable[..., Any], inputs: Inputs, terms: Terms = NO_TERMS) -> dict[str, Any]:
    """The output of ``run``, and the log-sum-exp where it returns one: no gradient is taken."""
    found = run(*inputs[:3], terms)
    return dict(zip(("output", "log_sum_exp"), found, strict=True)) if isinstance(found, tuple) else {"output": found}


def differentiate(
    run: Callable[..., Any], inputs: Inputs, terms: Terms = NO_TERMS, *, log_sum_exp: bool = False
) -> dict[str, jax.Array]:
    """All quantities of ``run``, not compiled; arguments as of :func:`forward_and_backward`."""
    *operands, cotangent = inputs
    names = terms.given()
    result, pullback = jax.vjp(run, *operands, *((terms,) if names else ()))
    d_lse = cotangent_of_log_sum_exp(cotangent)
    gradients = pullback((cotangent, d_lse) if log_sum_exp else cotangent)
    found = dict(zip(("output", "log_sum_exp"), result, strict=True)) if log_sum_exp else {"output": result}
    found |= {name: x for name, x in zip(("dq", "dk", "dv"), gradients, strict=False) if x is not None}
    return found | {f"d{name}": getattr(gradients[3], name) for name in names}


def planned(
    backend: Backend, problem: Problem, target: Target, mode: Mode = "native", options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """``run(query, key, value, *terms)`` of a plan that is made here, outside of jit, as a model does."""
    made = plan(backend, problem.spec, problem.layout, target=target, mode=mode, options=options)
    return lambda q, k, v, terms=NO_TERMS: made.run(q, k, v, terms=terms)[0]


@functools.cache
def traced(
    backend: Backend,
    spec: AttentionSpec,
    target: Target,
    mode: Mode = "native",
    options: tuple[tuple[str, Any], ...] = (),
) -> Callable[..., dict[str, jax.Array]]:
    """A compiled function of (layout, terms, query, key, value, cotangent) that plans while it is traced."""

    @jax.jit
    def compute(layout: Layout, terms: Terms, *inputs: jax.Array) -> dict[str, jax.Array]:
        made = plan(backend, spec, layout, target=target, mode=mode, options=dict(options))

        def run(q: jax.Array, k: jax.Array, v: jax.Array, terms: Terms = NO_TERMS) -> Any:
            return made.run(q, k, v, terms=terms)[0]

        if not spec.needs_grad:
            return forward_alone(run, inputs, terms)
        return differentiate(run, inputs, terms, log_sum_exp=spec.return_log_sum_exp)

    return compute


def kind_of(quantity: str) -> oracle.Kind:
    """Which of the judge's two bounds a quantity falls under."""
    return "forward" if quantity in ("output", "log_sum_exp") else "gradient"
