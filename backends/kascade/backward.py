"""The gradient of sparse attention: exact for the pairs that were attended to. A selection has none.

One query tile after the other, as FlashAttention-2's backward pass (arXiv 2307.08691) does by blocks: the probabilities
of a tile are computed again from the units in its list, and the gradients of those keys and values are added where they
lie. Memory is linear in the sequence length. It is written in XLA for every platform; kernels that have a backward pass
for a problem (``Kernels.attend_with_residuals``) take its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ..contract import AttentionSpec
from ..derivatives import first_derivative, forward_mode_explained, traced_apart
from .kernels import Kernels
from .selection import Selection, TileLayout, with_local
from .settings import Tiling
from .xla import Prefill, heads_and_tiles, tiled, untiled

Attend = Callable[[TileLayout, Array, Array, Array, Selection], Array]


def differentiable(kernels: Kernels) -> Attend:
    """``kernels.attend_selected`` with the gradient of the kernels, or of :func:`gradients`."""

    def run(layout: TileLayout, *operands: Any) -> Array:
        arrays, layout_of = traced_apart(layout)  # kernels read NumPy arrays when they are planned

        def plain(traced: list[Array], query: Array, key: Array, value: Array, selection: Selection) -> Array:
            return kernels.attend_selected(layout_of(traced), query, key, value, selection)

        def forward(traced: list[Array], query: Array, key: Array, value: Array, selection: Selection) -> Any:
            listed = with_local(kernels.tiling, layout_of(traced), selection)
            found = kernels.attend_with_residuals(layout_of(traced), query, key, value, listed)
            out, residuals = found or (plain(traced, query, key, value, selection), None)
            return out, (traced, query, key, value, listed, residuals)

        def backward(saved: Any, d_out: Array) -> Any:
            traced, query, key, value, listed, residuals = saved
            operands = layout_of(traced), query, key, value, listed
            if residuals is None:
                return None, *gradients(kernels.spec, kernels.tiling, *operands, d_out), None
            return None, *kernels.gradients(*operands, residuals, d_out), None

        call = jax.custom_vjp(plain)
        call.defvjp(forward, first_derivative(backward))
        with forward_mode_explained():
            return call(arrays, *operands)

    return run


def gradients(
    spec: AttentionSpec,
    tiling: Tiling,
    layout: TileLayout,
    query: Float[Array, "b t n h"],
    key: Float[Array, "b s k h"],
    value: Float[Array, "b s k v"],
    listed: Int[Array, "b k tiles units"],
    d_out: Float[Array, "b t n v"],
) -> tuple[Float[Array, "b t n h"], Float[Array, "b s k h"], Float[Array, "b s k v"]]:
    """Gradients of query, key and value in their dtypes, for the output's ``d_out``.

    ``listed`` is what :func:`attnsuite.backends.kascade.selection.with_local` gives: the units that each tile visits.
    """
    this, keys, values = Prefill(spec, tiling, layout), _units(key, tiling), _units(value, tiling)
    within = jnp.arange(tiling.unit, dtype=jnp.int32)[None]

    def one_tile(sums: tuple[Array, Array], tile: Any) -> tuple[tuple[Array, Array], Array]:
        head, at, q, d_o, units = tile
        slots = jnp.where(units[:, None] < 0, -1, units[:, None] * tiling.unit + within).reshape(-1)
        seen = jnp.tile(this.seen(this.batch_of(head), at, slots), (spec.group_size, 1))
        units = jnp.maximum(units, 0)
        k, v = (x[head, units].reshape(len(slots), -1) for x in (keys, values))
        d_q, d_k, d_v = _of_tile(spec, q, k, v, d_o, seen)
        return tuple(
            total.at[head, units].add(part.reshape(-1, tiling.unit, part.shape[-1]))
            for total, part in zip(sums, (d_k, d_v), strict=True)
        ), d_q  # pyright: ignore[reportReturnType]  (a pair)

    queries, d_outs = tiled(query, spec, tiling), tiled(d_out, spec, tiling)
    start = jnp.zeros(keys.shape, jnp.float32), jnp.zeros(values.shape, jnp.float32)
    by_tile = *heads_and_tiles(spec, tiling), queries, d_outs, listed.reshape(len(queries), -1)
    (d_key, d_value), d_query = lax.scan(one_tile, start, by_tile)
    return (
        untiled(d_query, spec, tiling).astype(query.dtype),
        _slots(d_key, key.shape).astype(key.dtype),
        _slots(d_value, value.shape).astype(value.dtype),
    )


def _of_tile(
    spec: AttentionSpec, query: Array, key: Array, value: Array, d_out: Array, seen: Array
) -> tuple[Array, Array, Array]:
    """The float32 gradients of the rows of one tile, and of the keys and values that it visits.

    Zero times NaN is NaN: what is not finite is zero in the products, and NaN in the scores of the pairs that are seen,
    so that it reaches no row of another document.
    """
    query, key, value, d_out = (x.astype(jnp.float32) for x in (query, key, value, d_out))
    d_out = jnp.where(seen.any(1, keepdims=True), d_out, 0)
    finite = [jnp.isfinite(x).all(1, keepdims=True) for x in (query, key, value)]
    query, key, value = (jnp.where(good, x, 0) for good, x in zip(finite, (query, key, value), strict=True))
    good_pairs = finite[0] & (finite[1] & finite[2]).T
    scores, cap = (query @ key.T) * spec.softmax_scale, spec.logits_soft_cap
    slope = jnp.float32(spec.softmax_scale)
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
        slope = slope * (1 - (scores / cap) ** 2)
    scores = jnp.where(good_pairs, scores, jnp.nan)
    top = jnp.where(seen, scores, -jnp.inf).max(1, keepdims=True)
    weights = jnp.where(seen, jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0)), 0)
    total = weights.sum(1, keepdims=True)
    probs = jnp.where(seen, weights / jnp.where(total == 0, 1, total), 0)
    d_probs = d_out @ value.T
    d_scores = jnp.where(seen, probs * (d_probs - (probs * d_probs).sum(1, keepdims=True)) * slope, 0)
    return d_scores @ key, d_scores.T @ query, probs.T @ d_out


def _units(x: Float[Array, "b s k d"], tiling: Tiling) -> Float[Array, "bk units unit d"]:
    """Keys or values of each KV head of each sequence, in whole units; zeros where the end cuts one."""
    x = jnp.pad(x, ((0, 0), (0, tiling.units * tiling.unit - x.shape[1]), (0, 0), (0, 0)))
    return x.swapaxes(1, 2).reshape(-1, tiling.units, tiling.unit, x.shape[3])


def _slots(x: Float[Array, "bk units unit d"], shape: tuple[int, ...]) -> Float[Array, "b s k d"]:
    """The inverse."""
    batch, length, kv_heads, dim = shape
    return x.reshape(batch, kv_heads, -1, dim)[:, :, :length].swapaxes(1, 2)
