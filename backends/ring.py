"""Ring attention: every device keeps its queries; the keys and values of all devices pass by, one share at a time.

The method is Ring Attention's (arXiv 2310.01889). Partial outputs are merged by their log-sum-exp, as flash attention
merges blocks; memory holds two shares of keys instead of all. The next share is sent while the present one is computed.
The backward pass is a second ring: the gradients of keys and values travel with them and are back on their device after
the last step. The code runs inside a ``shard_map`` over the axis. A backend (``PartBackend``) computes each part.
A sink (``sinks.py``) is one more part, which every device adds to its own rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from . import sinks as of_sinks
from .contract import NOTHING_SEEN, Part, PartBackend
from .derivatives import NO_GRADIENT
from .layout import Layout
from .masks import Causal
from .merging import Seen, put_together
from .operands import NO_TERMS, EitherArray, Terms
from .spec import AttentionSpec


@dataclasses.dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a mesh and its size."""

    name: str
    size: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class _Share:
    """The data that passes from device to device: keys, values, and the layout of each key."""

    key: Float[Array, "b s k h"]
    value: Float[Array, "b s k v"]
    positions: Int[EitherArray, "b s"] | None
    segment_ids: Int[EitherArray, "b s"] | None


def by_position(spec: AttentionSpec) -> bool:
    """Whether positions affect the mask or the logits."""
    return spec.positional_mask is not None or any(operand.by_position for operand in spec.learned)


def specs_of_parts(spec: AttentionSpec) -> tuple[AttentionSpec, AttentionSpec]:
    """The problem of a device's own keys, and that of another's. ``spec`` has one device's queries and keys.

    Under a causal mask over slots, the own keys are a causal problem, the keys of devices before are all visible, and
    those of devices behind are not: no part needs positions. Any other mask by position gets them. No part has sinks.
    """
    spec = dataclasses.replace(spec, has_sinks=False)
    if not by_position(spec):
        spec = dataclasses.replace(spec, has_positions=False)
        return spec, spec
    over_slots = spec.positional_mask == Causal() and not spec.has_positions
    if over_slots and spec.query_length == spec.key_value_length:  # a share is all visible or all hidden, or the own
        return spec, dataclasses.replace(spec, is_causal=False, mask_function=None)
    spec = dataclasses.replace(spec, has_positions=True)
    return spec, spec


