"""The table of learned operands: what each is called, what its axes count, and an example.

A learned operand is one row of :data:`OPERANDS`, one field of :class:`Announced` and of :class:`Terms`, and one keyword
of :func:`attention`. From the row follow its shape check, its feature, how it is sharded, its case of the conformance
suite and its row of the support matrix. What is left is its meaning, in ``oracle.py`` and in the kernels that take it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import numpy as np
from jaxtyping import Array, Float

EitherArray = Array | np.ndarray  # a JAX or a NumPy array
Learned = Literal["bias", "sinks", "alibi"]
Example = Callable[[tuple[int, ...], np.random.Generator], np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """One learned operand, which a backend declares by its name as a feature.

    Its last axes are those of ``[batch, heads, query, keys]`` that ``axes`` names; with ``broadcasts`` each may be one.
    ``by_position``: it acts by the distance of positions. ``title`` is for tables, ``description`` for refusals.
    ``example(sizes, rng)`` makes one for (batch, query length, key length, heads).
    """

    name: Learned
    axes: tuple[Literal["batch", "heads", "query", "keys"], ...]
    title: str
    description: str
    example: Example
    broadcasts: bool = False
    by_position: bool = False


OPERANDS = (
    Operand(
        name="bias",
        axes=("batch", "heads", "query", "keys"),
        title="bias array",
        description="an explicit bias array",
        example=lambda sizes, rng: rng.standard_normal((sizes[0], sizes[3], *sizes[1:3])).astype(np.float32),
        broadcasts=True,
    ),
    Operand(
        name="sinks",
        axes=("heads",),
        title="attention sinks",
        description="an array of attention sinks",
        # From sinks that take little of a row to sinks that take most of it.
        example=lambda sizes, _: np.linspace(-2.0, 6.0, sizes[3], dtype=np.float32),
    ),
    Operand(
        name="alibi",
        axes=("heads",),
        title="ALiBi slopes",
        description="an array of ALiBi slopes",
        example=lambda sizes, _: np.float32(2.0) ** -np.arange(1, sizes[3] + 1, dtype=np.float32),  # the paper's
        by_position=True,
    ),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    """The fields of a spec that say which :class:`Terms` come with each layer."""

    has_bias: bool = False
    has_sinks: bool = False
    has_alibi: bool = False
    kv_dtype: str | None = None
    values_in_keys: bool = False

    @property
    def learned(self) -> tuple[Operand, ...]:
        """The learned operands that come."""
        return tuple(operand for operand in OPERANDS if getattr(self, f"has_{operand.name}"))

    @property
    def announced_terms(self) -> frozenset[str]:
        """The names of the :class:`Terms` that come."""
        scales = () if self.kv_dtype is None else ("key_scales", "value_scales")[: 1 if self.values_in_keys else 2]
        return frozenset({*scales, *(operand.name for operand in self.learned)})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Operands of one layer beside query, key and value: what is learned, and the scales of a quantised cache.

    ``bias`` is added to the logits, after the scale, the soft cap and the score function. ``sinks`` holds a logit per
    query head (neither scaled nor capped), which enters the softmax of each of its rows as a key with a value of zero
    would; -inf, that of a head without a sink, counts as -1e30, and +inf as 2e30. ``alibi`` holds a slope per query
    head (ALiBi, arXiv 2108.12409): each logit loses the slope times the distance of its positions. The spec announces a
    term ``x`` of these by ``has_x``.

    ``key_scales`` and ``value_scales`` are the factors of keys and values with ``kv_dtype``, float32. They broadcast to
    keys and values without ``head_dim``: per slot and KV head, or with axes of size one per page and head, per head, or
    one for all.
    """

    bias: Float[EitherArray, "#batch #heads #q_len #kv_len"] | None = None
    sinks: Float[EitherArray, " heads"] | None = None
    alibi: Float[EitherArray, " heads"] | None = None
    key_scales: Float[EitherArray, "#rows #slots #kv_heads"] | None = None
    value_scales: Float[EitherArray, "#rows #slots #kv_heads"] | None = None

    def given(self) -> dict[str, EitherArray]:
        """The terms that are not None, by name."""
        return {field.name: x for field in dataclasses.fields(self) if (x := getattr(self, field.name)) is not None}


NO_TERMS = Terms()
