"""Plan one forward pass on a copy of Kvax (native, interpreted, or recording its launches), on one device or on a mesh.

Without a mesh the kernels run where the arrays are, inside the caller's ``jit``, ``vmap`` or ``shard_map``. Where
``backends.Sharded`` divides the query length, Kvax itself divides it: queries are in Kvax's order (a shard gets an
early and a late part), so that every device has the same share of a causal mask. Keys and values are whole on every
device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..contract import Plan
from ..layout import Layout
from ..operands import Terms
from ..sharding import MeshAxes
from ..spec import AttentionSpec
from ..vendor_kernel import padded
from . import converted_layout as layouts
from .block_sizes import Passes
from .converted_layout import KvaxLayout
from .upstream import Upstream


@dataclasses.dataclass(frozen=True, slots=True)
class OneDevice:
    """No mesh: the kernels of a single device."""

    context_size: int = 1

    def prepare(self, kvax: Upstream, spec: AttentionSpec, blocks: Passes, layout: KvaxLayout) -> Any:
        """The layout and its block masks: forward, and for gradients dq and dk, dv."""
        masks = []
        for sizes, of_keys in _passes(spec, blocks):
            bounds = kvax.mask_one_device(
                *_tokens(layout), **dict(zip(_SIZES, sizes, strict=True)), calculate_dkdv_mask=of_keys
            )
            masks.append(mask_everything_out_of_order(bounds, layout, of_keys))
        return layout, tuple(masks)

    def kernel(self, kvax: Upstream, spec: AttentionSpec, blocks: Passes) -> Callable[..., Array]:
        """``(query, key, value, prepared) -> output``, all ``[batch, length, heads, head_dim]``."""
        options = _kernel_options(kvax, spec, blocks)

        def run(query: Array, key: Array, value: Array, prepared: Any) -> Array:
            layout, masks = prepared
            query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
            out = kvax.flash_attention_one_device(query, key, value, *_tokens(layout), masks, **options)
            return out.swapaxes(1, 2)

        return run


@dataclasses.dataclass(frozen=True, slots=True)
class OnMesh:
    """A caller's mesh, and the axis that divides each dimension."""

    mesh: jax.sharding.Mesh
    axes: MeshAxes

    @property
    def context_size(self) -> int:
        """The query length must be a multiple of this: an early and a late part per device of the context axis."""
        return 1 if self.axes.context is None else 2 * self.mesh.shape[self.axes.context]

    def prepare(self, kvax: Upstream, spec: AttentionSpec, blocks: Passes, layout: KvaxLayout) -> Any:
        """As :meth:`OneDevice.prepare`, with the masks divided over the mesh and the queries in Kvax's order."""
        with self._specs(kvax):
            arrays = self._deal(kvax, layout.query_positions, layout.query_segment_ids)
            layout = dataclasses.replace(layout, query_positions=arrays[0], query_segment_ids=arrays[1])
            masks = kvax.create_attention_mask(
                *_tokens(layout), **_parameters(kvax, blocks), calc_bwd_mask=spec.needs_grad, mesh=self.mesh
            )
        return layout, tuple(
            mask_everything_out_of_order(mask.flatten(), layout, of_keys)
            for mask, (_, of_keys) in zip(masks, _passes(spec, blocks), strict=True)
        )

    def kernel(self, kvax: Upstream, spec: AttentionSpec, blocks: Passes) -> Callable[..., Array]:
        """As :meth:`OneDevice.kernel`, over the mesh."""
        options = _kernel_options(kvax, spec, blocks) | {"permute_tokens_for_load_balance": False, "mesh": self.mesh}
        if self.axes.context is not None:
            options["assume_sequential_positions"] = False

        def run(query: Array, key: Array, value: Array, prepared: Any) -> Array:
            layout, masks = prepared
            masks = tuple(kvax.mask.unflatten(mask) for mask in masks)
            with self._specs(kvax):
                (query,) = self._deal(kvax, query)
                out = kvax.flash_attention(query, key, value, *_tokens(layout), masks, **options)
                return out if self.axes.context is None else kvax.unpermute_tokens(out, mesh=self.mesh)

        return run

    def _deal(self, kvax: Upstream, *arrays: Array) -> tuple[Array, ...]:
        return arrays if self.axes.context is None else tuple(kvax.permute_tokens(arrays, mesh=self.mesh))

    @contextlib.contextmanager
    def _specs(self, kvax: Upstream) -> Iterator[None]:
        """Set the specs that Kvax keeps in its module; one thread at a time."""
        data, heads = self.axes.data, self.axes.heads
        with kvax.specs_lock, kvax.attention_specs((data, self.axes.context, heads, None), (data, None, heads, None)):
            yield


