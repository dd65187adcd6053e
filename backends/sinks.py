"""Attention sinks: a learned logit per head that takes a share of every row's weight and has no value.

The method is that of gpt-oss (arXiv 2508.10925) and of "softmax plus one" with a learned one: the softmax of a row runs
over its visible keys and the sink, and the sink's weight is dropped. A sink is therefore one more part of the keys,
whose value is zero and whose log-sum-exp is the sink. ``flash_cpu`` and ``ring.py`` merge this part with the result of
the keys, in float32. ``chunked`` and ``standard`` need no merge: their softmax starts from the sink.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from .merging import Seen
from .operands import EitherArray, Terms

_LEAST, _MOST = -1e30, 2e30


def finite(terms: Terms) -> Terms:
    """The terms with a sink of -inf, that of a head without a sink, as a number without weight; +inf as a large one."""
    if terms.sinks is None:
        return terms
    # float16 holds no number below all logits; jnp.promote_types refuses it where a caller sets strict promotion.
    wide = jnp.float64 if terms.sinks.dtype == jnp.float64 else jnp.float32
    return dataclasses.replace(terms, sinks=jnp.clip(terms.sinks.astype(wide), _LEAST, _MOST))


def minus_infinity(
    sinks: Float[EitherArray, " heads"], log_sum_exp: Float[Array, "batch q_len heads"]
) -> Float[Array, "batch q_len heads"]:
    """The log-sum-exp, -inf where a row sees no key and its head has no sink, in place of the number for this sink."""
    return jnp.where(jnp.isneginf(sinks)[None, None] & (log_sum_exp <= _LEAST), -jnp.inf, log_sum_exp)


def part(sinks: Float[Array, " heads"], seen: Seen) -> Seen:
    """The sinks as one more part of the keys, with values of zero. It merges with ``seen``, the part of the real keys.

    ``top`` is rounded down to a whole number. ``flash_cpu`` can then read it exactly. It also stays below the logit of
    a key with more than half of its row's weight, so that ``chunked`` can compute that weight from ``rest``.
    """
    out, top, _ = seen
    whole = jnp.floor(sinks.astype(jnp.float32))
    rest = sinks.astype(jnp.float32) - whole
    return jnp.zeros_like(out), jnp.broadcast_to(whole, top.shape), jnp.broadcast_to(rest, top.shape)


def gradient(
    sinks: Float[Array, " heads"],
    seen: Seen,
    d_out: Float[Array, "batch q_len heads v_dim"],
    d_lse: Float[Array, "batch q_len heads"] | None = None,
) -> Float[Array, " heads"]:
    """The gradient of the sinks, from the result over keys and sinks and the cotangents of output and log-sum-exp.

    Each row gives its sink's share times the cotangent of the log-sum-exp less rowsum(dO * O). The terms of a sum over
    many rows cancel, so ``seen`` holds the output as it is before it is rounded to the input dtype.
    """
    out, top, rest = seen
    # At most 1, whatever is rounded away of large sinks.
    share = jnp.exp(jnp.minimum((sinks.astype(jnp.float32)[None, None] - top) - rest, 0.0))
    products = d_out.astype(jnp.float32) * out
    slope = -jnp.where(out == 0, 0, products).sum(-1)  # no NaN from the cotangent of a row that sees no key
    return (share * (slope if d_lse is None else slope + d_lse)).sum((0, 1)).astype(sinks.dtype)
