"""A few query rows against many keys: the decode step on a CPU, without gradients.

It is the plain formula of ``standard``: with so few rows the scores are linear in the key length, and the time is that
of reading the keys and values. The two products are written in the form that XLA computes at the memory's rate on a
CPU; other forms run at a tenth of it. That form takes heads before slots. A cache that lies the other way, slots before
heads, is read as one matrix of all heads by few rows, each of which has zeros for the heads that are not its own; many
rows would multiply too many zeros, and for them the cache is turned block by block, inside a core's cache.

Values that no row sees, behind the lengths or in other documents, are read as zeros, block by block too, so that NaN in
them reaches no row. A key that is not finite would reach every head by the product of all of them: where scores are
not finite, they are computed again with the heads apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Float

from . import standard
from .contract import Plan, may_attend
from .derivatives import traced_apart
from .devices import Target
from .kv_layout import turned
from .layout import Layout
from .manual_axes import varying
from .operands import Terms
from .spec import AttentionSpec

SHORT_QUERY = 16
_SLOTS = 512  # of a block of values that is copied with zeros where nobody looks, inside a core's cache
_TOGETHER = 16  # rows of all heads up to which one product with all heads beats turning the cache


def takes(spec: AttentionSpec, target: Target) -> bool:
    """Whether :func:`plan` has this problem: on a CPU, a few queries of one document, and no terms but sinks."""
    more = spec.has_alibi or spec.has_bias or spec.score_function is not None
    one_document = spec.query_length == 1 or not spec.has_segment_ids
    return spec.query_length <= SHORT_QUERY and target.platform == "cpu" and one_document and not more


def plan(spec: AttentionSpec, layout: Layout) -> Plan:
    """Plan a decode step without gradients, see :func:`takes`."""
    mask, read = may_attend(spec, layout), None
    if mask is not None and (spec.has_segment_ids or spec.has_seq_lengths):
        read = mask.any((1, 2))
    return Plan.stateless(functools.partial(_attend, spec, mask, read), gradient=False)


def _attend(
    spec: AttentionSpec,
    mask: Bool[Array, "#b #n #t #s"] | None,
    read: Bool[Array, "#b s"] | None,
    query: Float[Array, "b t n h"],
    key: Float[Array, "b _ _ h"],
    value: Float[Array, "b _ _ v"] | None,
    terms: Terms,
) -> Any:
    b, t, n, h = query.shape
    kv_heads, rows = spec.num_kv_heads, spec.group_size * t
    grouped = query.reshape(b, t, kv_heads, -1, h).transpose(0, 2, 3, 1, 4).reshape(b, kv_heads, rows, h)
    value, turned = key if value is None else value, spec.kv_layout == "NHD"
    logits = scores(grouped, key, turned=turned).reshape(b, n, t, -1) * spec.softmax_scale
    if spec.logits_soft_cap is not None:
        logits = spec.logits_soft_cap * jnp.tanh(logits / spec.logits_soft_cap)
    sinks = None if terms.sinks is None else jnp.asarray(terms.sinks, jnp.float32)[None, :, None, None]
    weights, total, top = standard.exponentials(logits, mask, sinks)
    out = weigh(weights.reshape(b, kv_heads, rows, -1), value, read, spec.value_head_dim, turned=turned)
    out = out.reshape(b, kv_heads, -1, t, spec.value_head_dim)
    # The outputs are divided, not the weights, because there are fewer of them.
    out = out / total.reshape(b, kv_heads, -1, t, 1)
    out = out.transpose(0, 3, 1, 2, 4).reshape(b, t, n, -1).astype(query.dtype)
    return (out, standard.log_sum_exp(total, top)) if spec.return_log_sum_exp else out


def differentiated(spec: AttentionSpec, layout: Layout, step: Callable[[Layout], Plan], target: Target) -> Plan:
    """``step(layout)`` of a problem of few queries. A program that differentiates it runs the plain formula instead."""
    arrays, layout_of = traced_apart(layout)

    def kernel(traced: list[Array], learned: dict[str, Array], query: Array, key: Array, value: Array | None) -> Any:
        return step(layout_of(traced)).attend(query, key, value, None, (), Terms(**learned))[0]

    def plain(traced: list[Array], learned: dict[str, Array], query: Array, key: Array, value: Array | None) -> Any:
        made = turned(spec, lambda spec: standard.STANDARD.plan(spec, layout_of(traced), target=target))
        return made.attend(query, key, value, None, (), Terms(**learned))[0]

    run = jax.custom_vjp(kernel)
    run.defvjp(
        lambda traced, *operands: jax.vjp(functools.partial(plain, traced), *operands),
        lambda pull, cotangents: (None, *pull(cotangents)),
    )

    def attend(query: Array, key: Array, value: Array | None, terms: Terms) -> Any:
        return run(arrays, jax.tree.map(jnp.asarray, terms.given()), query, key, value)

    return Plan.stateless(attend, ("gradients of so few queries are those of the plain formula, backend 'standard'.",))


def scores(
    query: Float[Array, "b k r h"], key: Float[Array, "b _ _ h"], *, turned: bool = False
) -> Float[Array, "b k r s"]:
    """Products of each KV head's query rows with its keys, float32. Keys have heads before slots, or are ``turned``."""
    if not turned:
        return _scores(query, key)
    return _scores_of_few(query, key) if _few(query) else _scores_turned(query, key)


