"""JAX's Pallas kernel for TPUs, "splash" (sparse flash) attention, behind the contract.

The kernel is ``jax.experimental.pallas.ops.tpu.splash_attention``: FlashAttention-2's recurrence (arXiv 2307.08691)
over a static block mask, so that blocks with nothing visible cost nothing. It runs natively on TPUs, in Pallas'
interpreter anywhere, and compiles for absent TPUs. This file adds what the kernel leaves to its caller: batch, scale,
lengths that are no multiple of a block, key lengths and padding (as segment ids), one query token (any mask of one row
is a segmentation of the keys), and zero output for rows that see nothing. The kernel has attention sinks of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as kernel
from jaxtyping import Array

from .contract import AttentionSpec, Layout, Part, Plan
from .devices import Target
from .features import Mode, Takes
from .splash_blocks import TUNED_OPTION, as_options, candidates, checked, crossed, read_options, work_of
from .splash_kernel import kernel_of, pull_back, with_log_sum_exp
from .splash_mask import Masking
from .splash_operands import (
    BLOCK_OPTIONS,
    DTYPES,
    FEATURES,
    blocks_of,
    default_precision,
    from_kernel,
    no_sinks,
    plan_of,
    reasons,
    rows_to_kernel,
    segment_ids,
    to_kernel,
)
from .tunable import KernelWork

OPTIONS = {
    **BLOCK_OPTIONS,
    "fused_backward": "whether one kernel computes dq, dk and dv (True or False)",
    **TUNED_OPTION,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Splash:
    """The ``splash`` backend."""

    name: str = "splash"
    exact: bool = True

    def takes(self, target: Target, mode: Mode) -> Takes:
        """Masks that slots and segment ids can express."""
        linear = "whose memory is linear in the length"
        return Takes(
            features=FEATURES,
            dtypes=DTYPES,
            parts=True,
            because={"dtype": "whose kernel computes as TPUs do", "mask": linear, "bias": linear},
        )

    def refuses(
        self, spec: AttentionSpec, target: Target, mode: Mode, options: Mapping[str, Any] | None
    ) -> tuple[str, ...]:
        """Devices that are no TPU, positions that affect the mask of several query tokens, and sinks of one token."""
        return reasons(self.name, spec, target, mode)

    def plan(
        self,
        spec: AttentionSpec,
        layout: Layout,
        *,
        target: Target,
        mode: Mode = "native",
        options: Mapping[str, Any] | None = None,
    ) -> Plan:
        """Make the block masks once for all layers. Options: see :data:`OPTIONS`; raises ValueError for others."""
        given, notes = read_options(self.name, OPTIONS, spec, target, options)
        grid = _grid(spec, target, given)
        masking = Masking.of(spec, *grid.lengths)
        run = kernel_of(masking, grid.blocks, spec.logits_soft_cap, mode == "interpret")
        return plan_of(spec, layout, grid.lengths, run, notes)

    def block_sizes(self, spec: AttentionSpec, target: Target) -> kernel.BlockSizes:
        """The block sizes of the kernel if none are given."""
        return _grid(spec, target, {}).blocks

    def defaults(self, spec: AttentionSpec, target: Target, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The rule's block sizes, with which ``attnsuite tune`` compares the candidates."""
        given = checked(self.name, OPTIONS, dict(given))
        sizes = as_options(spec, blocks_of(self.name, spec, target, given))
        return sizes | ({"fused_backward": given.get("fused_backward", False)} if spec.needs_grad else {})

    def candidates(
        self, spec: AttentionSpec, target: Target, given: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], ...]:
        """Block sizes for ``attnsuite tune``: of the backward pass if there is one, else of the forward pass."""
        tried = candidates(spec)
        return crossed(tried, "fused_backward", (False, True)) if spec.needs_grad else tried

    def work(self, spec: AttentionSpec, target: Target, options: Mapping[str, Any]) -> KernelWork:
        """The blocks that the kernels visit, and what they load for them: two of the backward pass unless fused."""
        given = checked(self.name, OPTIONS, dict(options))
        return work_of(self.name, spec, target, given, passes=1 if given.get("fused_backward") else 2)

    def part(
        self,
        spec: AttentionSpec,
        layout: Layout,
        *,
        target: Target,
        mode: Mode = "native",
        options: Mapping[str, Any] | None = None,
    ) -> Part:
        """As :meth:`plan`, for keys that are one part of all. The kernel rounds each part's results to its dtype.

        If a row sees one key only, over all devices, this part cannot know it: that key's gradient is zero but for
        rounding.
        """
        grid = _grid(spec, target, read_options(self.name, OPTIONS, spec, target, options)[0])
        kernel = kernel_of(Masking.of(spec, *grid.lengths), grid.blocks, spec.logits_soft_cap, mode == "interpret")
        ids = segment_ids(spec, layout, grid.lengths)
        axes, sinks = None if ids is None else 0, no_sinks(spec)
        # Neither of a Part's two functions is differentiated.
        exactly = contextlib.nullcontext if spec.dtype == "float32" else default_precision

        def forward(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
            q, k, v = to_kernel(spec, grid.lengths, query, key, value)
            run = jax.vmap(lambda q, k, v, ids: with_log_sum_exp(kernel, q, k, v, ids, sinks), (0, 0, 0, axes))
            with exactly():
                out, lse = run(q, k, v, ids)
            lse = from_kernel(spec, lse[..., None])[..., 0]
            return from_kernel(spec, out).astype(jnp.float32), lse, jnp.zeros_like(lse)

        def backward(
            query: Array, key: Array, value: Array, out: Array, top: Array, rest: Array, d_out: Array
        ) -> tuple[Array, Array, Array]:
            q, k, v = to_kernel(spec, grid.lengths, query, key, value)
            lse = (top + rest)[..., None]
            out, d_out, lse = (rows_to_kernel(spec, grid.lengths[0], x) for x in (out, d_out, lse))
            run = jax.vmap(
                lambda q, k, v, ids, out, lse, d_out: pull_back(kernel, q, k, v, ids, sinks, out, lse, d_out),
                (0, 0, 0, axes, 0, 0, 0),
            )
            with exactly():
                gradients = run(q, k, v, ids, out, lse[..., 0], d_out)
            dq, dk, dv = (x.astype(jnp.float32) for x in gradients)
            length = spec.key_value_length
            dk, dv = dk[:, :, :length].swapaxes(1, 2), dv[:, :, :length].swapaxes(1, 2)
            return from_kernel(spec, dq) * spec.softmax_scale, dk, dv

        return Part(forward, backward)


@dataclasses.dataclass(frozen=True, slots=True)
class _Grid:
    """Block sizes, and the query and key lengths padded to whole blocks."""

    blocks: kernel.BlockSizes
    lengths: tuple[int, int]


def _grid(spec: AttentionSpec, target: Target, given: dict[str, Any]) -> _Grid:
    found = blocks_of("splash", spec, target, given)
    fused = given.get("fused_backward", False)
    backward: dict[str, Any] = {}
    if spec.needs_grad:
        backward = {"block_q_dkv": found.q_backward, "block_kv_dkv": found.kv_backward}
        backward |= {"block_kv_dkv_compute": found.kv_backward_compute, "use_fused_bwd_kernel": fused}
        backward |= {} if fused else {"block_q_dq": found.q_backward, "block_kv_dq": found.kv_backward}
    blocks = kernel.BlockSizes(block_q=found.q, block_kv=found.kv, block_kv_compute=found.kv_compute, **backward)
    return _Grid(blocks, found.lengths)


SPLASH = Splash()
