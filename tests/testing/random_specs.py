"""Random problems that combine all features of the contract, forward and gradients held to the oracle by the judge.

Each problem is drawn from a seed of its own, so that one that fails is had again by its number alone:
``attnsuite judge chunked --random 1 --first 17 --seed 0``. What a backend does not take at all is left out of its
problems. ``python -m attnsuite.testing.random_specs flash_cpu`` counts the problems of the whole contract that a
backend does not take, by their reasons.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnsuite.backends import (
    AttentionSpec,
    Backend,
    Layout,
    Target,
    Terms,
    make_spec,
    masks,
    oracle,
    registry,
    support,
)
from attnsuite.backends.features import FEATURES, KV_DTYPES, Feature, Mode
from attnsuite.backends.kv_cache import is_cache
from attnsuite.backends.support import takes_of

from . import checks, orders, problems
from .caches import Cache, cached
from .cases import leaning
from .problems import Problem

_TRIES, _ALIKE = 2000, 50
_LARGEST_LOGIT = 140.0  # float32 rounds larger ones by more than the absolute bound of the judge
# Feature -> the option that asks for it, and the value that does not.
_OFF: Mapping[Feature, tuple[str, Any]] = {
    "causal": ("is_causal", False),
    "bidirectional": ("is_causal", True),
    "window": ("local_window_size", None),
    "chunk": ("chunk_size", None),
    "soft_cap": ("logits_soft_cap", None),
    "scale": ("scale", None),
    "gradient": ("needs_grad", False),
    "log_sum_exp": ("return_log_sum_exp", False),
}
_ARRAYS: Mapping[Feature, tuple[str, ...]] = {
    "segments": ("query_segment_ids", "key_value_segment_ids"),
    "positions": ("query_positions", "key_value_positions"),
    "lengths": ("key_value_seq_lengths",),
    "mask": ("mask",),
}
_BLOCKS = (8, 16, 24, 32, 40, 64, 72, 128)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """One problem: what is static, where the tokens stand, the arrays, and the options that the backend is given."""

    spec: AttentionSpec
    layout: Layout
    terms: Terms
    inputs: tuple[Any, ...]
    options: Mapping[str, Any]
    traced: bool  # the layout is an argument of the compiled function
    largest_logit: float
    spoilt: float | None  # what stands where nobody may look: NaN, infinity, or nothing special

    def __str__(self) -> str:
        plain = {field.name: getattr(self.spec, field.name) for field in dataclasses.fields(self.spec)}
        fields = {name: x for name, x in plain.items() if x not in (None, False)}
        how = f"options={dict(self.options)} traced={self.traced} unseen={self.spoilt}"
        return f"{fields} {how} largest logit {self.largest_logit:.0f}"


def draw(
    number: int, seed: int, backend: Backend, target: Target, mode: Mode, options: Mapping[str, Any] | None = None
) -> Drawn:
    """Problem ``number`` of ``seed`` that the backend takes.

    Raises RuntimeError where it takes none of 2,000; with the reason where one stands against each of the first 50,
    since such a reason is of the device, not of the problem.
    """
    rng = np.random.default_rng((seed, number))
    taken = takes_of(backend, target, mode).features
    isolates = backend.name in checks.ISOLATING
    against: set[str] = set()
    for tried in range(_TRIES):
        drawn = _draw(rng, taken, has_blocks=backend.name == "chunked", isolates=isolates)
        drawn = dataclasses.replace(drawn, options={**drawn.options, **(options or {})})
        found = support(backend, drawn.spec, target, mode, drawn.options)
        if found:
            return drawn
        against = against.intersection(found.reasons) if tried else set(found.reasons)
        if tried + 1 >= _ALIKE and against:
            raise RuntimeError(min(against))
    raise RuntimeError(f"{backend.name} refused all of {_TRIES} random problems.")


def unsupported(backend: Backend, count: int, seed: int, target: Target) -> list[tuple[str, ...]]:
    """The reasons of each of ``count`` problems of the whole contract that the backend does not take."""
    rngs = (np.random.default_rng((seed, number)) for number in range(count))
    drawn = (_draw(rng, frozenset(FEATURES), has_blocks=False, isolates=False) for rng in rngs)
    return [found.reasons for x in drawn if not (found := support(backend, x.spec, target))]


def _draw(rng: np.random.Generator, taken: frozenset[Feature], *, has_blocks: bool, isolates: bool) -> Drawn:
    def sometimes(probability: float) -> bool:
        return bool(rng.random() < probability)

    dtype = str(rng.choice(["float32", "float32", "bfloat16", "float16"]))
    B, K = (int(rng.integers(1, 4)) for _ in range(2))
    T, S = (int(rng.choice([rng.integers(1, 20), rng.integers(20, 200)], p=[0.2, 0.8])) for _ in range(2))
    S = T if sometimes(0.4) or "cross_length" not in taken else S
    H = int(rng.choice([int(rng.integers(1, 80)), 32, 64]))
    Hv = int(rng.integers(1, 80)) if sometimes(0.3) else H
    Hv = Hv if "value_head_dim" in taken else H
    group = int(rng.integers(1, 5))
    N = K * group if "grouped_queries" in taken else K
    options: dict[str, Any] = {
        "is_causal": sometimes(0.6),
        "local_window_size": (int(rng.integers(0, T + 9)), int(rng.integers(0, S + 9))) if sometimes(0.3) else None,
        "chunk_size": int(rng.integers(1, S + 9)) if sometimes(0.2) else None,
        "logits_soft_cap": float(rng.choice([1.5, 5.0, 30.0])) if sometimes(0.2) else None,
        "scale": float(rng.uniform(0.05, 0.5)) if sometimes(0.2) else None,
        "needs_grad": not sometimes(0.15),
        "return_log_sum_exp": sometimes(0.15),
    }
    options |= {name: off for feature, (name, off) in _OFF.items() if feature not in taken}
    layout, terms = _only(taken, *_arrays(rng, sometimes, B, T, S, N))
    magnitudes = [float(rng.choice([1.0, 1.0, 4.0])) for _ in range(2)]
    shapes = (((B, T, N, H), magnitudes[0]), ((B, S, K, H), magnitudes[1]), ((B, S, K, Hv), 1.0), ((B, T, N, Hv), 1.0))
    query, *others = (rng.standard_normal(shape) * size for shape, size in shapes)
    scale = options["scale"] or H**-0.5
    largest = float(np.abs(np.einsum("btnh,bsnh->bnts", query, np.repeat(others[0], N // K, 2))).max()) * scale
    query *= min(1.0, _LARGEST_LOGIT / largest)
    query, key, value, cotangent = (x.astype(jnp.dtype(dtype)) for x in (query, *others))
    spec = make_spec(query, key, value, layout, terms, **options)
    blocks = {}
    if has_blocks and sometimes(0.8):
        blocks = {name: int(rng.choice(_BLOCKS)) for name in ("block_q", "block_kv", "block_backward")}
        blocks["heads_per_tile"] = int(rng.integers(1, 5))
    spoilt = float(rng.choice([np.nan, np.inf, -np.inf])) if sometimes(0.4) else None
    spoilt = spoilt if isolates else None
    arrays: tuple[Any, ...] = tuple(map(jax.device_put, (query, key, value, cotangent)))
    traced = sometimes(0.5)
    if "sinks" in taken and sometimes(0.15):
        spec = dataclasses.replace(spec, has_sinks=True)
        terms = dataclasses.replace(terms, sinks=jax.device_put(rng.uniform(-3.0, largest, N).astype(np.float32)))
    if "mask_function" in taken and sometimes(0.15):
        function = masks.Dilated(int(rng.integers(1, 5))) | masks.Neighbourhood(*map(int, rng.integers(2, 12, 2)))
        spec = dataclasses.replace(spec, mask_function=function & ~masks.Prefix(int(rng.integers(0, 20))))
    if "score_function" in taken and sometimes(0.1):
        spec = dataclasses.replace(spec, score_function=leaning)
    if {"pages", "kv_dtype"} <= taken and sometimes(0.2):
        cache = _cache(rng, sometimes, S)
        layout, terms, *stored = cached(cache, layout, terms, arrays[1], arrays[2], rng)
        arrays = arrays[0], *stored, arrays[3]
        pages = {} if cache.page_size is None else dict(zip(("num_pages", "page_size"), stored[0].shape, strict=False))
        spec = dataclasses.replace(spec, needs_grad=False, kv_dtype=cache.kv_dtype, **pages)
    if "values_in_keys" in taken and Hv <= H and sometimes(0.15):
        spec, terms = dataclasses.replace(spec, values_in_keys=True), dataclasses.replace(terms, value_scales=None)
        arrays = arrays[0], arrays[1], None, arrays[3]
    # No slopes: where the visible keys of each row are equally far, their gradient is exactly zero, as a bias's above.
    return Drawn(spec, layout, terms, arrays, blocks, traced, min(largest, _LARGEST_LOGIT), spoilt)


def _cache(rng: np.random.Generator, sometimes: Any, length: int) -> Cache:
    """Pages of any size, quantised numbers, or both."""
    sizes = [size for size in range(1, length + 1) if length % size == 0]
    page_size = int(rng.choice(sizes)) if sometimes(0.7) else None
    kv_dtype = str(rng.choice(KV_DTYPES)) if page_size is None or sometimes(0.5) else None
    return Cache(page_size, kv_dtype, axes=(3,) if sometimes(0.5) else (1, 3))


def _only(taken: frozenset[Feature], layout: Layout, terms: Terms) -> tuple[Layout, Terms]:
    """The arrays without those of features that are not taken."""
    left_out = {name: None for feature, names in _ARRAYS.items() if feature not in taken for name in names}
    return dataclasses.replace(layout, **left_out), terms if "bias" in taken else Terms()


def _arrays(rng: np.random.Generator, sometimes: Any, B: int, T: int, S: int, N: int) -> tuple[Layout, Terms]:
    """The arrays of a layout, and a bias, each with a probability of its own."""

    def ids(length: int) -> np.ndarray:
        runs = [(rng.choice([-1, -7, 0, 1, 2, 2**31 - 1]), rng.integers(1, length + 1)) for _ in range(6)]
        return np.resize(np.concatenate([np.full(count, name) for name, count in runs]), length)

    def positions(length: int) -> np.ndarray:
        start, step = rng.integers(-20, 60), rng.choice([-1, 0, 1, 1, 2])
        row = start + step * np.arange(length)
        return rng.permutation(row) if sometimes(0.3) else row

    def rows(make: Any, length: int) -> jax.Array:
        return jax.device_put(np.stack([make(length) for _ in range(B)]).astype(np.int32))

    def broadcastable() -> tuple[int, ...]:
        return (*(size if sometimes(0.6) else 1 for size in (B, N, T)), S)

    arrays: dict[str, jax.Array] = {}
    if sometimes(0.3):
        arrays["query_segment_ids"] = rows(ids, T)
        arrays["key_value_segment_ids"] = arrays["query_segment_ids"] if T == S and sometimes(0.7) else rows(ids, S)
    if sometimes(0.3):
        arrays["query_positions"] = rows(positions, T)
    if sometimes(0.3):
        arrays["key_value_positions"] = rows(positions, S)
    if sometimes(0.3):
        arrays["key_value_seq_lengths"] = jax.device_put(rng.integers(-3, S + 40, B).astype(np.int32))
    if sometimes(0.15):
        arrays["mask"] = jax.device_put(rng.random(broadcastable()) < rng.choice([0.1, 0.5, 0.9]))
    # A bias that is the same for all keys has a gradient of exactly zero, relative to which nothing can be judged.
    if S > 1 and sometimes(0.15):
        bias = rng.standard_normal(broadcastable()).astype(np.float32)
        if sometimes(0.5):
            bias[rng.random(bias.shape) < 0.4] = -np.inf
        return Layout(**arrays), Terms(bias=jax.device_put(bias))
    return Layout(**arrays), Terms()


def solved(drawn: Drawn) -> Problem:
    """The problem with the oracle's results, gradients too where there can be any."""
    wide = dataclasses.replace(drawn.spec, needs_grad=not is_cache(drawn.spec))
    return problems.solve(wide, drawn.layout, drawn.inputs, drawn.terms)