@custom_vmap
def _scores_of_few(query: Float[Array, "b k r h"], key: Float[Array, "b s k h"]) -> Float[Array, "b k r s"]:
    together = _scores_together(query, key)
    return lax.cond(jnp.isfinite(together).all(), lambda: together, lambda: _scores_of_finite(query, key))


@_scores_of_few.def_vmap
def _(size: int, mapped: Sequence[bool], query: Array, key: Array) -> tuple[Array, bool]:
    """A larger batch. Mapped as it stands, the conditional would run both of its branches."""
    broadcast = (
        x if one else jnp.broadcast_to(x, (size, *x.shape)) for x, one in zip((query, key), mapped, strict=True)
    )
    found = _scores_of_few(*(x.reshape(-1, *x.shape[2:]) for x in broadcast))
    return found.reshape(size, -1, *found.shape[1:]), True


def _scores_together(query: Float[Array, "b k r h"], key: Float[Array, "b s k h"]) -> Float[Array, "b k r s"]:
    (b, k, r, h), slots = query.shape, key.shape[1]
    same_head = jnp.eye(k, dtype=bool)[None, :, None, :, None]
    rows = jnp.where(same_head, query[:, :, :, None], 0).reshape(b, k * r, k * h)
    every = _as_it_lies(key).reshape(b, slots, k * h)
    found = jnp.einsum("bsx,byx->bsy", every, rows, preferred_element_type=jnp.float32)
    return lax.optimization_barrier(found).swapaxes(1, 2).reshape(b, k, r, slots)


def _scores_of_finite(query: Float[Array, "b k r h"], key: Float[Array, "b s k h"]) -> Float[Array, "b k r s"]:
    """As :func:`_scores_together`, in the same bits, with NaN for the rows whose own key is not finite.

    There such a key, times the zeros of the other heads' rows, would be NaN for these too.
    """
    finite = jnp.isfinite(key)
    finite_keys = jnp.moveaxis(finite.all(-1), 1, 2)[:, :, None]
    return jnp.where(finite_keys, _scores_together(query, jnp.where(finite, key, 0)), jnp.nan)


def _scores_turned(query: Float[Array, "b k r h"], key: Float[Array, "b s k h"]) -> Float[Array, "b k r s"]:
    slots, (blocks, rest) = key.shape[1], divmod(key.shape[1], _SLOTS)

    def of_block(start: Any, width: int) -> Array:
        return _scores(query, lax.dynamic_slice_in_dim(key, start, width, 1).swapaxes(1, 2))

    if not blocks:
        return of_block(0, rest)
    found = lax.map(lambda i: of_block(i * _SLOTS, _SLOTS), jnp.arange(blocks))
    found = jnp.moveaxis(found, 0, 3).reshape(*query.shape[:3], slots - rest)
    return jnp.concatenate([found, of_block(slots - rest, rest)], 3) if rest else found


