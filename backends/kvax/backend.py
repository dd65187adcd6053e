"""Kvax flash attention (Nebius) behind the contract.

The kernels are Kvax 0.1.0's own Triton kernels: a block mask made once per forward pass, and FlashAttention-2 forward
and backward over it. They run natively on NVIDIA GPUs and in Triton's interpreter on a CPU, and compile ahead of time
for absent GPUs. ``converted_layout.py`` avoids Kvax's wrong results; ``upstream.py`` adapts Kvax to present versions of
its packages.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from jax.sharding import Mesh

from .. import choices
from ..contract import Plan, check_options
from ..devices import Target
from ..features import DTYPES, INSTEAD, Mode, Options, Takes
from ..layout import Layout
from ..sharding import MeshAxes
from ..spec import AttentionSpec
from ..support import support
from ..tunable import KernelBuild
from ..vendor_kernel import VendorKernel
from . import availability, block_sizes
from .block_sizes import Passes
from .mesh import OneDevice, OnMesh, plan_with
from .upstream import Upstream

OPTIONS = block_sizes.OPTIONS | {"tuned": "path of a policy that attnsuite tune wrote, with options for the device"}
HEAD_DIMS = (16, 32, 64, 128, 192, 256)
VALUE_HEAD_DIMS = (16, 32, 64, 128, 256)


class Kvax(VendorKernel):
    """The ``kvax`` backend, on one device; :meth:`sharded` divides it among several."""

    def takes(self, target: Target, mode: Mode) -> Takes:
        """The allow-list; float32 in the interpreter only, where products are exact."""
        return dataclasses.replace(self.allowed, dtypes=DTYPES) if mode == "interpret" else self.allowed

    def sharded(self, mesh: Mesh, axes: MeshAxes) -> Kvax | None:
        """The backend with the query length divided in Kvax's own order, beside the other dimensions of ``axes``.

        None if no length is divided: a device's share of sequences and heads is a problem of its own. None for a ring,
        which Kvax does not have.
        """
        if axes.context is None or axes.exchange != "gather":
            return None
        return dataclasses.replace(self, make=functools.partial(_plan, OnMesh(mesh, axes)))

    def compile_kernels(self, spec: AttentionSpec, target: Target, options: Options = None) -> tuple[KernelBuild, ...]:
        """Compile every kernel of ``spec`` for a GPU that may be absent; sizes, never a speed.

        Options are those of :meth:`plan`. Raises ValueError for a spec or target that is refused, with the reasons, and
        ImportError if Triton is missing.
        """
        from . import build  # noqa: PLC0415 (imports Triton)

        checked = check_options(self.name, options, OPTIONS)
        if reasons := support(self, spec, target, "compile").reasons:
            raise ValueError(" ".join(reasons))
        return build.compile_kernels(spec, target, _blocks(spec, target, checked))

    def defaults(self, spec: AttentionSpec, target: Target, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """The generation's block sizes, with which ``attnsuite tune`` compares the candidates."""
        return block_sizes.as_options(block_sizes.choose(spec, target, {}), backward=spec.needs_grad)

    def candidates(
        self, spec: AttentionSpec, target: Target, options: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], ...]:
        """Block sizes for ``attnsuite tune``: of the backward pass if there is one, else of the forward pass."""
        return block_sizes.candidates(backward=spec.needs_grad)


def _plan(
    devices: OneDevice | OnMesh,
    spec: AttentionSpec,
    layout: Layout,
    target: Target,
    mode: Mode,
    options: dict[str, Any],
) -> Plan:
    """Make the block mask once for all layers. Options: see :data:`OPTIONS`."""
    blocks = _blocks(spec, target, options)
    # A plan for XLA to compile needs jax-triton, as a native one does; compile_kernels does not.
    if mode == "compile" and (reasons := availability.missing("native")):
        raise ImportError(" ".join(reasons))
    return plan_with(upstream_of(mode, target), spec, layout, blocks, devices)


def _blocks(spec: AttentionSpec, target: Target, options: Mapping[str, Any]) -> Passes:
    """Block sizes by generation, replaced by the file of ``tuned``, then by the options themselves."""
    return block_sizes.choose(spec, target, choices.with_tuned(options, "kvax", OPTIONS, target, spec)[0])


def upstream_of(mode: Mode, target: Target) -> Upstream:
    """Kvax with the launcher of the mode. Importing this module imports neither Kvax nor Triton."""
    if mode == "interpret":
        from . import interpret  # noqa: PLC0415

        return interpret.interpreted()
    from . import upstream  # noqa: PLC0415

    return upstream.native(target.compute_capability if mode == "compile" else None)


def device_reasons(target: Target, mode: Mode) -> Iterator[str]:
    """Why Kvax's kernels do not run in ``mode`` on ``target``, whatever is installed: they need Ampere or later."""
    if mode == "interpret":
        if target.platform != "cpu":
            yield f"interpret mode runs Kvax's kernels on a CPU, not on {target}; start with JAX_PLATFORMS=cpu."
        return
    if target.platform != "cuda":
        yield (
            f"Kvax's kernels run on NVIDIA GPUs, not on {target}; {INSTEAD}, which runs on every platform, or "
            "mode='interpret' to verify the kernels on a CPU."
        )
    elif target.compute_capability is None:
        yield (
            f"the compute capability of {target} is not known and decides Kvax's block sizes; give it, as in "
            "Target('cuda', compute_capability=(9, 0)), or name a known kind such as 'h100'."
        )
    elif target.compute_capability < (8, 0):
        yield (
            f"compute capability {'.'.join(map(str, target.compute_capability))} is too old for Kvax's kernels "
            f"(8.0 or newer); {INSTEAD}."
        )


_LINEAR = "whose memory is linear in the length"

KVAX = Kvax(
    name="kvax",
    allowed=Takes(
        features=frozenset({
            "causal", "bidirectional", "segments", "positions", "lengths", "scale", "gradient", "grouped_queries",
            "cross_length", "value_head_dim",
        }),
        dtypes=("bfloat16", "float16"),
        head_dims=HEAD_DIMS,
        value_head_dims=VALUE_HEAD_DIMS,
        because={
            "dtype": "whose kernels multiply float32 as TF32 on GPUs, to 10 bits",
            "chunk": "to which chunks may be given as segment ids",
            "mask": _LINEAR,
            "bias": _LINEAR,
        },
    ),
    reasons=lambda _, target, mode, __: device_reasons(target, mode),
    missing=availability.missing,
    options=OPTIONS,
    check=_blocks,
    make=functools.partial(_plan, OneDevice()),
)  # fmt: skip
