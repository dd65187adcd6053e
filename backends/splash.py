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

from . import tuned
from .contract import AttentionSpec, Layout, Part, Plan, check_options
from .devices import Target
from .features import Mode, Takes
from .splash_kernel import kernel_of, pull_back, with_log_sum_exp
from .splash_mask import Masking, visited_blocks
from .splash_operands import (
    BLOCK_OPTIONS,
    DTYPES,
    FEATURES,
    LANES,
    blocks_of,
    default_precision,
    from_kernel,
    is_block,
    no_sinks,
    plan_of,
    reasons,
    round_up,
    rows_to_kernel,
    segment_ids,
    to_kernel,
)
from .tunable import KernelWork

OPTIONS = {
    **BLOCK_OPTIONS,
    "fused_backward": "whether one kernel computes dq, dk and dv (True or False)",
    "tuned": "path of a table that attnsuite tune wrote; the options given beside it hold over the table's",
}
_TUNED = (256, 512, 1024, 2048)  # sizes that are tried: of 128 a grid has too many steps, 4096 fit no core


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
        grid = _grid(spec, target, read_options(spec, target, options))
        masking = Masking.of(spec, *grid.lengths)
        run = kernel_of(masking, grid.blocks, spec.logits_soft_cap, mode == "interpret")
        return plan_of(spec, layout, grid.lengths, run)

    def block_sizes(self, spec: AttentionSpec, target: Target) -> kernel.BlockSizes:
        """The block sizes of the kernel if none are given."""
        return _grid(spec, target, {}).blocks

    def defaults(self, spec: AttentionSpec, target: Target, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The rule's block sizes, with which ``attnsuite tune`` compares the candidates."""
        return _as_options(spec, _grid(spec, target, _checked(dict(given))).blocks)

    def candidates(
        self, spec: AttentionSpec, target: Target, given: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], ...]:
        """Block sizes for ``attnsuite tune``: of the backward pass if there is one, else of the forward pass."""
        longest = [round_up(length, LANES) for length in (spec.query_length, spec.key_value_length)]
        q, kv = (tuple(dict.fromkeys(min(size, length) for size in _TUNED)) for length in longest)
        if spec.needs_grad:
            return tuple(
                {"block_q_backward": block_q, "block_kv_backward": block_kv, "fused_backward": fused}
                for block_q in q
                for block_kv in kv
                for fused in (False, True)
            )
        return tuple(
            {"block_q": block_q, "block_kv": block_kv, "block_kv_compute": step}
            for block_q in q
            for block_kv in kv
            for step in dict.fromkeys((min(block_kv, 512), block_kv))
            if block_kv % step == 0
        )

    def work(self, spec: AttentionSpec, target: Target, options: Mapping[str, Any]) -> KernelWork:
        """The blocks that the kernel visits, and what it loads for them."""
        return _work(spec, _grid(spec, target, _checked(dict(options))))

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
        grid = _grid(spec, target, read_options(spec, target, options))
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


def read_options(spec: AttentionSpec, target: Target, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options, over those of the file that ``tuned`` names. Raises ValueError."""
    given = check_options("splash", options, OPTIONS)
    path = given.pop("tuned", None)
    return _checked({**({} if path is None else tuned.from_file(path, "splash", target, spec)), **given})


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
        backward |= {"use_fused_bwd_kernel": fused}
        backward |= {} if fused else {"block_q_dq": found.q_backward, "block_kv_dq": found.kv_backward}
    blocks = kernel.BlockSizes(block_q=found.q, block_kv=found.kv, block_kv_compute=found.kv_compute, **backward)
    return _Grid(blocks, found.lengths)


def _as_options(spec: AttentionSpec, blocks: kernel.BlockSizes) -> dict[str, Any]:
    """The block sizes of the pass that is tuned, as options."""
    if spec.needs_grad:
        sizes = {"block_q_backward": blocks.block_q_dkv, "block_kv_backward": blocks.block_kv_dkv}
        return sizes | {"fused_backward": blocks.use_fused_bwd_kernel}
    return {"block_q": blocks.block_q, "block_kv": blocks.block_kv, "block_kv_compute": blocks.block_kv_compute}


def _work(spec: AttentionSpec, grid: _Grid) -> KernelWork:
    """Of the forward pass, in which a block of queries stays while blocks of keys and values pass it.

    If there is a backward pass, of that: a block of keys stays while blocks of queries and of the output's gradient
    pass it. Without the fused kernel every block is visited twice.
    """
    blocks, (rows, keys) = grid.blocks, grid.lengths
    q, kv, step, kernels = blocks.block_q, blocks.block_kv, blocks.block_kv_compute or blocks.block_kv, 1
    if spec.needs_grad and blocks.block_q_dkv and blocks.block_kv_dkv:
        q, kv, step = blocks.block_q_dkv, blocks.block_kv_dkv, blocks.block_kv_dkv
        kernels = 1 if blocks.use_fused_bwd_kernel else 2
    visited = visited_blocks(Masking.of(spec, rows, keys), q, kv) * spec.batch * spec.num_heads * kernels
    dims = spec.head_dim + (spec.value_head_dim or spec.head_dim)
    element = 4 if spec.dtype == "float32" else 2
    moving, staying = (q, kv) if spec.needs_grad else (kv, q)
    return KernelWork(
        steps=visited,
        loaded_bytes=element * dims * visited * moving,
        buffer_bytes=2 * element * dims * (moving + staying) + 4 * (staying * dims + q * (step + 2 * LANES)),
    )


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    for name, value in options.items():
        if not (isinstance(value, bool) if name == "fused_backward" else is_block(value)):
            raise ValueError(f"splash: {name}={value!r} is not accepted; {name} is {OPTIONS[name]}.")
    return options


SPLASH = Splash()
