"""The ``kascade`` backend: calibrated cross-layer sparse attention (arXiv 2512.16391) behind the common interface.

A plan holds the schedule and the tiling. The carry is the :class:`~attnsuite.backends.kascade.selection.Selection` of
the latest anchor. The gradient is that of the pairs which were attended to; a selection has none. Approximate:
``exact`` is False, and ``auto`` never takes it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from .. import choices
from ..contract import AttentionSpec, Carry, Layout, Plan
from ..derivatives import forward_only
from ..devices import Target
from ..features import INSTEAD, Mode, Options, Takes
from ..resolve import resolve
from ..sharding import MeshAxes
from . import block_sizes
from .backward import differentiable
from .cost import runs_dense, selected_share
from .kernels import Kernels
from .schedule import LayerRole, manual
from .selection import Selection, TileLayout
from .settings import OPTIONS as ACCEPTED
from .settings import Kernel, Settings, Tiling
from .xla import Heads, XlaKernels

_PALLAS_PLATFORMS = ("tpu", "cuda")
_NOT_INTERPRETED = {"xla": "plain XLA", "flash_cpu": "native code"}


@dataclasses.dataclass(frozen=True, slots=True)
class Kascade:
    """The ``kascade`` backend; :meth:`sharded` divides its heads among several devices."""

    name: str = "kascade"
    exact: bool = False
    heads: Heads | None = None

    def takes(self, target: Target, mode: Mode) -> Takes:
        """Causal attention."""
        sparse, linear = "which selects among earlier keys itself", "whose memory is linear in the length"
        return Takes(
            features=frozenset({
                "causal", "soft_cap", "scale", "segments", "positions", "lengths", "grouped_queries", "cross_length",
                "value_head_dim", "gradient",
            }),
            carries=True,
            because={
                "bidirectional": "which selects among earlier keys",
                "window": sparse,
                "chunk": sparse,
                "mask": linear,
                "bias": linear,
            },
        )  # fmt: skip

    def refuses(self, spec: AttentionSpec, target: Target, mode: Mode, options: Options) -> tuple[str, ...]:
        """Positions other than those of new tokens behind a cache, and problems that the kernel cannot compute."""
        try:
            settings = _settings(spec, target, mode, options)
        except ValueError:  # what no plan has is no reason of support: plan raises it
            return tuple(_position_reasons(spec))
        divided = () if self.heads is None else _sharding_reasons(settings, spec)
        return *_position_reasons(spec), *divided, *_kernel_reasons(spec, settings, target, mode)

    def sharded(self, mesh: Mesh, axes: MeshAxes) -> Kascade | None:
        """The backend with its KV heads divided: each device selects for its own; only selections are exchanged.

        None for other axes: sequences are independent, so a device's share of the batch is a problem of its own.
        """
        if not isinstance(axes.heads, str) or len(axes.named()) > 1:
            return None
        return dataclasses.replace(self, heads=Heads(mesh, axes.heads))

    def roles(self, spec: AttentionSpec) -> Mapping[str, tuple[Mapping[str, Any], int]]:
        """One layer that selects and one that reuses its selection. Other backends compute dense layers."""
        schedule = manual((0, 1), num_layers=3, kv_heads=spec.num_kv_heads)
        return {"anchor": ({}, 0), "reuse": ({"schedule": schedule}, 2)}

    selected_share = staticmethod(selected_share)

    @property
    def exact_options(self) -> Mapping[str, Any]:
        """Every earlier key is selected."""
        return {"top_k": 1.0}

    # For ``attnsuite tune``.
    defaults = staticmethod(block_sizes.defaults)
    candidates = staticmethod(block_sizes.candidates)
    work = staticmethod(block_sizes.work)

    def plan(
        self, spec: AttentionSpec, layout: Layout, *, target: Target, mode: Mode = "native", options: Options = None
    ) -> Plan:
        """Cut the problem into tiles and check the schedule once. Options: see ``backends.kascade.OPTIONS``.

        ``plan.run(..., layer=i, carry=carry)`` computes layer ``i`` in its role of the schedule; without a schedule
        every layer is an anchor. Raises ValueError for options that are not accepted, for key positions, and for a
        schedule of other KV heads. Running a layer raises ValueError if there is a schedule and no ``layer``, if the
        schedule has no such layer, or if a reuse layer gets no selection. The output of a traced ``layer`` that the
        schedule does not have is NaN.
        """
        settings = _settings(spec, target, mode, options)
        roles = _roles(settings, spec)
        num_layers = None if roles is None else len(roles)
        tiling = Tiling.of(spec, settings)
        tile_layout = TileLayout.of(spec, layout, tiling)
        if (instead := runs_dense(spec, settings)) is not None:
            dense = resolve("auto", spec, target)
            notes = (f"{instead}; {dense.backend.name} ran.",)
            return Plan(dense.plan(layout).attend, notes, num_layers=num_layers)
        kernels = kernels_of(settings.kernel, target)(spec, tiling, settings, mode == "interpret")
        if isinstance(kernels, XlaKernels):
            kernels = dataclasses.replace(kernels, heads=self.heads)
        attend_selected = differentiable(kernels) if spec.needs_grad else kernels.attend_selected
        dense_layer = functools.partial(kernels.dense_layer, tile_layout)
        if (settings.kernel != "xla" or spec.needs_grad) and "dense" in {role.role for role in roles or ()}:
            dense_layer = _dense(kernels, tile_layout, layout, target)

        def attend(
            query: Float[Array, "b t n h"],
            key: Float[Array, "b s k h"],
            value: Float[Array, "b s k v"],
            layer: int | Array | None,
            carry: Carry,
        ) -> tuple[Float[Array, "b t n v"], Carry]:
            def reuse(head_map: tuple[int, ...] | Array) -> tuple[Array, Carry]:
                selection = _carried(carry, tiling, spec, layer)
                if settings.ablation != "no_remap":
                    selection = selection.remapped(head_map)
                return attend_selected(tile_layout, query, key, value, selection), carry

            def dense(_: Any) -> Any:
                return dense_layer(query, key, value)

            def anchor(_: Any) -> tuple[Array, Carry]:
                selection = kernels.select(tile_layout, *jax.lax.stop_gradient((query, key)))
                return attend_selected(tile_layout, query, key, value, selection), selection

            by_role = {"dense": dense, "anchor": anchor, "reuse": reuse}
            if roles is None or layer is None:
                return anchor(())
            if isinstance(layer, jax.Array):
                return _traced_role(roles, layer, spec, by_role)
            if not isinstance(layer, int | np.integer) or not 0 <= layer < len(roles):
                raise ValueError(f"kascade: layer {layer!r} runs, but the schedule is for {len(roles)} layers.")
            return by_role[roles[layer].role](roles[layer].head_map)

        attend = attend if spec.needs_grad else forward_only(attend)
        return Plan(attend, num_layers=num_layers, key_blocks=(tiling.unit,))


def _dense(
    kernels: Kernels, tile_layout: TileLayout, layout: Layout, target: Target
) -> Callable[[Array, Array, Array], tuple[Array, Selection]]:
    """A dense layer: the kernels' own where they have one and nothing is differentiated, else another backend's plan.

    Where that backend does not load, a dense layer raises its ImportError. The other layers do not need that backend.
    """
    try:
        planned = resolve("auto", kernels.spec, target).plan(layout)
    except ImportError as error:
        missing = error

        def refuse(*_: Array) -> Any:
            raise missing

        return refuse

    def dense(query: Array, key: Array, value: Array) -> tuple[Array, Selection]:
        if not kernels.spec.needs_grad and (found := kernels.dense_layer(tile_layout, query, key, value)):
            return found
        return planned.run(query, key, value)[0], kernels.select(tile_layout, *jax.lax.stop_gradient((query, key)))

    return dense


def _roles(settings: Settings, spec: AttentionSpec) -> tuple[LayerRole, ...] | None:
    """The role of each layer; None: all are anchors. Raises ValueError for the head maps of another model."""
    if settings.schedule is None:
        return None
    heads = {*range(spec.num_kv_heads)}
    for layer, role in enumerate(settings.schedule.layers):
        if role.head_map and (len(role.head_map) != spec.num_kv_heads or not heads.issuperset(role.head_map)):
            raise ValueError(
                f"kascade: layer {layer} of the schedule maps its KV heads to {role.head_map}, "
                f"but this model has {spec.num_kv_heads} of them."
            )
    return settings.schedule.layers


def _traced_role(
    roles: tuple[LayerRole, ...], layer: Array, spec: AttentionSpec, by_role: Mapping[str, Callable[..., Any]]
) -> Any:
    """The role of a layer whose number is known when the program runs: each role's code once.

    The output of a layer that the schedule does not have is NaN, as no error can be raised then.
    """
    identity = tuple(range(spec.num_kv_heads))
    head_maps = jnp.asarray([role.head_map or identity for role in roles])
    used = [name for name in by_role if name in {role.role for role in roles}]
    which = jnp.asarray([used.index(role.role) for role in roles])
    out, carry = jax.lax.switch(which[layer], [by_role[name] for name in used], head_maps[layer])
    return jnp.where((layer >= 0) & (layer < len(roles)), out, jnp.nan), carry


def _carried(carry: Carry, tiling: Tiling, spec: AttentionSpec, layer: Any) -> Selection:
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


def _settings(spec: AttentionSpec, target: Target, mode: Mode, options: Options) -> Settings:
    """The settings of the options, over those of the file that ``tuned`` names. Raises ValueError."""
    options = dict(options or {})
    if isinstance(options.get("tuned"), str):
        options = {**choices.with_tuned(options, "kascade", ACCEPTED, target, spec)[0], **options}
    return Settings.of(options, default_kernel(target, mode))


def default_kernel(target: Target, mode: Mode = "native") -> Kernel:
    """The default kernels of a target and mode."""
    return "pallas" if mode == "interpret" or target.platform in _PALLAS_PLATFORMS else "xla"


def kernels_of(kernel: Kernel | None, target: Target) -> type[Kernels]:
    """The kernels of that name for ``target``.

    Pallas has a Triton form for NVIDIA GPUs and a TPU form for all else, which an interpreter runs anywhere. Raises
    ImportError if they are not installed.
    """
    if kernel == "xla":
        return XlaKernels
    if kernel == "flash_cpu":
        from .flash_cpu import FlashCpuKernels  # noqa: PLC0415 (llvmlite may be missing)

        return FlashCpuKernels
    if target.platform == "cuda":
        from .pallas_triton import TritonKernels  # noqa: PLC0415 (Pallas' parts for one device may be missing)

        return TritonKernels
    from .pallas_tpu import TpuKernels  # noqa: PLC0415

    return TpuKernels


def _kernel_reasons(spec: AttentionSpec, settings: Settings, target: Target, mode: Mode) -> Iterator[str]:
    kernel = settings.kernel
    if mode == "interpret" and kernel in _NOT_INTERPRETED:
        yield (
            f"mode='interpret' is not supported by kascade with kernel={kernel!r}, which is "
            f"{_NOT_INTERPRETED[kernel]} without a kernel to interpret; use mode='native', or kernel='pallas'."
        )
    if mode != "interpret" and kernel == "pallas" and target.platform not in _PALLAS_PLATFORMS:
        yield (
            f"kernel='pallas' of kascade is for TPUs and NVIDIA GPUs, not for {target}; use kernel='xla', or "
            "mode='interpret' to check the kernel's numbers."
        )
    try:
        yield from kernels_of(kernel, target).refuses(spec, settings, target)
    except ImportError as error:
        name = "flash_cpu" if kernel == "flash_cpu" else "Pallas"
        yield f"kascade's {name} kernels do not load here ({error}); {INSTEAD}."


def _sharding_reasons(settings: Settings, spec: AttentionSpec) -> Iterator[str]:
    if spec.needs_grad:
        yield "gradients are not supported by kascade where heads are sharded; shard data, or use backend='chunked'."
    if settings.kernel != "xla":
        yield f"heads cannot be sharded by kascade with kernel={settings.kernel!r}; use kernel='xla', or shard data."
    if settings.ablation == "all_heads":
        yield (
            "heads cannot be sharded by kascade with ablation='all_heads', which needs all of them at once; leave out "
            "the ablation, or shard data."
        )


def _position_reasons(spec: AttentionSpec) -> Iterator[str]:
    if spec.has_positions and spec.query_length > 1 and not spec.has_seq_lengths:
        yield (
            f"an array of explicit positions with query_length={spec.query_length} is not supported by kascade "
            "(accepted: those of new tokens behind a cache, which are consecutive, with key_value_seq_lengths); "
            f"{INSTEAD}."
        )


KASCADE = Kascade()
