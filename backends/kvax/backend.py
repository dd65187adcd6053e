"""Kvax flash attention (Nebius) behind the contract.

The kernels are Kvax 0.1.0's own Triton kernels: a block mask made once per forward pass, and FlashAttention-2 forward
and backward over it. They run natively on NVIDIA GPUs and in Triton's interpreter on a CPU, and compile ahead of time
for absent GPUs. ``layout.py`` avoids Kvax's wrong results; ``upstream.py`` adapts Kvax to present versions of its
packages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh

from .. import tuned
from ..contract import AttentionSpec, Layout, Plan, check_options
from ..dealing import MeshAxes
from ..devices import Target
from ..features import DTYPES, Mode, Takes
from ..support import support
from ..tunable import KernelBuild
from . import availability
from . import blocks as block_sizes
from .blocks import Passes
from .mesh import OneDevice, OnMesh
from .planning import plan_with

if TYPE_CHECKING:
    from .upstream import Upstream

OPTIONS = block_sizes.OPTIONS | {"tuned": "path of a table that attnsuite tune wrote, with entries for the device"}
HEAD_DIMS = (16, 32, 64, 128, 192, 256)
VALUE_HEAD_DIMS = (16, 32, 64, 128, 256)
_INSTEAD = "use backend='chunked'"


@dataclasses.dataclass(frozen=True, slots=True)
class Kvax:
    """The ``kvax`` backend, on one device; :meth:`sharded` divides it among several."""

    name: str = "kvax"
    exact: bool = True
    devices: OneDevice | OnMesh = dataclasses.field(default_factory=OneDevice)

    def takes(self, target: Target, mode: Mode) -> Takes:
        """Causal or full attention with segments, lengths and positions."""
        linear = "whose memory is linear in the length"
        return Takes(
            features=frozenset({
                "causal", "bidirectional", "segments", "positions", "lengths", "scale", "gradient", "grouped_queries",
                "cross_length", "value_head_dim",
            }),
            dtypes=("bfloat16", "float16") if mode != "interpret" else DTYPES,
            head_dims=HEAD_DIMS,
            value_head_dims=VALUE_HEAD_DIMS,
            because={
                "dtype": "whose kernels multiply float32 as TF32 on GPUs, to 10 bits",
                "chunk": "to which chunks may be given as segment ids",
                "mask": linear,
                "bias": linear,
            },
        )  # fmt: skip

    def refuses(
        self, spec: AttentionSpec, target: Target, mode: Mode, options: Mapping[str, Any] | None
    ) -> tuple[str, ...]:
        """Refuses devices that are no NVIDIA GPU from Ampere on, and missing packages.

        Packages are checked for the present device, and for modes that run on the host (interpreting and compiling).
        """
        reasons = tuple(device_reasons(target, mode))
        if not reasons and (target.present or mode != "native"):
            return availability.missing(mode)
        return reasons

    def plan(
        self,
        spec: AttentionSpec,
        layout: Layout,
        *,
        target: Target,
        mode: Mode = "native",
        options: Mapping[str, Any] | None = None,
    ) -> Plan:
        """Make the block mask once for all layers. Options: see :data:`OPTIONS`; raises ValueError for others.

        Raises ImportError where Kvax cannot be used here, with the reasons.
        """
        blocks = _blocks(spec, target, check_options(self.name, options, OPTIONS))
        # A plan for XLA to compile needs jax-triton, as a native one does; compile_kernels does not.
        if reasons := availability.missing("native" if mode == "compile" else mode):
            raise ImportError(" ".join(reasons))
        return plan_with(upstream_of(mode, target), spec, layout, blocks, self.devices)

    def sharded(self, mesh: Mesh, axes: MeshAxes) -> Kvax | None:
        """The backend with the query length divided in Kvax's own order, beside the other dimensions of ``axes``.

        None if no length is divided: a device's share of sequences and heads is a problem of its own. None for a ring,
        which Kvax does not have.
        """
        if axes.context is None or axes.exchange != "gather":
            return None
        return dataclasses.replace(self, devices=OnMesh(mesh, axes))

    def compile_kernels(
        self, spec: AttentionSpec, target: Target, options: Mapping[str, Any] | None = None
    ) -> tuple[KernelBuild, ...]:
        """Compile every kernel of ``spec`` for a GPU that may be absent; sizes, never a speed.

        Options are those of :meth:`plan`. Raises ValueError for a spec or target that is refused, with the reasons, and
        ImportError if Triton is missing.
        """
        from . import build  # noqa: PLC0415 (imports Triton)

        given = check_options(self.name, options, OPTIONS)
        if reasons := support(self, spec, target, "compile").reasons:
            raise ValueError(" ".join(reasons))
        return build.compile_kernels(spec, target, _blocks(spec, target, given))

    def defaults(self, spec: AttentionSpec, target: Target, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The generation's block sizes, with which ``attnsuite tune`` compares the candidates."""
        return block_sizes.as_options(block_sizes.choose(spec, target, {}), backward=spec.needs_grad)

    def candidates(
        self, spec: AttentionSpec, target: Target, given: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], ...]:
        """Block sizes for ``attnsuite tune``: of the backward pass if there is one, else of the forward pass."""
        return block_sizes.candidates(backward=spec.needs_grad)


def _blocks(spec: AttentionSpec, target: Target, given: Mapping[str, Any]) -> Passes:
    """Block sizes by generation, replaced by the file of ``tuned``, then by the options themselves."""
    found = tuned.from_file(given["tuned"], "kvax", target, spec) if "tuned" in given else {}
    return block_sizes.choose(spec, target, {**found, **given})


def upstream_of(mode: Mode, target: Target) -> Upstream:
    """Kvax with the launcher of the mode. Importing this module imports neither Kvax nor Triton."""
    if mode == "interpret":
        from . import interpret  # noqa: PLC0415

        return interpret.interpreted()
    from . import upstream  # noqa: PLC0415

    return upstream.native(target.compute_capability if mode == "compile" else None)


def device_reasons(target: Target, mode: Mode) -> Iterator[str]:
    """Why Kvax's kernels do not run in ``mode`` on ``target``, whatever is installed."""
    if mode == "interpret":
        if target.platform != "cpu":
            yield f"interpret mode runs Kvax's kernels on a CPU, not on {target}; start with JAX_PLATFORMS=cpu."
        return
    if target.platform != "cuda":
        yield (
            f"Kvax's kernels run on NVIDIA GPUs, not on {target}; {_INSTEAD}, which runs on every platform, or "
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
            f"(8.0 or newer); {_INSTEAD}."
        )


KVAX = Kvax()
