"""Kascade by native kernels for CPUs: those of ``backends/flash_cpu``, behind the functions of ``kernels.py``.

Prefill uses that folder's ``sparse.py``: query tiles against listed units, and the mass of all units in one pass. A
decode step uses two forms of its decode kernel: ``decode_listed.py``, which reads no key that is not listed, and
``decode_mass.py``. XLA computes the mass of a decode step (``steps.py``) where units are shorter than the kernel's
blocks of keys.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..contract import AttentionSpec
from ..devices import Target
from ..flash_cpu import decode, handler, sparse
from ..flash_cpu.availability import why_not
from ..flash_cpu.calls import Calls, call, is_decode
from ..flash_cpu.compiler import Processor
from ..flash_cpu.forward import Kernel
from ..flash_cpu.isa import Isa
from ..flash_cpu.sparse import SparseKernel
from ..flash_cpu.visibility import NO_KEY, NO_QUERY, Visibility
from ..kv_layout import swap
from . import steps
from .selection import Places
from .settings import Settings, Tiling

_LEAST = -(2**31)


def refuses(spec: AttentionSpec, settings: Settings, target: Target) -> tuple[str, ...]:
    """Refuses other platforms, single keys, and CPUs where the kernels do not work."""
    if target.platform != "cpu":
        return (f"kernel='flash_cpu' runs on CPUs, the target is {target}; leave kernel out.",)
    reasons = []
    if settings.granularity != "tile":
        reasons.append(
            f"granularity={settings.granularity!r} is not supported by kascade with kernel='flash_cpu', which packs "
            "whole tiles; use granularity='tile', or kernel='xla'."
        )
    missing = why_not()
    return (*reasons, missing) if missing else tuple(reasons)


@dataclasses.dataclass(frozen=True, slots=True)
class Geometry:
    """The static part of a problem: the shapes, the tiles, and the kernel calls for this processor."""

    spec: AttentionSpec
    tiling: Tiling
    calls: Calls

    def kernel(self, value_head_dim: int) -> SparseKernel:
        """The kernel for values of ``value_head_dim`` numbers; 0 where there are none."""
        spec = self.spec
        kernel = Kernel(spec.dtype, spec.head_dim, value_head_dim, spec.logits_soft_cap is not None, spec.dtype)
        return SparseKernel(kernel, self.tiling.unit)

    def dims(self, places: Places) -> dict[str, int]:
        """The sizes of the arrays, by the names that the kernels use."""
        spec, tiling = self.spec, self.tiling
        sizes = {"B": spec.batch, "T": spec.query_length, "S": spec.key_value_length, "C": places.batch}
        return {**sizes, "N": spec.num_heads, "K": spec.num_kv_heads, "I": tiling.query_tiles, "Q": tiling.query_tile}


def geometry(spec: AttentionSpec, tiling: Tiling, settings: Settings) -> Geometry:
    """The geometry of a problem. No setting changes it: a tile is a block."""
    return Geometry(spec, tiling, _calls(spec))


def _in_one_step(geometry: Geometry) -> bool:
    return is_decode(geometry.spec) and geometry.tiling.query_tiles == 1


def pooled_mass(
    geometry: Geometry,
    places: Places,
    query: Float[Array, "batch q_len heads head_dim"],
    key: Float[Array, "batch kv_len kv_heads head_dim"],
    *,
    interpret: bool,
) -> Float[Array, "batch kv_heads query_tiles units"]:
    """As :meth:`attnsuite.backends.kascade.kernels.Kernels.pooled_mass`."""
    if _by_xla(geometry):
        return steps.pooled_mass(geometry.spec, geometry.tiling, places, query, key)[0][:, :, None]
    return _mass(geometry, places, query, key, None)[0]


def dense(
    geometry: Geometry,
    places: Places,
    query: Float[Array, "batch q_len heads head_dim"],
    key: Float[Array, "batch kv_len kv_heads head_dim"],
    value: Float[Array, "batch kv_len kv_heads v_dim"],
) -> tuple[Float[Array, "batch q_len heads v_dim"], Float[Array, "batch kv_heads query_tiles units"]] | None:
    """As :meth:`attnsuite.backends.kascade.kernels.Kernels.dense`."""
    if _by_xla(geometry):
        return None
    mass, out = _mass(geometry, places, query, key, value)
    return out, mass


def _by_xla(geometry: Geometry) -> bool:
    """Whether the mass of a decode step is XLA's to compute."""
    short = not is_decode(geometry.spec) or geometry.tiling.unit < decode.BLOCK_KEYS
    return geometry.spec.query_length == 1 and short


