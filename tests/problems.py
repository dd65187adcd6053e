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

from attnsuite.backends import AttentionSpec, Backend, Layout, Target, Terms, make_spec, oracle, plan
from attnsuite.backends.contract import NO_TERMS
from attnsuite.backends.features import Mode
from attnsuite.backends.standard import STANDARD

QUANTITIES = ("output", "dq", "dk", "dv")  # of every problem; some have log_sum_exp or dbias too
TRAILING = -1  # any negative segment id is padding


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One named problem: sizes ``(batch, query length, key length, heads, KV heads, head_dim, value_head_dim)``."""

    sizes: tuple[int, int, int, int, int, int, int]
    dtype: str
    options: Mapping[str, Any]
    layout: Callable[[tuple[int, ...], np.random.Generator], dict[str, np.ndarray]]
    magnitude: float


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """A case with its arrays and the results to compare with, by quantity.

    The quantities are output, dq, dk and dv, log_sum_exp where the spec asks for it, and dbias where there is a bias.
    ``standard_run`` is the compiled standard backend, kept because compiling is where the suite's time goes.
    """

    spec: AttentionSpec
    layout: Layout
    terms: Terms
    inputs: tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # query, key, value, cotangent of the output
    expected: dict[str, np.ndarray]
    standard: dict[str, oracle.Verdict]
    standard_run: Callable[..., dict[str, jax.Array]]

    @property
    def unseen_rows(self) -> np.ndarray:
        """[batch, query length, heads]: rows that may attend to nothing."""
        return oracle.unseen_rows(self.spec, self.layout, self.terms)

    @property
    def unseen_keys(self) -> np.ndarray:
        """[batch, key length, KV heads]: keys that nobody attends to."""
        return oracle.unseen_keys(self.spec, self.layout, self.terms)


def _no_arrays(sizes: tuple[int, ...], rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {}


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
    layout: Callable[..., dict[str, np.ndarray]] = _no_arrays,
    **options: Any,
) -> Case:
    return Case((B, T, S or T, N, K, H, Hv or H), dtype, options, layout, magnitude)


def _segments(query: list[int], key: list[int] | None = None) -> Callable[..., dict[str, np.ndarray]]:
    """Ids given as [id, count, id, count, ...], the same in every batch entry but the last, which is one segment."""

    def build(sizes: tuple[int, ...], rng: np.random.Generator) -> dict[str, np.ndarray]:
        rows = []
        for runs, length in ((query, sizes[1]), (query if key is None else key, sizes[2])):
            ids = np.repeat(runs[::2], runs[1::2]).astype(np.int32)
            assert len(ids) == length, f"runs {runs} cover {len(ids)} of {length}"
            rows.append(np.stack([ids] * (sizes[0] - 1) + [np.full(length, runs[0], np.int32)]))
        return {"query_segment_ids": rows[0], "key_value_segment_ids": rows[1]}

    return build


def _lengths(*lengths: int) -> Callable[..., dict[str, np.ndarray]]:
    def build(sizes: tuple[int, ...], rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {"key_value_seq_lengths": np.array(lengths, np.int32)}

    return build


def _positions(
    query: Callable[..., np.ndarray] | None, key: Callable[..., np.ndarray] | None = None
) -> Callable[..., dict[str, np.ndarray]]:
    """Positions as a function of the slots on either side, the same in every batch entry."""

    def build(sizes: tuple[int, ...], rng: np.random.Generator) -> dict[str, np.ndarray]:
        sides = (("query_positions", query, sizes[1]), ("key_value_positions", key, sizes[2]))
        return {
            name: np.stack([make(np.arange(length)).astype(np.int32)] * sizes[0])
            for name, make, length in sides
            if make is not None
        }

    return build


def _decoding(*cached: int) -> Callable[..., dict[str, np.ndarray]]:
    """The last T tokens of sequences that fill ``cached`` slots of a longer cache."""

    def build(sizes: tuple[int, ...], rng: np.random.Generator) -> dict[str, np.ndarray]:
        used = np.array(cached, np.int32)
        return {
            "query_positions": (used[:, None] - sizes[1] + np.arange(sizes[1])).astype(np.int32),
            "key_value_seq_lengths": used,
        }

    return build


def _mask(heads: bool, dead_rows: bool = False) -> Callable[..., dict[str, np.ndarray]]:
    def build(sizes: tuple[int, ...], rng: np.random.Generator) -> dict[str, np.ndarray]:
        B, T, S, N = sizes[:4]
        mask = rng.random((B, N, T, S) if heads else (1, 1, T, S)) < 0.3
        if dead_rows:
            mask[:, :, 3:9] = False
        return {"mask": mask}

    return build


def _bias(heads: bool) -> Callable[..., dict[str, np.ndarray]]:
    def build(sizes: tuple[int, ...], rng: np.random.Generator) -> dict[str, np.ndarray]:
        B, T, S, N = sizes[:4]
        return {"bias": rng.standard_normal((B, N, T, S) if heads else (1, N, 1, S)).astype(np.float32)}

    return build


def _closing_bias(sizes: tuple[int, ...], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """-inf for some pairs, and for all pairs of some rows."""
    bias = _bias(heads=True)(sizes, rng)["bias"]
    bias[rng.random(bias.shape) < 0.3] = -np.inf
    bias[:, :, 3:9] = -np.inf
    return {"bias": bias}


def _together(*parts: Callable[..., dict[str, np.ndarray]]) -> Callable[..., dict[str, np.ndarray]]:
    def build(sizes: tuple[int, ...], rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {name: array for part in parts for name, array in part(sizes, rng).items()}

    return build


def _shuffled(slots: np.ndarray) -> np.ndarray:
    return np.random.default_rng(0).permutation(slots)


_PACKED = _segments([0, 50, 1, 70, 2, 40])
_PADDED = _segments([TRAILING, 20, 0, 60, 1, 50, TRAILING, 30])
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
    "decode-1": _case(B=3, T=1, S=513, is_causal=True, layout=_decoding(513, 200, 1)),
    "decode-4": _case(B=3, T=4, S=700, is_causal=True, layout=_decoding(700, 300, 4)),
    "decode-window": _case(B=2, T=1, S=513, is_causal=True, local_window_size=64, layout=_decoding(400, 30)),
    "chunk-of-prefill": _case(B=2, T=64, S=300, is_causal=True, layout=_decoding(300, 150)),
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
    "segments-returning": _case(is_causal=True, layout=_segments([1, 50, 0, 70, 1, 40])),
    "segments-large-ids": _case(is_causal=True, layout=_segments([2**31 - 1, 50, 7, 70, 10**9, 40])),
    "segments-1300": _case(B=2, T=1300, N=2, K=1, is_causal=True, layout=_segments([0, 300, 1, 701, 2, 299])),
    "segments-more-keys": _case(T=100, S=230, layout=_segments([0, 60, 1, 40], [0, 100, 1, 130])),
    "segments-unmatched": _case(layout=_segments([0, 80, 3, 80], [0, 80, 5, 80])),
    "padding-right": _case(is_causal=True, layout=_segments([0, 130, TRAILING, 30])),
    "padding-left": _case(is_causal=True, layout=_segments([TRAILING, 30, 0, 130])),
    "padding-both-ends": _case(layout=_PADDED),
    "padding-many-ids": _case(layout=_segments([-7, 20, 0, 60, 1, 50, -(2**31), 30])),
    "padding-only": _case(layout=_segments([TRAILING, 160])),
    # lengths per batch entry
    "ragged": _case(B=4, layout=_lengths(160, 77, 1, 0)),
    "ragged-causal": _case(B=4, is_causal=True, layout=_lengths(160, 77, 1, 0)),
    "ragged-empty": _case(B=1, layout=_lengths(0)),
    "ragged-beyond-all-keys": _case(B=4, layout=_lengths(300, 161, 160, -3)),
    # positions
    "positions-shifted": _case(is_causal=True, layout=_positions(lambda i: i + 1000, lambda i: i + 1000)),
    "positions-query-ahead": _case(T=100, S=230, is_causal=True, layout=_positions(lambda i: i + 130)),
    "positions-reversed": _case(is_causal=True, layout=_positions(lambda i: i[::-1], lambda i: i[::-1])),
    "positions-shuffled": _case(
        is_causal=True,
        local_window_size=40,
        layout=_positions(_shuffled, _shuffled),
    ),
    "positions-repeated": _case(is_causal=True, layout=_positions(lambda i: i // 3, lambda i: i // 2)),
    "positions-key-only": _case(is_causal=True, layout=_positions(None, lambda i: i * 2)),
    "positions-negative-chunks": _case(
        chunk_size=32, is_causal=True, layout=_positions(lambda i: i - 75, lambda i: i - 75)
    ),
    "rows-before-every-key": _case(is_causal=True, layout=_positions(lambda i: i - 40)),
    # combinations
    "combination": _case(**_EVERYTHING),
    "combination-bidirectional": _case(**{**_EVERYTHING, "is_causal": False, "local_window_size": (24, 9)}),
    "combination-ragged": _case(
        B=3,
        is_causal=True,
        local_window_size=(40, 0),
        layout=_together(_lengths(160, 60, 0), _positions(lambda i: i + 3, lambda i: i)),
    ),
    # mask and bias arrays
    "mask-per-head": _case(layout=_mask(heads=True)),
    "mask-broadcast": _case(is_causal=True, layout=_mask(heads=False)),
    "mask-dead-rows": _case(layout=_mask(heads=True, dead_rows=True)),
    "bias-per-head": _case(layout=_bias(heads=True)),
    "bias-broadcast": _case(is_causal=True, logits_soft_cap=4.0, layout=_bias(heads=False)),
    "bias-of-minus-infinity": _case(layout=_closing_bias),
    "bias-of-minus-infinity-and-mask": _case(layout=_together(_mask(heads=True), _closing_bias)),
    "mask-and-bias": _case(layout=_together(_mask(heads=False, dead_rows=True), _bias(heads=True))),
    "bias-bfloat16": _case(dtype="bfloat16", N=4, K=2, layout=_bias(heads=False)),
    # log-sum-exp
    "log-sum-exp": _case(is_causal=True, return_log_sum_exp=True),
    "log-sum-exp-of-nothing": _case(layout=_PADDED, return_log_sum_exp=True, local_window_size=(30, 4)),
    "log-sum-exp-soft-cap": _case(B=1, T=100, S=230, N=8, logits_soft_cap=5.0, return_log_sum_exp=True),
    "log-sum-exp-decode": _case(
        B=3, T=1, S=513, is_causal=True, layout=_decoding(513, 200, 1), return_log_sum_exp=True
    ),
    "log-sum-exp-bfloat16": _case(dtype="bfloat16", is_causal=True, layout=_PADDED, return_log_sum_exp=True),
    "log-sum-exp-and-bias": _case(
        layout=_together(_mask(heads=False, dead_rows=True), _bias(heads=True)), return_log_sum_exp=True
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
    "decode-bfloat16": _case(T=1, S=513, dtype="bfloat16", is_causal=True, layout=_decoding(513, 200)),
    # big logits: unscaled scores up to 6.5e4, the end of float16 (float32 rounds such logits by 4e-3, so less there)
    "big-logits-float32": _case(H=64, magnitude=4.0, is_causal=True),
    "big-logits-bfloat16": _case(H=64, magnitude=40.0, dtype="bfloat16", is_causal=True),
    "big-logits-float16": _case(H=64, magnitude=40.0, dtype="float16", is_causal=True),
}


def arrays(case: Case, name: str, dtype: str | None = None) -> tuple[Layout, Terms, tuple[jax.Array, ...]]:
    """The layout, the terms and (query, key, value, cotangent) of a case, seeded by its name."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    B, T, S, N, K, H, Hv = case.sizes
    made = {key: jnp.asarray(x) for key, x in case.layout(case.sizes, rng).items()}
    terms = Terms(bias=made.pop("bias", None))
    layout = Layout(**made)
    big = case.magnitude
    shapes = (((B, T, N, H), big), ((B, S, K, H), big), ((B, S, K, Hv), 1.0), ((B, T, N, Hv), 1.0))
    # NumPy converts: a conversion by JAX compiles for every shape.
    return (
        layout,
        terms,
        tuple(
            jnp.asarray((rng.standard_normal(shape) * size).astype(jnp.dtype(dtype or case.dtype)))
            for shape, size in shapes
        ),
    )


