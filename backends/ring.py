"""Ring attention: every device keeps its queries; the keys and values of all devices pass by, one share at a time.

The method is Ring Attention's (arXiv 2310.01889). Partial outputs are merged by their log-sum-exp, as flash attention
merges blocks; memory holds two shares of keys instead of all. The next share is sent while the present one is computed.
The backward pass is a second ring: the gradients of keys and values travel with them and are back on their device after
the last step. The code runs inside a ``shard_map`` over the axis. A backend (``PartBackend``) computes each part.
A sink (``sinks.py``) is one more part, which every device adds to its own rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from . import sinks as of_sinks
from .contract import NOTHING_SEEN, Part
from .derivatives import NO_GRADIENT
from .layout import Layout
from .masks import Causal
from .merging import Seen, put_together
from .operands import NO_TERMS, EitherArray, Terms
from .spec import AttentionSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class _Share:
    """The data that passes from device to device: keys, values, and the layout of each key."""

    key: Float[Array, "b s k h"]
    value: Float[Array, "b s k v"]
    positions: Int[EitherArray, "b s"] | None
    segment_ids: Int[EitherArray, "b s"] | None


@dataclasses.dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a mesh and its size. The methods run inside a ``shard_map`` over it."""

    name: str
    size: int

    def pass_on(self, x: Any) -> Any:
        """Each device's ``x`` on the next device."""
        forth = [(i, (i + 1) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.name, forth), x)

    def around(
        self,
        share: _Share,
        specs: tuple[AttentionSpec, AttentionSpec],
        compute: Callable[[Any, _Share, AttentionSpec], Any],
        nothing: Callable[[Any], Any],
        join: Callable[[Any, Any], Any],
    ) -> Any:
        """``compute(step, share, spec)`` of the own share, joined with that of each share that comes by.

        ``specs`` are those of :func:`specs_of_parts`. If they differ, a share that came round the ring from behind is
        hidden; ``nothing`` makes of what was found what such a share adds.
        """
        own, others = specs

        def turn(step: Any, state: tuple[Any, _Share]) -> tuple[Any, _Share]:
            found, share = state
            following = self.pass_on(share)

            def more() -> Any:
                return compute(step, share, others)

            hidden = own != others
            added = lax.cond(step <= lax.axis_index(self.name), more, lambda: nothing(found)) if hidden else more()
            return join(found, added), following

        return lax.fori_loop(1, self.size, turn, (compute(0, share, own), self.pass_on(share)))[0]


def by_position(spec: AttentionSpec) -> bool:
    """Whether positions affect the mask or the logits."""
    scored = spec.score_function is not None
    return scored or spec.positional_mask is not None or any(operand.by_position for operand in spec.learned)


def specs_of_parts(spec: AttentionSpec) -> tuple[AttentionSpec, AttentionSpec]:
    """The problem of a device's own keys, and that of another's. ``spec`` has one device's queries and keys.

    Under a causal mask over slots, the own keys are a causal problem, the keys of devices before are all visible, and
    those of devices behind are not: no part needs positions. Any other mask by position and a score function get them.
    No part has sinks.
    """
    spec = dataclasses.replace(spec, has_sinks=False)
    if not by_position(spec):
        spec = dataclasses.replace(spec, has_positions=False)
        return spec, spec
    over_slots = spec.positional_mask == Causal() and spec.score_function is None and not spec.has_positions
    if over_slots and spec.query_length == spec.key_value_length:  # a share is all visible or all hidden, or the own
        return spec, dataclasses.replace(spec, is_causal=False, mask_function=None)
    spec = dataclasses.replace(spec, has_positions=True)
    return spec, spec


