"""How keys and values lie: ``"NHD"``, slots before heads, or ``"HND"``, heads before slots (FlashInfer's words).

A backend declares in ``Takes.kv_layouts`` what it reads in place. For the others :func:`swapped` swaps two axes, which
XLA folds into what reads them, or copies where that is a kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from .contract import Plan
from .features import Takes
from .operands import Terms
from .spec import AttentionSpec


def as_read(spec: AttentionSpec, takes: Takes) -> AttentionSpec:
    """The spec that a backend is given: in the caller's layout where it reads that, else in ``"NHD"``."""
    return spec if spec.kv_layout in takes.kv_layouts else dataclasses.replace(spec, kv_layout="NHD")


def turned(spec: AttentionSpec, plan: Callable[[AttentionSpec], Plan]) -> Plan:
    """The plan of ``spec`` by a ``plan`` that reads ``"NHD"``."""
    made = plan(dataclasses.replace(spec, kv_layout="NHD"))
    return made if spec.kv_layout == "NHD" else dataclasses.replace(made, attend=swapped(made.attend))


def swapped(attend: Callable[..., Any]) -> Callable[..., Any]:
    """A plan's ``attend`` on keys, values and scales of the other layout."""

    def on_swapped(query: Any, key: Any, value: Any, layer: Any, carry: Any, *terms: Terms) -> Any:
        scaled = (
            dataclasses.replace(x, key_scales=swap(x.key_scales), value_scales=swap(x.value_scales)) for x in terms
        )
        return attend(query, swap(key), swap(value), layer, carry, *scaled)

    return on_swapped


def swap(x: Any) -> Any:
    """Keys, values or their scales in the other layout; None stays."""
    return None if x is None else jnp.swapaxes(x, 1, 2)
