"""A few query rows against many keys: the decode step on a CPU, without gradients.

It is the plain formula of ``standard``: with so few rows the scores are linear in the key length, and the time is that
of reading the keys and values. The two products are written in the form that XLA computes at the memory's rate on a
CPU; other forms run at a tenth of it. That form takes heads before slots: a cache that lies the other way is turned
block by block, inside a core's cache. Values that no row sees, behind the lengths or in other documents, are read as
zeros, block by block too, so that NaN in them reaches no row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from . import standard
from .contract import Plan, may_attend
from .devices import Target
from .kv_layout import turned
from .layout import Layout
from .manual_axes import varying
from .operands import EitherArray, Terms
from .spec import AttentionSpec

SHORT_QUERY = 16
_SLOTS = 512  # of a block of values that is copied with zeros where nobody looks, inside a core's cache


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
    return Plan.stateless(functools.partial(_attend, spec, mask, read))


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
    # JAX builds the tree of an argument from placeholders too, which are no arrays: lists and dicts take them.
    leaves, tree = jax.tree.flatten(layout)

    def kernel(
        given: list[EitherArray], learned: dict[str, Array], query: Array, key: Array, value: Array | None
    ) -> Any:
        return step(tree.unflatten(given)).attend(query, key, value, None, (), Terms(**learned))[0]

    def plain(
        given: list[EitherArray], learned: dict[str, Array], query: Array, key: Array, value: Array | None
    ) -> Any:
        made = turned(spec, lambda spec: standard.STANDARD.plan(spec, tree.unflatten(given), target=target))
        return made.attend(query, key, value, None, (), Terms(**learned))[0]

    run = jax.custom_vjp(kernel)
    run.defvjp(
        lambda given, *operands: jax.vjp(functools.partial(plain, given), *operands),
        lambda pull, cotangents: (None, *pull(cotangents)),
    )

    def attend(query: Array, key: Array, value: Array | None, terms: Terms) -> Any:
        learned = {name: jnp.asarray(getattr(terms, name)) for name in terms.given()}
        return run(leaves, learned, query, key, value)

    return Plan.stateless(attend, ("gradients of so few queries are those of the plain formula, backend 'standard'.",))


def scores(
    query: Float[Array, "b k r h"], key: Float[Array, "b _ _ h"], *, turned: bool = False
) -> Float[Array, "b k r s"]:
    """Products of each KV head's query rows with its keys, float32. Keys have heads before slots, or are ``turned``."""
    if not turned:
        return _scores(query, key)
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
    weights = _two_rows(weights.astype(value.dtype))
    if read is None and not turned:
        return _weighted(weights, value)[:, :, :rows, :value_head_dim]  # the fewer outputs are cut
    dims = value.shape[3] if value_head_dim is None else value_head_dim

    def of_block(start: Any, width: int) -> Array:
        some = lax.dynamic_slice_in_dim(value, start, width, 1 if turned else 2)[..., :dims]
        some = some.swapaxes(1, 2) if turned else some
        if read is not None:
            some = jnp.where(lax.dynamic_slice_in_dim(read, start, width, 1)[:, None, :, None], some, 0)
        return _weighted(lax.dynamic_slice_in_dim(weights, start, width, 3), some)

    blocks, rest = divmod(slots, _SLOTS)
    total = of_block(blocks * _SLOTS, rest) if rest else jnp.zeros((*weights.shape[:3], dims), jnp.float32)
    if blocks:
        total = varying(total, (weights, value, read))
        total = lax.fori_loop(0, blocks, lambda i, total: total + of_block(i * _SLOTS, _SLOTS), total)
    return total[:, :, :rows]


def _weighted(weights: Array, value: Array) -> Array:
    return jnp.einsum("bkrs,bksv->bkrv", weights, value, preferred_element_type=jnp.float32)


def _two_rows(x: Float[Array, "b k r d"]) -> Float[Array, "b k r2 d"]:
    """A single row doubled: for one row XLA writes its own loop, scalar in bfloat16; for two it calls a kernel."""
    return x if x.shape[2] > 1 else jnp.concatenate([x, x], axis=2)