def attend(
    part_of: Callable[[AttentionSpec, Layout], Part],
    spec: AttentionSpec,
    axis: Axis,
    layout: Layout,
    operands: tuple[Array, Array, Array],
    terms: Terms = NO_TERMS,
) -> Array:
    """The output of this device's queries over the keys of all, and over the sinks of ``terms``; differentiable.

    ``spec`` is the problem of one device's queries and one device's keys, ``part_of`` the backend's ``part``, and
    ``operands`` are query, key and value. ``layout`` holds this device's tokens, but ``key_value_seq_lengths`` of the
    whole sequences. Runs inside a ``shard_map`` over ``axis``.
    """
    specs, (query, key, value) = specs_of_parts(spec), operands
    if specs[0].has_positions:
        sides = {"query_positions": spec.query_length, "key_value_positions": spec.key_value_length}
        layout = with_positions(layout, axis.name, spec.batch, sides)
    else:
        layout = dataclasses.replace(layout, query_positions=None, key_value_positions=None)

    def seen_of(query: Array, share: _Share, layout: Layout, sinks: Array | None) -> Seen:
        def compute(step: Any, share: _Share, spec: AttentionSpec) -> Seen:
            return part_of(spec, _seen_layout(axis, step, share, layout, spec)).forward(query, share.key, share.value)

        def nothing(seen: Seen) -> Seen:
            out, top, rest = seen
            return jnp.zeros_like(out), jnp.full_like(top, NOTHING_SEEN), jnp.zeros_like(rest)

        seen = axis.around(share, specs, compute, nothing, put_together)
        return seen if sinks is None else put_together(seen, of_sinks.part(sinks, seen))

    @jax.custom_vjp
    def run(query: Array, share: _Share, layout: Layout, sinks: Array | None) -> Array:
        return seen_of(query, share, layout, sinks)[0].astype(query.dtype)

    def forward(query: Array, share: _Share, layout: Layout, sinks: Array | None) -> tuple[Array, Any]:
        if not spec.needs_grad:
            raise ValueError(NO_GRADIENT)
        seen = seen_of(query, share, layout, sinks)
        return seen[0].astype(query.dtype), (query, share, layout, sinks, seen)

    def backward(residuals: Any, d_out: Array) -> tuple[Array, _Share, None, Array | None]:
        query, share, layout, sinks, seen = residuals

        def compute(step: Any, share: _Share, spec: AttentionSpec) -> tuple[Array, Array, Array]:
            part = part_of(spec, _seen_layout(axis, step, share, layout, spec))
            return part.backward(query, share.key, share.value, *seen, d_out)

        def join(found: tuple[Array, Array, Array], more: tuple[Array, Array, Array]) -> Any:
            d_query, *d_share = found
            return jax.tree.map(jnp.add, (d_query, *axis.pass_on(d_share)), more)  # to where their keys are now

        zeros = functools.partial(jax.tree.map, jnp.zeros_like)
        d_query, *d_share = axis.around(share, specs, compute, zeros, join)
        d_query, d_key, d_value = (x.astype(query.dtype) for x in (d_query, *axis.pass_on(d_share)))
        d_sinks = None if sinks is None else of_sinks.gradient(sinks, seen, d_out)
        return d_query, _Share(d_key, d_value, None, None), None, d_sinks

    run.defvjp(forward, backward)
    share = _Share(key, value, layout.key_value_positions, layout.key_value_segment_ids)
    rest = dataclasses.replace(layout, key_value_positions=None, key_value_segment_ids=None)
    return run(query, share, rest, None if terms.sinks is None else jnp.asarray(terms.sinks))


def _seen_layout(axis: Axis, step: Any, share: _Share, layout: Layout, spec: AttentionSpec) -> Layout:
    """The layout of this device's queries and of the share that is here after ``step`` steps."""
    lengths = layout.key_value_seq_lengths
    if lengths is not None:
        before = (lax.axis_index(axis.name) - step) % axis.size * spec.key_value_length
        lengths = jnp.clip(lengths - before, 0, spec.key_value_length).astype(jnp.int32)
    keys = {"key_value_positions": share.positions, "key_value_segment_ids": share.segment_ids}
    return dataclasses.replace(layout, **keys, key_value_seq_lengths=lengths)


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