def exact(spec: AttentionSpec, layout: Layout, inputs: tuple[jax.Array, ...], terms: Terms) -> dict[str, np.ndarray]:
    """The oracle's results, by quantity."""
    query, key, value, cotangent = inputs
    found = {"output": oracle.forward(spec, layout, query, key, value, terms)}
    d_lse = None
    if spec.return_log_sum_exp:
        found["log_sum_exp"] = oracle.log_sum_exp(spec, layout, query, key, terms)
        d_lse = cotangent_of_log_sum_exp(cotangent)
    return found | oracle.gradients(spec, layout, *inputs, d_log_sum_exp=d_lse, terms=terms)


def solve(spec: AttentionSpec, layout: Layout, inputs: tuple[jax.Array, ...], terms: Terms = NO_TERMS) -> Problem:
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
    return solve(make_spec(*inputs[:3], layout, terms, **case.options), layout, inputs, terms)


def judge(
    name: str,
    actual: jax.Array,
    expected: np.ndarray,
    standard: oracle.Verdict | None,
    spec: AttentionSpec,
    zero: np.ndarray | None = None,
) -> oracle.Verdict:
    """The oracle's verdict on one quantity; the log-sum-exp and the gradient of a bias are float32 in every dtype.

    Where the log-sum-exp is -inf the result has to be so too; the rest of it is judged as a number.
    """
    dtype = "float32" if name in ("log_sum_exp", "dbias") else spec.dtype
    if name == "log_sum_exp":
        zero, expected = np.isneginf(expected), np.where(np.isneginf(expected), 0.0, expected)
        given = np.asarray(actual)
        if given.shape == expected.shape:
            given = np.where(zero, np.where(np.isneginf(given), given.dtype.type(0.0), given.dtype.type(1.0)), given)
        actual = given
    return oracle.judge(actual, expected, standard, dtype, kind_of(name), zero=zero)


