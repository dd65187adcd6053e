"""Attention sinks: a learned logit per head that takes a share of every row's weight and has no value.

The method is that of gpt-oss (arXiv 2508.10925) and of "softmax plus one" with a learned one: the softmax of a row runs
over its visible keys and the sink, and the sink's weight is dropped. A sink is therefore one more part of the keys,
whose value is zero and whose log-sum-exp is the sink. :func:`added` merges this part with the result of a backend that
gives its log-sum-exp; ``ring.py`` merges it as it merges the parts of other devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .contract import AttentionSpec, Carry, Plan, Terms


def added(spec: AttentionSpec, plan: Callable[[AttentionSpec], Plan]) -> Plan:
    """The plan of ``spec`` with sinks, from ``plan(bare)``: ``bare`` has no sinks and returns the log-sum-exp.

    The output is rounded to its dtype once before the sink takes its share, and once after.
    """
    made = plan(dataclasses.replace(spec, has_sinks=False, return_log_sum_exp=True))

    def attend(
        query: Array, key: Array, value: Array | None, layer: int, carry: Carry, terms: Terms
    ) -> tuple[Any, Carry]:
        others = dataclasses.replace(terms, sinks=None)
        given = (others,) if others.given() else ()
        (out, log_sum_exp), carry = made.attend(query, key, value, layer, carry, *given)
        sinks = jnp.asarray(terms.sinks, jnp.float32)[None, None, :]
        share = jax.nn.sigmoid(log_sum_exp - sinks)[..., None]  # of the keys; the rest is the sink's
        out = (out.astype(jnp.float32) * share).astype(out.dtype)
        return ((out, jnp.logaddexp(log_sum_exp, sinks)) if spec.return_log_sum_exp else out), carry

    return dataclasses.replace(made, attend=attend)