@dataclasses.dataclass(frozen=True, slots=True)
class Ring:
    """Attention of one device of ``axis``, from its own queries, keys and values. Runs inside a ``shard_map``.

    ``spec`` is the problem of one device's queries and one device's keys. ``planned`` holds the other arguments of the
    backend's ``part`` (target, mode, options).
    """

    backend: PartBackend
    spec: AttentionSpec
    axis: Axis
    planned: Mapping[str, Any]

    def attend(self, layout: Layout, query: Array, key: Array, value: Array, terms: Terms = NO_TERMS) -> Array:
        """The output of this device's queries over the keys of all, and over the sinks of ``terms``; differentiable.

        ``layout`` holds this device's tokens, but ``key_value_seq_lengths`` of the whole sequences.
        """
        layout = self._with_positions(layout)
        share = _Share(key, value, layout.key_value_positions, layout.key_value_segment_ids)
        rest = dataclasses.replace(layout, key_value_positions=None, key_value_segment_ids=None)

        @jax.custom_vjp
        def run(query: Array, share: _Share, layout: Layout, sinks: Array | None) -> Array:
            return self._forward(query, share, layout, sinks)[0].astype(query.dtype)

        def forward(query: Array, share: _Share, layout: Layout, sinks: Array | None) -> tuple[Array, Any]:
            if not self.spec.needs_grad:
                raise ValueError(NO_GRADIENT)
            out, top, rest = self._forward(query, share, layout, sinks)
            return out.astype(query.dtype), (query, share, layout, sinks, out, top, rest)

        def backward(residuals: Any, d_out: Array) -> tuple[Array, _Share, None, Array | None]:
            query, share, layout, sinks, out, top, rest = residuals
            d_query, d_key, d_value = self._backward(query, share, layout, (out, top, rest), d_out)
            d_sinks = None if sinks is None else of_sinks.gradient(sinks, (out, top, rest), d_out)
            return d_query, _Share(d_key, d_value, None, None), None, d_sinks

        run.defvjp(forward, backward)
        return run(query, share, rest, None if terms.sinks is None else jnp.asarray(terms.sinks))

    def _forward(self, query: Array, share: _Share, layout: Layout, sinks: Array | None) -> Seen:
        def compute(step: Any, share: _Share, spec: AttentionSpec) -> Seen:
            return self._part(step, share, layout, spec).forward(query, share.key, share.value)

        def turn(step: Any, state: tuple[Seen, _Share]) -> tuple[Seen, _Share]:
            seen, share = state
            following = self._pass_on(share)
            out, top, rest = seen
            nothing = jnp.zeros_like(out), jnp.full_like(top, NOTHING_SEEN), jnp.zeros_like(rest)
            more = self._unless_behind(step, lambda: compute(step, share, self._others), nothing)
            return put_together(seen, more), following

        first = compute(0, share, self._local), self._pass_on(share)
        seen = lax.fori_loop(1, self.axis.size, turn, first)[0]
        return seen if sinks is None else put_together(seen, of_sinks.part(sinks, seen))

    def _backward(
        self, query: Array, share: _Share, layout: Layout, seen: Seen, d_out: Array
    ) -> tuple[Array, Array, Array]:
        def compute(step: Any, share: _Share, spec: AttentionSpec) -> tuple[Array, Array, Array]:
            part = self._part(step, share, layout, spec)
            return part.backward(query, share.key, share.value, *seen, d_out)

        def turn(step: Any, state: tuple[tuple[Array, Array, Array], _Share]) -> Any:
            (d_query, *d_share), share = state
            following = self._pass_on(share)
            gradients = d_query, *self._pass_on(d_share)  # to where their keys are now
            nothing = jax.tree.map(jnp.zeros_like, gradients)
            more = self._unless_behind(step, lambda: compute(step, share, self._others), nothing)
            return jax.tree.map(jnp.add, gradients, more), following

        first = compute(0, share, self._local), self._pass_on(share)
        (d_query, *d_share), _ = lax.fori_loop(1, self.axis.size, turn, first)
        d_key, d_value = self._pass_on(d_share)
        return d_query.astype(query.dtype), d_key.astype(query.dtype), d_value.astype(query.dtype)

    @property
    def _local(self) -> AttentionSpec:
        return specs_of_parts(self.spec)[0]

    @property
    def _others(self) -> AttentionSpec:
        return specs_of_parts(self.spec)[1]

    def _here(self) -> Array:
        """The device's index, computed where it is used: a gradient is traced after the call has returned."""
        return lax.axis_index(self.axis.name)

    def _pass_on(self, x: Any) -> Any:
        size = self.axis.size
        forth = [(i, (i + 1) % size) for i in range(size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis.name, forth), x)

    def _unless_behind(self, step: Any, compute: Callable[[], Any], nothing: Any) -> Any:
        """``compute()``; ``nothing`` where the share of ``step`` devices before came round the ring from behind."""
        if self._local == self._others:
            return compute()
        return lax.cond(step <= self._here(), compute, lambda: nothing)

    def _part(self, step: Any, share: _Share, layout: Layout, spec: AttentionSpec) -> Part:
        """Attention to the share that is here after ``step`` steps."""
        lengths = layout.key_value_seq_lengths
        if lengths is not None:
            before = (self._here() - step) % self.axis.size * spec.key_value_length
            lengths = jnp.clip(lengths - before, 0, spec.key_value_length).astype(jnp.int32)
        seen = Layout(
            query_segment_ids=layout.query_segment_ids,
            key_value_segment_ids=share.segment_ids,
            query_positions=layout.query_positions,
            key_value_positions=share.positions,
            key_value_seq_lengths=lengths,
        )
        return self.backend.part(spec, seen, **self.planned)

    def _with_positions(self, layout: Layout) -> Layout:
        """The layout with this device's positions if the parts need them, else without positions."""
        if not self._local.has_positions:
            return dataclasses.replace(layout, query_positions=None, key_value_positions=None)

        sides = {"query_positions": self.spec.query_length, "key_value_positions": self.spec.key_value_length}
        return with_positions(layout, self.axis.name, self.spec.batch, sides)


def with_positions(layout: Layout, axis: str, batch: int, sides: Mapping[str, int]) -> Layout:
    """The layout with positions of this device's tokens where it has none: they follow those of the devices before it.

    ``sides`` are the fields of the layout to fill, each with the tokens of one device.
    """
    rows = {
        name: (lax.axis_index(axis) * length).astype(jnp.int32) + jnp.arange(length, dtype=jnp.int32)
        for name, length in sides.items()
        if getattr(layout, name) is None
    }
    filled = {name: jnp.broadcast_to(row[None, :], (batch, row.size)) for name, row in rows.items()}
    return dataclasses.replace(layout, **filled)