def cotangent_of_log_sum_exp(cotangent: jax.Array) -> jax.Array:
    """That of the output, as far as the log-sum-exp has entries, float32."""
    return cotangent[..., 0].astype(jnp.float32)


def forward_and_backward(
    run: Callable[..., Any], terms: Terms = NO_TERMS, *, log_sum_exp: bool = False
) -> Callable[..., dict[str, jax.Array]]:
    """``run(query, key, value)`` as one compiled function of (query, key, value, cotangent) to all quantities.

    Where there are ``terms``, ``run`` takes them as a fourth argument; with ``log_sum_exp`` it returns that too.
    """

    @jax.jit
    def compute(query: jax.Array, key: jax.Array, value: jax.Array, cotangent: jax.Array) -> dict[str, jax.Array]:
        return differentiate(run, (query, key, value, cotangent), terms, log_sum_exp=log_sum_exp)

    return compute


def differentiate(
    run: Callable[..., Any], inputs: tuple[jax.Array, ...], terms: Terms = NO_TERMS, *, log_sum_exp: bool = False
) -> dict[str, jax.Array]:
    """All quantities of ``run``, not compiled; arguments as of :func:`forward_and_backward`."""
    *operands, cotangent = inputs
    names = terms.given()
    result, pullback = jax.vjp(run, *operands, *((terms,) if names else ()))
    d_lse = cotangent_of_log_sum_exp(cotangent)
    gradients = pullback((cotangent, d_lse) if log_sum_exp else cotangent)
    found = dict(zip(("output", "log_sum_exp"), result, strict=True)) if log_sum_exp else {"output": result}
    found |= dict(zip(("dq", "dk", "dv"), gradients, strict=False))
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

        return differentiate(run, inputs, terms, log_sum_exp=spec.return_log_sum_exp)

    return compute


def kind_of(quantity: str) -> oracle.Kind:
    """Which of the judge's two bounds a quantity falls under."""
    return "forward" if quantity in ("output", "log_sum_exp") else "gradient"