_SIZES = ("query_block_size", "kv_block_size")


def _passes(spec: AttentionSpec, blocks: Passes) -> Iterator[tuple[tuple[int, int], bool]]:
    """Query and key block size of each mask, and whether the mask is that of the keys. dq has the sizes swapped."""
    backward = blocks.backward
    yield (blocks.forward.query_block_size, blocks.forward.kv_block_size), False
    if spec.needs_grad:
        yield (backward.kv_block_size, backward.query_block_size), False
        yield (backward.query_block_size, backward.kv_block_size), True


def mask_everything_out_of_order(
    bounds: tuple[Array, ...], layout: KvaxLayout, of_keys: bool
) -> tuple[Array, Array, Array, Array]:
    """Where the layout breaks Kvax's order, count no block of the range as full: both rules then mask each block.

    ``bounds`` are ``(lower, upper, lower_full, upper_full)``, each ``[batch, shards or 1, blocks]``. Kvax masks by
    position and segment from ``upper_full`` to ``upper`` in the masks of queries, from ``lower`` to ``lower_full`` in
    those of keys.
    """
    lower, upper, lower_full, upper_full = bounds
    orderly = layout.queries_in_order if of_keys else layout.keys_in_order
    if orderly is None:
        return lower, upper, lower_full, upper_full
    end = upper if of_keys else lower
    keep = functools.partial(jnp.where, orderly[:, None, None])
    return lower, upper, keep(lower_full, end), keep(upper_full, end)


def _tokens(layout: KvaxLayout) -> tuple[Array, Array, Array, Array]:
    return layout.query_positions, layout.query_segment_ids, layout.key_positions, layout.key_segment_ids


def _parameters(kvax: Upstream, blocks: Passes) -> dict[str, Any]:
    passes = {"fwd_params": blocks.forward, "bwd_params": blocks.backward}
    return {name: kvax.parameters(**dataclasses.asdict(sizes)) for name, sizes in passes.items()}


def _kernel_options(kvax: Upstream, spec: AttentionSpec, blocks: Passes) -> dict[str, Any]:
    return {
        "scale": spec.softmax_scale,
        **_parameters(kvax, blocks),
        # Kvax then counts slots instead of loading positions.
        "assume_sequential_positions": spec.is_causal and not spec.has_positions,
    }


def plan_with(kvax: Upstream, spec: AttentionSpec, layout: Layout, blocks: Passes, devices: OnMesh | OneDevice) -> Plan:
    """The plan on a given copy of Kvax."""
    lengths = layouts.padded_lengths(spec, blocks, devices.context_size)
    converted = layouts.convert(spec, layout, *lengths)
    kernel = devices.kernel(kvax, spec, blocks)
    arrays = devices.prepare(kvax, spec, blocks, converted)
    run = _in_the_dtype_of_its_input(kernel)

    def attend(
        query: Float[Array, "b t n h"], key: Float[Array, "b s k h"], value: Float[Array, "b s k v"], terms: Terms
    ) -> Float[Array, "b t n v"]:
        out = run(padded(query, lengths[0]), padded(key, lengths[1]), padded(value, lengths[1]), arrays)
        out = out[:, : spec.query_length]
        return out if converted.seen is None else jnp.where(converted.seen[:, :, None, None], out, jnp.zeros_like(out))

    key_blocks = blocks.forward.kv_block_size, blocks.backward.kv_block_size
    return Plan.stateless(attend, gradient=spec.needs_grad, key_blocks=key_blocks)


def _in_the_dtype_of_its_input(kernel: Callable[..., Array]) -> Callable[..., Array]:
    """``kernel(query, key, value, arrays)`` with gradients in their input's dtype: Kvax's dk, dv are float32."""

    @jax.custom_vjp
    def run(query: Array, key: Array, value: Array, arrays: Any) -> Array:
        return kernel(query, key, value, arrays)

    def forward(query: Array, key: Array, value: Array, arrays: Any) -> tuple[Array, Any]:
        return jax.vjp(lambda q, k, v: kernel(q, k, v, arrays), query, key, value)

    def backward(pullback: Any, d_out: Array) -> tuple[Any, ...]:
        return *(x.astype(d_out.dtype) for x in pullback(d_out)), None

    run.defvjp(forward, backward)
    return run
