"""Attention by the formula, in XLA: the scores are materialised.

It is the baseline of every comparison, and its rounding error is the judge's yardstick. Memory grows with query length
times key length. Gradients are JAX's own, of every kind and order. Runs on every platform and refuses nothing of the
contract, which says where NaN stays out of rows (``contract.py``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from . import kv_cache
from .contract import Plan, check_options, may_attend, positions
from .devices import Target
from .features import ALL_FEATURES, DTYPES, Mode, Options, Takes
from .layout import Layout, unread_slots, unseeing_rows
from .operands import Terms
from .spec import AttentionSpec


@dataclasses.dataclass(frozen=True, slots=True)
class Standard:
    """The ``standard`` backend."""

    name: str = "standard"
    exact: bool = True

    def takes(self, target: Target, mode: Mode) -> Takes:
        """Everything in the contract, natively or compiled."""
        return Takes(
            features=ALL_FEATURES,
            dtypes=DTYPES,
            modes=("native", "compile"),
            because={"mode": "which is plain XLA without a kernel to interpret"},
        )

    def plan(
        self, spec: AttentionSpec, layout: Layout, *, target: Target, mode: Mode = "native", options: Options = None
    ) -> Plan:
        """Build the mask once; there are no options."""
        check_options(self.name, options, {})
        if kv_cache.is_cache(spec):
            return kv_cache.gathered(spec, layout, functools.partial(self.plan, target=target, mode=mode))
        return Plan.stateless(_formula(spec, layout, target))


def _formula(spec: AttentionSpec, layout: Layout, target: Target) -> Callable[..., Any]:
    """A function of query, key, value and terms.

    Every product has the axes ``b k g t s``: batch, KV head, query head of its group, query, key. No axis is ever
    merged with another, so that JAX can follow each over a mesh, and only query and output are transposed, never the
    scores. Where ``heads_first`` holds, heads come before lengths in each product: XLA's products for a CPU want that,
    and it cancels the transpose of a cache stored so. For a TPU XLA moves fewer bytes when it may choose.
    """
    pairs = may_attend(spec, layout)
    pairs = None if pairs is None else _by_group(spec, pairs)
    q_pos, k_pos = (jnp.asarray(x)[:, None, None] for x in positions(spec, layout))
    apart = jnp.abs(q_pos[..., None] - k_pos[..., None, :]) if spec.has_alibi else None
    # For one row XLA's loop on a CPU adds the values one after the other, which loses digits over a long cache, and
    # takes longer; for two it calls a kernel.
    doubled = target.platform == "cpu" and spec.query_length * spec.group_size == 1
    heads_first = target.platform != "tpu"

    def attend(
        query: Float[Array, "b t n h"],
        key: Float[Array, "b s k h"],
        value: Float[Array, "b s k v"] | None,
        terms: Terms,
    ) -> Any:
        mask = pairs
        b, t, n, h = query.shape
        wide = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
        query, key, value, spoilt = without_unread(spec, layout, query, key, value)
        grouped, rows, keys = query.reshape(b, t, spec.num_kv_heads, spec.group_size, h), "btkgh", "bskh"
        # Values that are a part of the keys are not cut out, which would copy them: the fewer outputs are cut.
        value = key if value is None else value
        if heads_first:
            grouped, rows = grouped.transpose(0, 2, 3, 1, 4), "bkgth"
            key, value, keys = key.swapaxes(1, 2), value.swapaxes(1, 2), "bksh"
        logits = jnp.einsum(f"{rows},{keys}->bkgts", grouped, key, preferred_element_type=wide) * spec.softmax_scale
        if spec.logits_soft_cap is not None:
            logits = spec.logits_soft_cap * jnp.tanh(logits / spec.logits_soft_cap)
        logits = _modified(spec, layout, logits)
        if terms.bias is not None:
            logits = logits + _by_group(spec, jnp.asarray(terms.bias)).astype(wide)
        if terms.alibi is not None and apart is not None:
            logits = logits - _per_head(spec, terms.alibi, wide) * apart.astype(wide)
        logits = logits if spoilt is None else logits + spoilt
        if terms.bias is not None or spec.score_function is not None:  # they may hide pairs by -inf
            visible = ~jnp.isneginf(logits)
            mask = visible if mask is None else mask & visible
        if terms.sinks is None and not spec.return_log_sum_exp:  # in the form that XLA knows as one operation
            masked = logits if mask is None else jnp.where(mask, logits, jnp.finfo(wide).min)
            probs, of_rows = jax.nn.softmax(masked, axis=-1), None
        else:
            sinks = None if terms.sinks is None else _per_head(spec, terms.sinks, wide)
            weights, total, top = exponentials(logits, mask, sinks)
            probs, of_rows = weights / total, log_sum_exp(total, top)
        # A row that sees NaN is NaN, but has no gradient for other documents.
        probs = probs if spoilt is None or mask is None else jnp.where(mask, probs, 0)
        weighed = _weigh(jnp.concatenate([probs, probs], 3) if doubled else probs, value, keys)
        out = weighed[..., :t, : spec.value_head_dim].astype(query.dtype)
        if mask is not None and _may_hide_rows(spec):
            out = jnp.where(mask.any(-1, keepdims=True), out, 0)
        out = out.transpose(0, 3, 1, 2, 4).reshape(b, t, n, spec.value_head_dim)
        return (out, of_rows) if spec.return_log_sum_exp else out

    return attend


def _may_hide_rows(spec: AttentionSpec) -> bool:
    """Whether a row may see nothing. Where both sides count from zero, each row sees the key at its own position."""
    by_arrays = spec.has_mask or spec.has_segment_ids or spec.has_seq_lengths or spec.has_positions
    by_functions = spec.mask_function is not None or spec.score_function is not None or spec.has_bias
    beyond = spec.query_length > spec.key_value_length and (spec.local_window_size or spec.chunk_size)
    return bool(by_arrays or by_functions or beyond)


def _by_group(spec: AttentionSpec, x: Array) -> Array:
    """``[b, n, t, s]`` as ``[b, k, g, t, s]``; any axis may be one."""
    b, n, t, s = x.shape
    return x.reshape(b, 1, 1, t, s) if n == 1 else x.reshape(b, spec.num_kv_heads, spec.group_size, t, s)


def _per_head(spec: AttentionSpec, x: Any, dtype: Any) -> Float[Array, "1 k g 1 1"]:
    return jnp.asarray(x, dtype).reshape(1, spec.num_kv_heads, spec.group_size, 1, 1)


def _modified(spec: AttentionSpec, layout: Layout, logits: Float[Array, "b k g t s"]) -> Float[Array, "b k g t s"]:
    """What the score function makes of all logits of a call, head ``k * group_size + g``; quadratic, as they are."""
    if spec.score_function is None:
        return logits
    batch, head = (jnp.arange(n, dtype=jnp.int32) for n in (spec.batch, spec.num_heads))
    batch, head = batch.reshape(-1, 1, 1, 1, 1), head.reshape(1, spec.num_kv_heads, -1, 1, 1)
    q_pos, k_pos = (jnp.asarray(x)[:, None, None] for x in positions(spec, layout))
    return spec.score_function(logits, batch, head, q_pos[..., None], k_pos[..., None, :])


def without_unread(
    spec: AttentionSpec, layout: Layout, query: Array, key: Array, value: Array | None
) -> tuple[Array, Array, Array | None, Float[Array, "b k g t s"] | None]:
    """Query, key and value without the numbers that could spoil rows which may not see them; and what spoils the rest.

    A probability of zero times NaN is NaN, forward and backward. What lengths hide is zero by the layout. Who sees
    which document varies from row to row: there a row of query, key or value that is not finite is set to zero, and the
    last result puts NaN into its logits, which the mask hides from the rows of other documents. Costs are linear in the
    length. With neither lengths nor segments nothing is done: a causal mask does not hide NaN in later keys.
    """
    if not (spec.has_segment_ids or spec.has_seq_lengths):
        return query, key, value, None
    hidden: tuple[Any, Any] = unread_slots(spec, layout), unseeing_rows(layout)
    keys, rows = (x[..., None, None] for x in hidden)
    spoilt = None
    if spec.has_segment_ids:
        finite = [jnp.isfinite(x).all(-1, keepdims=True) for x in (query, key, value) if x is not None]
        bad_key = functools.reduce(jnp.logical_or, (~x for x in finite[1:]))  # [b, s, k, 1]
        bad_query = ~finite[0]
        keys, rows = keys | bad_key, rows | bad_query
        by_group = bad_query.reshape(*bad_query.shape[:2], spec.num_kv_heads, spec.group_size)
        seen = by_group.transpose(0, 2, 3, 1)[..., None] | bad_key.transpose(0, 2, 3, 1)[:, :, :, None]
        spoilt = jnp.where(seen, jnp.nan, 0.0)
    value = jnp.where(keys, 0, key[..., : spec.value_head_dim] if value is None else value)
    if spec.needs_grad:
        query, key = jnp.where(rows, 0, query), jnp.where(keys, 0, key)
    return query, key, value, spoilt


def exponentials(
    logits: Float[Array, "*heads t s"],
    mask: Bool[Array, "*#heads #t #s"] | None,
    sinks: Float[Array, "*#heads 1 1"] | None = None,
) -> tuple[Float[Array, "*heads t s"], Float[Array, "*heads t 1"], Float[Array, "*heads t 1"]]:
    """exp(logits - largest), the sum to divide it by, and the largest.

    The sum and the largest are of the logits and of ``sinks``. A row with nothing to attend to is all zero; without a
    sink its sum is one and its largest -inf.

    No gradient goes through the largest logit, which cancels in the results. Autodiff would divide by the number of
    logits that equal the largest one; where XLA recomputes the logits, this number can be zero.
    """
    if mask is not None:
        logits = jnp.where(mask, logits, -jnp.inf)
    top = lax.stop_gradient(logits.max(-1, keepdims=True))
    top = top if sinks is None else jnp.maximum(top, lax.stop_gradient(sinks))
    # -inf: a row that sees nothing, by the mask or by a bias of -inf
    weights = jnp.exp(logits - jnp.where(jnp.isneginf(top), 0.0, top))
    total = weights.sum(-1, keepdims=True)
    total = total if sinks is None else total + jnp.exp(sinks - top)
    return weights, jnp.where(total == 0.0, 1.0, total), top


def log_sum_exp(total: Float[Array, "b *heads t 1"], top: Float[Array, "b *heads t 1"]) -> Float[Array, "b t n"]:
    """The log-sum-exp of each row's logits, from the results of :func:`exponentials`."""
    found = jnp.moveaxis((jnp.log(total) + top)[..., 0], -1, 1)
    return found.reshape(*found.shape[:2], -1)


def _weigh(probs: Float[Array, "b k g t s"], value: Float[Array, "b _ _ v"], axes: str) -> Float[Array, "b k g t v"]:
    """Probabilities times values, whose ``axes`` are ``"bskh"`` or ``"bksh"``, in the values' dtype."""
    product = functools.partial(jnp.einsum, f"bkgts,{axes}->bkgth")
    return product(probs, value) if value.dtype == probs.dtype else _rounded(product, probs, value)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _rounded(product: Callable[..., Array], probs: Array, value: Array) -> Array:
    """``product`` with probabilities rounded to the values' dtype, whose own gradient stays float32.

    JAX's rule would round that gradient too, where float16 overflows.
    """
    return product(probs.astype(value.dtype), value, preferred_element_type=jnp.float32)


@_rounded.defjvp
def _(product: Callable[..., Array], operands: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Any, Any]:
    (probs, value), (d_probs, d_value) = operands, tangents
    of_value = product(probs.astype(value.dtype), d_value).astype(jnp.float32)
    return _rounded(product, probs, value), product(d_probs, value.astype(jnp.float32)) + of_value


STANDARD = Standard()
