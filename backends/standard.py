"""Attention by the formula, in XLA: the scores are materialised.

It is the baseline of every comparison, and its rounding error is the judge's yardstick. Memory grows with query length
times key length. Gradients are JAX's autodiff, except for one product. Runs on every platform and refuses nothing of
the contract.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from . import kv_cache
from .contract import (
    NO_TERMS,
    AttentionSpec,
    Carry,
    Layout,
    Plan,
    Terms,
    check_options,
    distances,
    may_attend,
    modified,
)
from .devices import Target
from .features import FEATURES_0_1, Feature, Mode, Takes

_LATER: frozenset[Feature] = frozenset(
    {"log_sum_exp", "sinks", "alibi", "mask_function", "score_function", "pages", "kv_dtype", "values_in_keys"}
)


@dataclasses.dataclass(frozen=True, slots=True)
class Standard:
    """The ``standard`` backend."""

    name: str = "standard"
    exact: bool = True

    def takes(self, target: Target, mode: Mode) -> Takes:
        """Everything in the contract, natively or compiled."""
        return Takes(
            features=frozenset({*FEATURES_0_1, *_LATER}),
            modes=("native", "compile"),
            because={"mode": "which is plain XLA without a kernel to interpret"},
        )

    def plan(
        self,
        spec: AttentionSpec,
        layout: Layout,
        *,
        target: Target,
        mode: Mode = "native",
        options: Mapping[str, Any] | None = None,
    ) -> Plan:
        """Build the mask once; there are no options."""
        check_options(self.name, options, {})
        if kv_cache.is_cache(spec):
            return kv_cache.gathered(spec, layout, functools.partial(self.plan, target=target, mode=mode))
        apart = distances(spec, layout) if spec.has_alibi else None
        modify = functools.partial(modified, spec, layout)
        return Plan(functools.partial(_attend, spec, may_attend(spec, layout), apart, modify))


def _attend(
    spec: AttentionSpec,
    mask: Bool[Array, "#b #n #t #s"] | None,
    apart: Int[Array, "#b t s"] | None,
    modify: Callable[[Array], Array],
    query: Float[Array, "b t n h"],
    key: Float[Array, "b s k h"],
    value: Float[Array, "b s k v"] | None,
    layer: int,
    carry: Carry,
    terms: Terms = NO_TERMS,
) -> tuple[Any, Carry]:
    b, t, n, h = query.shape
    kv_heads, rows = spec.num_kv_heads, spec.group_size * t
    # The heads of a group are rows of one product: only query and output are ever transposed, never the scores.
    grouped = query.reshape(b, t, kv_heads, -1, h).transpose(0, 2, 3, 1, 4).reshape(b, kv_heads, rows, h)
    # Heads before length, explicitly: this cancels the transpose of a cache stored so; XLA does not find it by itself.
    # Values that are a part of the keys are not cut out, which would copy them: the outputs are cut, which are fewer.
    key = key.swapaxes(1, 2)
    value = key if value is None else value.swapaxes(1, 2)
    logits = jnp.einsum("bkrh,bksh->bkrs", grouped, key, preferred_element_type=jnp.float32)
    logits = logits.reshape(b, n, t, -1) * spec.softmax_scale
    if spec.logits_soft_cap is not None:
        logits = spec.logits_soft_cap * jnp.tanh(logits / spec.logits_soft_cap)
    logits = modify(logits)
    if terms.bias is not None:
        logits = logits + terms.bias.astype(jnp.float32)
    if terms.alibi is not None and apart is not None:
        slopes = jnp.asarray(terms.alibi, jnp.float32)[None, :, None, None]
        logits = logits - slopes * apart[:, None].astype(jnp.float32)
    weights, total, top = exponentials(logits, mask, sink_logits(terms))
    out = (
        _weigh((weights / total).reshape(b, kv_heads, rows, -1), value)[..., : spec.value_head_dim]
        .astype(query.dtype)
        .reshape(b, kv_heads, -1, t, spec.value_head_dim)
    )
    out = out.transpose(0, 3, 1, 2, 4).reshape(b, t, n, -1)
    return ((out, log_sum_exp(total, top)) if spec.return_log_sum_exp else out), carry


def sink_logits(terms: Terms) -> Float[Array, "1 n 1 1"] | None:
    """The sinks as logits of every row of their heads; None without sinks."""
    return None if terms.sinks is None else jnp.asarray(terms.sinks, jnp.float32)[None, :, None, None]


def exponentials(
    logits: Float[Array, "b n t s"],
    mask: Bool[Array, "#b #n #t #s"] | None,
    sinks: Float[Array, "1 n 1 1"] | None = None,
) -> tuple[Float[Array, "b n t s"], Float[Array, "b n t 1"], Float[Array, "b n t 1"]]:
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


def log_sum_exp(total: Float[Array, "b n t 1"], top: Float[Array, "b n t 1"]) -> Float[Array, "b t n"]:
    """The log-sum-exp of each row's logits, from the results of :func:`exponentials`."""
    return (jnp.log(total) + top)[..., 0].swapaxes(1, 2)


@jax.custom_vjp
def _weigh(probs: Float[Array, "b k r s"], value: Float[Array, "b k s v"]) -> Float[Array, "b k r v"]:
    """Probabilities times values, in the values' dtype; the gradient of the probabilities stays float32.

    Autodiff would round that gradient to the values' dtype, where float16 overflows.
    """
    return jnp.einsum("bkrs,bksv->bkrv", probs.astype(value.dtype), value, preferred_element_type=jnp.float32)


def _weigh_forward(probs: Array, value: Array) -> tuple[Array, tuple[Array, Array]]:
    return _weigh(probs, value), (probs.astype(value.dtype), value)


def _weigh_backward(residuals: tuple[Array, Array], d_out: Array) -> tuple[Array, Array]:
    probs, value = residuals
    d_out = d_out.astype(value.dtype)  # exact: the output was rounded to this dtype
    d_probs = jnp.einsum("bkrv,bksv->bkrs", d_out, value, preferred_element_type=jnp.float32)
    d_value = jnp.einsum("bkrs,bkrv->bksv", probs, d_out, preferred_element_type=jnp.float32)
    return d_probs, d_value.astype(value.dtype)


_weigh.defvjp(_weigh_forward, _weigh_backward)

STANDARD = Standard()