def results(drawn: Drawn, problem: Problem, backend: Backend, target: Target, mode: Mode) -> dict[str, jax.Array]:
    """What the backend computes: the output, and the gradients where the spec asks for them."""
    compute = problems.planning(backend, drawn.spec, target, mode, drawn.options)
    inputs = _spoilt(drawn, problem)
    if drawn.traced:
        return jax.jit(compute)(drawn.layout, drawn.terms, *inputs)
    return jax.jit(functools.partial(compute, drawn.layout, drawn.terms))(*inputs)


def _spoilt(drawn: Drawn, problem: Problem) -> tuple[jax.Array, ...]:
    """The arrays, with NaN or infinity in what lengths, padding and documents hide: keys, values and queries."""
    if drawn.spoilt is None:
        return drawn.inputs
    query, key, value, cotangent = drawn.inputs
    hidden, blind = problem.hidden_keys[..., None], problem.hidden_rows[..., None]
    if key.dtype != jnp.int8:
        key, value = jax.tree.map(lambda x: jnp.where(hidden, jnp.asarray(drawn.spoilt, x.dtype), x), (key, value))
    return jnp.where(blind, jnp.asarray(drawn.spoilt, query.dtype), query), key, value, cotangent


def verdicts(drawn: Drawn, backend: Backend, target: Target, mode: Mode) -> dict[str, oracle.Verdict]:
    """The judge's verdict on each quantity; where one fails, that of the worst of several orders of the same sums."""
    problem = solved(drawn)
    return orders.verdicts(problem, results(drawn, problem, backend, target, mode))


def share(verdict: oracle.Verdict) -> float:
    """How much of what the judge allows was used: above 1 fails, infinite where a rule is broken."""
    used = max(verdict.max_error / verdict.allowed, verdict.rms_error / verdict.allowed_rms)
    return used if verdict.passed or used > 1 else math.inf


if __name__ == "__main__":
    for name in sys.argv[1:]:
        found = unsupported(registry.get(name), 248, 0, Target.here())
        sys.stdout.write(f"{name}: {len(found)} of 248 problems are unsupported\n")
        for reason, times in Counter(reason for reasons in found for reason in reasons).most_common():
            sys.stdout.write(f"{times:4}  {reason}\n")
