"""Keep NaN and infinity from the rows that may not see them.

Kernels mask by multiplying with a probability of zero, and zero times NaN is NaN. One bad value behind the length of a
cache, in padding, in another document or in the future would spoil every row of its block. :func:`isolated` wraps the
plan of any backend. It sets rows of query, key and value that are not finite to zero before the backend runs.
Afterwards the output rows that may see such a row become NaN, so that nothing is hidden. These output rows are found in
blocks of query rows, and only if something is not finite. A short query without gradients (a decode step) takes the
time of reading the cache. There the backend runs first, and again on clean arrays if its output is not finite.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

from .contract import AttentionSpec, Layout, Plan, Terms, may_attend, positions

SHORT_QUERY = 16  # rows; so few read the keys once
_PAIRS = 2**22  # query-key pairs that are looked at together


def isolated(spec: AttentionSpec, layout: Layout, made: Plan) -> Plan:
    """``made``, isolated from values that are not finite and not visible; ``made`` itself if nothing is masked.

    An output row is NaN, and passes on no gradient, if its query is not finite or if it may see a key that is not
    finite. A short query without gradients is checked only if the backend's output is not finite. An infinity that a
    soft cap makes finite, or that hides its key from a row, is then left to the backend.
    """
    if not (spec.masks_anything or spec.has_bias):
        return made

    def clean(query: Array, key: Array, value: Array | None, *rest: Any) -> tuple[Any, Any]:
        bad_query = ~jnp.isfinite(query).all(-1)
        bad_key = ~_finite(-1, key, value)
        query = jnp.where(bad_query[..., None], 0, query)
        key, value = jax.tree.map(lambda x: jnp.where(bad_key[..., None], 0, x), (key, value))
        out, carry = made.attend(query, key, value, *rest)
        terms = rest[2] if len(rest) > 2 else Terms()
        spoilt = lax.cond(
            bad_query.any() | bad_key.any(),
            lambda: _spoilt_rows(spec, layout, terms, bad_query, bad_key),
            lambda: jnp.zeros((spec.batch, spec.query_length, spec.num_heads), bool),
        )
        return _on_rows(lambda x, rows: jnp.where(rows, jnp.nan, x), out, spoilt), carry

    def checked(query: Array, key: Array, value: Array | None, *rest: Any) -> tuple[Any, Any]:
        out, carry = made.attend(query, key, value, *rest)
        first = out[0] if spec.return_log_sum_exp else out
        # Heads before length, as a cache holds them: XLA would write a transposed cache to memory to enter a branch.
        cached = jax.tree.map(lambda x: x.swapaxes(1, 2), (key, value))

        def again() -> tuple[Any, Any]:
            return clean(query, *jax.tree.map(lambda x: x.swapaxes(1, 2), cached), *rest)

        return lax.cond(jnp.isfinite(first).all(), lambda: (out, carry), again)

    def attend(query: Array, key: Array, value: Array | None, *rest: Any) -> tuple[Any, Any]:
        short = spec.query_length <= SHORT_QUERY and not spec.needs_grad
        out, carry = (checked if short else clean)(query, key, value, *rest)
        padding = _padding(spec, layout)
        if padding is None:
            return out, carry
        # The output is zero there already; the select keeps these rows' cotangents from other gradients.
        out, *others = out if spec.return_log_sum_exp else (out,)
        out = jnp.where(padding[..., None, None], 0, out)
        return ((out, *others) if others else out), carry

    return dataclasses.replace(made, attend=attend)


def _finite(axis: int, *arrays: Array | None) -> Bool[Array, "..."]:
    """Where all numbers along ``axis`` of the arrays, where not None, are finite."""
    return functools.reduce(jnp.logical_and, [jnp.isfinite(x).all(axis) for x in arrays if x is not None])


def _on_rows(change: Callable[[Array, Array], Array], out: Any, rows: Bool[Array, "b t n"]) -> Any:
    """Apply ``change`` to some rows of the output, and of the log-sum-exp if there is one."""
    if isinstance(out, tuple):
        return change(out[0], rows[..., None]), change(out[1], rows)
    return change(out, rows[..., None])


def _padding(spec: AttentionSpec, layout: Layout) -> Bool[Array, "b t"] | None:
    """Rows that see nothing, as query padding and lengths alone tell."""
    found = []
    if layout.query_segment_ids is not None:
        found.append(jnp.asarray(layout.query_segment_ids) < 0)
    if layout.key_value_seq_lengths is not None:
        found.append(jnp.broadcast_to(jnp.asarray(layout.key_value_seq_lengths)[:, None] <= 0,
                                      (spec.batch, spec.query_length)))  # fmt: skip
    if not found:
        return None
    return found[0] if len(found) == 1 else found[0] | found[1]


def _spoilt_rows(
    spec: AttentionSpec, layout: Layout, terms: Terms, bad_query: Bool[Array, "b t n"], bad_key: Bool[Array, "b s k"]
) -> Bool[Array, "b t n"]:
    """Rows that may see a bad key, and bad rows that may see any key. Linear in memory."""
    length = spec.query_length
    rows = max(1, min(length, _PAIRS // (spec.batch * spec.num_heads * spec.key_value_length)))
    starts = jnp.arange(0, length, rows)
    query_positions, key_positions = (
        jnp.broadcast_to(jnp.asarray(x), (spec.batch, x.shape[1])) for x in positions(spec, layout)
    )
    of_query = {"query_positions": query_positions, "query_segment_ids": layout.query_segment_ids}
    bad_keys = jnp.repeat(bad_key.transpose(0, 2, 1), spec.group_size, axis=1)[:, :, None]  # [b, n, 1, s]

    def part(x: Any, start: Array, axis: int) -> Any:
        """Some rows of an array; the last block overlaps the one before it, where it does not fit."""
        return x if x is None or x.shape[axis] == 1 < length else lax.dynamic_slice_in_dim(x, start, rows, axis)

    def block(start: Array) -> Bool[Array, "b rows n"]:
        start = jnp.minimum(start, length - rows)
        some = dataclasses.replace(
            layout,
            **{name: part(x, start, 1) for name, x in of_query.items()},
            key_value_positions=key_positions,
            mask=part(layout.mask, start, 2),
        )
        visible = may_attend(dataclasses.replace(spec, query_length=rows, has_positions=True), some)
        visible = jnp.ones((1, 1, 1, 1), bool) if visible is None else visible
        if terms.bias is not None:
            visible = visible & ~jnp.isneginf(part(terms.bias, start, 2))
        sees_bad = (visible & bad_keys).any(-1)
        sees_any = jnp.broadcast_to(visible, (*visible.shape[:3], spec.key_value_length)).any(-1)
        bad = lax.dynamic_slice_in_dim(bad_query, start, rows, 1).swapaxes(1, 2)
        return jnp.broadcast_to(sees_bad | (bad & sees_any), (spec.batch, spec.num_heads, rows)).swapaxes(1, 2)

    found = lax.map(block, starts).swapaxes(0, 1)  # [b, blocks, rows, n]
    whole = found[:, :-1].reshape(spec.batch, -1, spec.num_heads)
    missing = length - whole.shape[1]  # of the last block, which ends where the rows do
    return jnp.concatenate([whole, found[:, -1, rows - missing :]], axis=1)