def _mass(geometry: Geometry, places: Places, query: Array, key: Array, value: Array | None) -> tuple[Array, Any]:
    """The mass; with ``value`` also the output of dense attention, else None."""
    spec, tiling, calls = geometry.spec, geometry.tiling, geometry.calls
    seen = _seen(spec, places)
    if spec.query_length == 1:
        mass, out = calls.decode_mass(query, swap(key), swap(value), seen, tiling.unit)
        return mass[:, :, None], out
    this = geometry.kernel(0 if value is None else value.shape[-1])
    size = handler.scratch_bytes(*sparse.mass_scratch(calls.isa, this, geometry.dims(places)), calls.threads)
    mass = jax.ShapeDtypeStruct((spec.batch, spec.num_kv_heads, tiling.query_tiles, tiling.units), jnp.float32)
    outputs, values = ((), ()) if value is None else (_outputs(spec, query, value), (value,))
    results = mass, *outputs, jax.ShapeDtypeStruct((size,), jnp.uint8)
    operands = query, key, *values, *seen.arrays, calls.numbers, _of_length(tiling.query_tile)
    found = call("mass", this, calls.isa, results, *operands)
    return found[0], found[1] if values else None


def _outputs(spec: AttentionSpec, query: Array, value: Array) -> tuple[Any, Any, Any]:
    row = jax.ShapeDtypeStruct(query.shape[:3], jnp.float32)
    return jax.ShapeDtypeStruct((*query.shape[:3], value.shape[-1]), spec.dtype), row, row


def attend(
    geometry: Geometry,
    places: Places,
    query: Float[Array, "batch q_len heads head_dim"],
    key: Float[Array, "batch kv_len kv_heads head_dim"],
    value: Float[Array, "batch kv_len kv_heads v_dim"],
    listed: Int[Array, "batch kv_heads query_tiles slots"],
    *,
    interpret: bool,
) -> Float[Array, "batch q_len heads v_dim"]:
    """As :meth:`attnsuite.backends.kascade.kernels.Kernels.attend`."""
    spec, tiling, calls = geometry.spec, geometry.tiling, geometry.calls
    if _in_one_step(geometry):
        cache = swap(key), swap(value)
        return calls.decode_listed(query, *cache, _seen(spec, places), listed[:, :, 0], tiling.unit)
    this = geometry.kernel(value.shape[-1])
    size = handler.scratch_bytes(*sparse.listed_scratch(calls.isa, this, geometry.dims(places)), calls.threads)
    results = *_outputs(spec, query, value), jax.ShapeDtypeStruct((size,), jnp.uint8)
    operands = query, key, value, *_seen(spec, places).arrays, calls.numbers, listed, _of_length(tiling.query_tile)
    return call("listed", this, calls.isa, results, *operands)[0]


def _seen(spec: AttentionSpec, places: Places) -> Visibility:
    """The mask without the selection: causal over slots, inside length and segment."""
    rows, t, s = places.batch, spec.query_length, spec.key_value_length
    slots = np.arange(s, dtype=np.int32)[None]
    last = jnp.asarray(places.query_positions)[:, :t]
    query_id, key_id = jnp.zeros((rows, t), jnp.int32), jnp.zeros((rows, s), jnp.int32)
    if places.query_segment_ids is not None and places.key_value_segment_ids is not None:
        ids = jnp.asarray(places.query_segment_ids)[:, :t], jnp.asarray(places.key_value_segment_ids)
        query_id, key_id = jnp.where(ids[0] < 0, NO_QUERY, ids[0]), jnp.where(ids[1] < 0, NO_KEY, ids[1])
    key_id = jnp.where(slots < jnp.asarray(places.lengths)[:, None], key_id, NO_KEY)
    return Visibility(jnp.full_like(last, _LEAST), last, query_id, jnp.broadcast_to(slots, (rows, s)), key_id)


def _calls(spec: AttentionSpec) -> Calls:
    # A step's keys and values are swapped: this cancels the swap by which a cache becomes an operand.
    return Calls(dataclasses.replace(spec, kv_layout="HND") if is_decode(spec) else spec, _isa())


def _isa() -> Isa:
    isa = Processor.here().isa()
    if isa is None:
        raise ValueError("kascade: this processor has none of the instruction sets that flash_cpu's kernels are for.")
    return isa


def _of_length(length: int) -> Any:
    """An array whose length passes a number to a kernel."""
    return np.zeros((1, length), np.float32)