def _scores(query: Float[Array, "b k r h"], key: Float[Array, "b k s h"]) -> Float[Array, "b k r s"]:
    """The keys are the left operand: as the right operand, with several rows, XLA's kernel packs every key anew.

    The barrier keeps XLA's simplifier from swapping the operands again to save the small transpose.
    """
    rows = query.shape[2]
    if query.dtype != jnp.float32:
        query = _two_rows(query)
    found = jnp.einsum("bksh,bkrh->bksr", key, query, preferred_element_type=jnp.float32)
    return lax.optimization_barrier(found)[..., :rows].swapaxes(2, 3)


def weigh(
    weights: Float[Array, "b k r s"],
    value: Float[Array, "b _ _ d"],
    read: Bool[Array, "#b s"] | None = None,
    value_head_dim: int | None = None,
    *,
    turned: bool = False,
) -> Float[Array, "b k r v"]:
    """Sums of values weighted by float32 ``weights``, which are rounded to the values' dtype; float32.

    Values have heads before slots, or are ``turned``. They are the first ``value_head_dim`` numbers of ``value``; None:
    all. Those that are not ``read`` count as zero, whatever they are.
    """
    rows, slots = weights.shape[2], weights.shape[3]
    few = turned and _few(weights)
    weights = weights.astype(value.dtype) if few else _two_rows(weights.astype(value.dtype))
    if read is None and (few or not turned):
        found = _weighted_together(weights, value) if few else _weighted(weights, value)
        return found[:, :, :rows, :value_head_dim]  # the fewer outputs are cut
    dims = value.shape[3] if value_head_dim is None else value_head_dim

    def of_block(start: Any, width: int) -> Array:
        some = lax.dynamic_slice_in_dim(value, start, width, 1 if turned else 2)[..., :dims]
        some = some.swapaxes(1, 2) if turned and not few else some
        if read is not None:
            seen = lax.dynamic_slice_in_dim(read, start, width, 1)
            some = jnp.where(seen[:, :, None, None] if few else seen[:, None, :, None], some, 0)
        product = _weighted_together if few else _weighted
        return product(lax.dynamic_slice_in_dim(weights, start, width, 3), some)

    blocks, rest = divmod(slots, _SLOTS)
    total = of_block(blocks * _SLOTS, rest) if rest else jnp.zeros((*weights.shape[:3], dims), jnp.float32)
    if blocks:
        total = varying(total, (weights, value, read))
        total = lax.fori_loop(0, blocks, lambda i, total: total + of_block(i * _SLOTS, _SLOTS), total)
    return total[:, :, :rows]


def _weighted(weights: Array, value: Array) -> Array:
    return jnp.einsum("bkrs,bksv->bkrv", weights, value, preferred_element_type=jnp.float32)


def _weighted_together(weights: Float[Array, "b k r s"], value: Float[Array, "b s k v"]) -> Float[Array, "b k r v"]:
    """As :func:`_weighted`, by one product of all heads' rows with all heads' values, of which each keeps its own."""
    (b, k, r, slots), dims = weights.shape, value.shape[3]
    rows, every = weights.reshape(b, k * r, slots), _as_it_lies(value).reshape(b, slots, k * dims)
    found = jnp.einsum("bys,bsx->byx", rows, every, preferred_element_type=jnp.float32)
    return jnp.einsum("bkrkv->bkrv", found.reshape(b, k, r, k, dims))


def _as_it_lies(cache: Array) -> Array:
    """The barrier keeps the reshape out of the fusion that wrote a token into the cache, which would copy all of it."""
    return lax.optimization_barrier(cache)


def _few(rows: Float[Array, "b k r _"]) -> bool:
    """Whether one product with the keys or values of all heads takes less time than turning them.

    Not on several devices: heads that are divided among them would have to be added up.
    """
    return rows.shape[1] > 1 and rows.shape[1] * rows.shape[2] <= _TOGETHER and jax.local_device_count() == 1


def _two_rows(x: Float[Array, "b k r d"]) -> Float[Array, "b k r2 d"]:
    """A single row doubled: for one row XLA writes its own loop, scalar in bfloat16; for two it calls a kernel."""
    return x if x.shape[2] > 1 else jnp.concatenate([x, x], axis=2)
