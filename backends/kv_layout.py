"""How keys and values lie: ``"NHD"``, slots before heads, or ``"HND"``, heads before slots (FlashInfer's words).

A backend declares in ``Takes.kv_layouts`` what it reads in place. For the others :func:`swapped` swaps two axes, which
XLA folds into what reads them, or copies where that is a kernel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from .contract import AttentionSpec, Terms
from .features import Takes


def as_read(spec: AttentionSpec, takes: Takes) -> AttentionSpec:
    """The spec that a backend is given: in the caller's layout where it reads that, else in ``"NHD"``."""
    return spec if spec.kv_layout in takes.kv_layouts else dataclasses.replace(spec, kv_layout="NHD")


def swapped(attend: Callable[..., Any]) -> Callable[..., Any]:
    """A plan's ``attend`` on keys, values and scales of the other layout."""

    def on_swapped(query: Any, key: Any, value: Any, layer: Any, carry: Any, *terms: Terms) -> Any:
        scaled = (
            dataclasses.replace(x, key_scales=_swap(x.key_scales), value_scales=_swap(x.value_scales)) for x in terms
        )
        return attend(query, _swap(key), _swap(value), layer, carry, *scaled)

    return on_swapped


def _swap(x: Any) -> Any:
    return None if x is None else jnp.swapaxes(x, 1, 2)
