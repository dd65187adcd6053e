"""Kascade by native kernels for CPUs: those of ``backends/flash_cpu``, behind the interface of ``kernels.py``.

Prefill uses that folder's ``sparse.py``: query tiles against listed units, and the mass of all units in one pass. Its
gradient is that of ``sparse_backward.py``. A decode step uses two forms of ``decode.py``. XLA computes the mass of a
decode step (``steps.py``) where units are shorter than the kernel's blocks of keys.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array

from ..contract import AttentionSpec, Layout
from ..devices import Target
from ..flash_cpu import decode
from ..flash_cpu.availability import why_not
from ..flash_cpu.calls import Calls, is_decode
from ..flash_cpu.compiler import Processor
from ..flash_cpu.sparse import SparseKernel
from ..flash_cpu.visibility import Visibility, visibility
from ..kv_layout import swap
from . import steps
from .kernels import Kernels
from .selection import Selection, TileLayout, select
from .settings import Settings


@dataclasses.dataclass(frozen=True)
class FlashCpuKernels(Kernels):
    """The kernel calls for this processor. No setting changes them: a tile is a block."""

    @classmethod
    def refuses(cls, spec: AttentionSpec, settings: Settings, target: Target) -> tuple[str, ...]:  # noqa: ARG003 (of the interface)
        """Refuses other platforms, single keys, and CPUs where the kernels do not work."""
        if target.platform != "cpu":
            return (f"kernel='flash_cpu' runs on CPUs, the target is {target}; leave kernel out.",)
        reasons = []
        if settings.granularity != "tile":
            reasons.append(
                f"granularity={settings.granularity!r} is not supported by kascade with kernel='flash_cpu', which "
                "packs whole tiles; use granularity='tile', or kernel='xla'."
            )
        missing = why_not()
        return (*reasons, missing) if missing else tuple(reasons)

    @functools.cached_property
    def _calls(self) -> Calls:
        isa = Processor.here().isa()
        if isa is None:
            raise ValueError(
                "kascade: this processor has none of the instruction sets that flash_cpu's kernels are for."
            )
        isa = isa.of(self.spec.dtype)
        # A step's keys and values are swapped: this cancels the swap by which a cache becomes an operand.
        return Calls(dataclasses.replace(self.spec, kv_layout="HND") if is_decode(self.spec) else self.spec, isa)

    def pooled_mass(self, layout: TileLayout, query: Array, key: Array) -> Array:
        """As :meth:`Kernels.pooled_mass`."""
        if self._mass_by_xla:
            return steps.pooled_mass(self.spec, self.tiling, layout, query, key)[0][:, :, None]
        return self._mass(layout, query, key, None)[0]

    def dense_layer(self, layout: TileLayout, query: Array, key: Array, value: Array) -> tuple[Array, Selection] | None:
        """As :meth:`Kernels.dense_layer`."""
        if self._mass_by_xla:
            return None
        mass, out = self._mass(layout, query, key, value)
        return out, select(self.tiling, layout, mass, self.settings.ablation)

    @property
    def _mass_by_xla(self) -> bool:
        """Whether the mass of a decode step is XLA's to compute."""
        short = not is_decode(self.spec) or self.tiling.unit < decode.BLOCK_KEYS
        return self.spec.query_length == 1 and short

    def _mass(self, layout: TileLayout, query: Array, key: Array, value: Array | None) -> tuple[Array, Any]:
        """The mass; with ``value`` also the output of dense attention, else None."""
        if self.spec.query_length == 1:
            seen = self._seen(layout)
            mass, out = self._calls.decode_mass(query, swap(key), swap(value), seen, self.tiling.unit)
            return mass[:, :, None], out
        arrays = {"query": query, "key": key} | ({} if value is None else {"value": value})
        found = self._run("mass", layout, arrays)
        return found["mass"], found.get("out")

    def attend(self, layout: TileLayout, query: Array, key: Array, value: Array, listed: Array) -> Array:
        """As :meth:`Kernels.attend`."""
        if is_decode(self.spec) and self.tiling.query_tiles == 1:
            cache, seen = (swap(key), swap(value)), self._seen(layout)
            return self._calls.decode_listed(query, *cache, seen, listed[:, :, 0], self.tiling.unit)
        return self._run("listed", layout, {"query": query, "key": key, "value": value, "listed": listed})["out"]

    def attend_with_residuals(
        self, layout: TileLayout, query: Array, key: Array, value: Array, listed: Array
    ) -> tuple[Array, Any]:
        """As :meth:`Kernels.attend_with_residuals`: the output not rounded, and the maximum and sum of every row."""
        operands = {"query": query, "key": key, "value": value, "listed": listed}
        residuals = self._run("listed", layout, operands, unrounded=True)
        return residuals["out"].astype(query.dtype), residuals

    def gradients(
        self, layout: TileLayout, query: Array, key: Array, value: Array, listed: Array, residuals: Any, d_out: Array
    ) -> tuple[Array, Array, Array]:
        """As :meth:`Kernels.gradients`."""
        operands = {"query": query, "key": key, "value": value, "listed": listed, "d_out": d_out}
        arrays = operands | residuals | {"d_lse": jnp.zeros_like(residuals["top"])} | self._seen(layout).by_name
        kernel = SparseKernel(self._calls.kernel, self.tiling.unit, "listed")
        found = self._calls.gradients("sparse_backward", kernel, arrays, Q=self.tiling.query_tile)
        return found["d_query"], found["d_key"], found["d_value"]

    def _run(
        self, units: Literal["listed", "mass"], layout: TileLayout, arrays: dict[str, Array], *, unrounded: bool = False
    ) -> dict[str, Array]:
        """The results of one of the kernels for several query tiles."""
        v_dim = arrays["value"].shape[-1] if "value" in arrays else 0
        calls = dataclasses.replace(self._calls, float32_results=unrounded)
        kernel = SparseKernel(dataclasses.replace(calls.kernel, value_head_dim=v_dim), self.tiling.unit, units)
        tiling, arrays = self.tiling, arrays | self._seen(layout).by_name
        return calls.call("sparse", kernel, arrays, Q=tiling.query_tile, I=tiling.query_tiles, W=tiling.units)

    def _seen(self, layout: TileLayout) -> Visibility:
        """The mask without the selection: causal over slots, inside length and segment."""
        t, ids = self.spec.query_length, layout.query_segment_ids
        seen = Layout(
            query_segment_ids=None if ids is None else ids[:, :t],
            key_value_segment_ids=layout.key_value_segment_ids,
            query_positions=layout.query_positions[:, :t],
            key_value_seq_lengths=layout.lengths,
        )
        return visibility(self.spec, seen)
