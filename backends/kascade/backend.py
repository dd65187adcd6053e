"""The ``kascade`` backend: calibrated cross-layer sparse attention (arXiv 2512.16391) behind the common interface.

A plan holds the schedule and the tiling; the carry is the :class:`~backends.kascade.selection.Selection` of the latest
anchor. Training-free and forward only. Approximate: ``exact`` is False, and ``auto`` never takes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from jaxtyping import Array, Float

from backends.contract import AttentionSpec, Carry, Layout, Mode, Plan, Support
from backends.devices import Target
from backends.kascade import kernels, reference
from backends.kascade.schedule import LayerRole, manual
from backends.kascade.selection import Places, Selection
from backends.kascade.settings import Settings, Tiling

_INSTEAD = "use backend='chunked'"


@dataclasses.dataclass(frozen=True, slots=True)
class Kascade:
    """The ``kascade`` backend."""

    name: str = "kascade"
    exact: bool = False

    def supports(self, spec: AttentionSpec, target: Target, mode: Mode = "native") -> Support:
        """Causal attention without gradients, over slots; every reason why not."""
        reasons = [*_spec_reasons(spec)]
        if mode == "interpret":
            reasons += kernels.pallas(target).refuses(spec, Settings.of({}, "pallas"), target)
        return Support(None, tuple(reasons)) if reasons else Support(mode)

    def roles(self, spec: AttentionSpec) -> Mapping[str, tuple[Mapping[str, Any], int]]:
        """One layer that selects and one that reuses its selection; dense layers are the other backends'."""
        schedule = manual((0, 1), num_layers=3, kv_heads=spec.num_kv_heads)
        return {"anchor": ({}, 0), "reuse": ({"schedule": schedule}, 2)}

    def plan(
        self,
        spec: AttentionSpec,
        layout: Layout,
        *,
        target: Target,
        mode: Mode = "native",
        options: Mapping[str, Any] | None = None,
    ) -> Plan:
        """Cut the problem into tiles once for all layers. Options: see ``backends.kascade.OPTIONS``.

        ``plan.run(..., layer=i, carry=carry)`` does what the schedule says of layer ``i``; without a schedule every
        layer is an anchor. Raises ValueError for options that are not accepted, for key positions, and, when a layer
        runs, where the schedule does not know it or a reuse layer gets no selection.
        """
        settings = Settings.of(options, "pallas" if mode == "interpret" else "xla")
        tiling = Tiling.of(spec, settings)
        Places.of(spec, layout, tiling)

        def attend(
            query: Float[Array, "b t n h"],
            key: Float[Array, "b s k h"],
            value: Float[Array, "b s k v"],
            layer: int,
            carry: Carry,
        ) -> tuple[Float[Array, "b t n v"], Carry]:
            role = _role(settings, spec, layer)
            if role.role == "reuse":
                selection = _carried(carry, tiling, spec, layer)
                if settings.ablation != "no_remap":
                    selection = selection.remapped(role.head_map or tuple(range(spec.num_kv_heads)))
                return reference.attend(spec, layout, tiling, query, key, value, selection), carry
            selection = reference.select(spec, layout, tiling, query, key, settings.ablation)
            if role.role == "dense":
                return reference.dense(spec, layout, query, key, value), selection
            return reference.attend(spec, layout, tiling, query, key, value, selection), selection

        return Plan(attend)


def _role(settings: Settings, spec: AttentionSpec, layer: int) -> LayerRole:
    if settings.schedule is None:
        return LayerRole("anchor", layer)
    layers = settings.schedule.layers
    if not 0 <= layer < len(layers):
        raise ValueError(f"kascade: layer {layer} runs, but the schedule is for {len(layers)} layers.")
    role = layers[layer]
    if role.head_map and (len(role.head_map) != spec.num_kv_heads or max(role.head_map) >= spec.num_kv_heads):
        raise ValueError(
            f"kascade: layer {layer} of the schedule maps its KV heads to {role.head_map}, "
            f"but this model has {spec.num_kv_heads} of them."
        )
    return role


def _carried(carry: Carry, tiling: Tiling, spec: AttentionSpec, layer: int) -> Selection:
    if not isinstance(carry, Selection):
        raise ValueError(  # noqa: TRY004  (a carry of () is no wrong type: the layers ran out of order)
            f"kascade: layer {layer} reuses a selection, but none was handed to it; "
            "run the layers in order and pass each one's carry to the next."
        )
    expected = (spec.batch, spec.num_kv_heads, tiling.query_tiles, tiling.slots)
    if carry.selected.shape != expected:
        raise ValueError(
            f"kascade: layer {layer} was handed a selection of shape {carry.selected.shape}; expected {expected} "
            "[batch, KV heads, query tiles, slots]."
        )
    return carry


def _spec_reasons(spec: AttentionSpec) -> Iterator[str]:
    if spec.needs_grad:
        yield f"needs_grad=True is not supported by kascade, which has no backward pass; {_INSTEAD}."
    if not spec.is_causal:
        yield f"is_causal=False is not supported by kascade, which selects among earlier keys; {_INSTEAD}."
    if spec.window is not None:
        yield f"local_window_size={spec.window} is not supported by kascade (a window is sparse already); {_INSTEAD}."
    if spec.chunk_size is not None:
        yield f"chunk_size={spec.chunk_size} is not supported by kascade (a chunk is sparse already); {_INSTEAD}."
    if spec.has_positions and spec.query_length > 1 and not spec.has_seq_lengths:
        yield (
            f"explicit positions with query_length={spec.query_length} are supported by kascade only as those of new "
            f"tokens behind a cache (consecutive, with key_value_seq_lengths); {_INSTEAD}."
        )
    for name, has in (("mask", spec.has_mask), ("bias", spec.has_bias)):
        if has:
            yield (
                f"an explicit {name} array is not supported by kascade, whose memory is linear in the length; "
                "use backend='standard'."
            )


KASCADE = Kascade()
