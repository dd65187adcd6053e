"""A splash kernel as a backend, and its block sizes: read from options, tried by ``attnsuite tune``, and counted.

For JAX's splash and tokamax's alike; no kernel is imported here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from . import choices
from .contract import Plan, check_options
from .devices import Target
from .features import Mode
from .layout import Layout
from .spec import AttentionSpec
from .splash_mask import Masking, visited_blocks
from .splash_operands import BLOCK_OPTIONS, LANES, Blocks, blocks_of, is_block, plan_of
from .tunable import KernelWork
from .vendor_kernel import VendorKernel, round_up

TUNED_OPTION = {"tuned": "path of a policy that attnsuite tune wrote; options given beside it hold over the policy's"}
_SIZES = (256, 512, 1024, 2048)  # sizes that are tried: of 128 a grid has too many steps, 4096 fit no core


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplashKernel(VendorKernel):
    """The backend of a splash kernel, with what ``attnsuite tune`` asks of it."""

    def defaults(self, spec: AttentionSpec, target: Target, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The rule's block sizes, with which ``attnsuite tune`` compares the candidates."""
        blocks = blocks_of(self.name, spec, target, checked(self.name, self.options, dict(given)))
        if not spec.needs_grad:
            return {"block_q": blocks.q, "block_kv": blocks.kv, "block_kv_compute": blocks.kv_compute}
        fused = {"fused_backward": blocks.fused} if "fused_backward" in self.options else {}
        return {"block_q_backward": blocks.q_backward, "block_kv_backward": blocks.kv_backward, **fused}

    def candidates(
        self, spec: AttentionSpec, target: Target, given: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], ...]:
        """Block sizes for ``attnsuite tune``: of the backward pass if there is one, else of the forward pass."""
        longest = [round_up(length, LANES) for length in (spec.query_length, spec.key_value_length)]
        q, kv = (tuple(dict.fromkeys(min(size, length) for size in _SIZES)) for length in longest)
        if spec.needs_grad:
            ways = [{"fused_backward": fused} for fused in (False, True)] if "fused_backward" in self.options else [{}]
            return tuple(
                {"block_q_backward": block_q, "block_kv_backward": block_kv, **way}
                for block_q in q
                for block_kv in kv
                for way in ways
            )
        return tuple(
            {"block_q": block_q, "block_kv": block_kv, "block_kv_compute": step}
            for block_q in q
            for block_kv in kv
            for step in dict.fromkeys((min(block_kv, 512), block_kv))
            if block_kv % step == 0
        )

    def work(self, spec: AttentionSpec, target: Target, options: Mapping[str, Any]) -> KernelWork:
        """Of the forward pass, in which a block of queries stays while blocks of keys and values pass it.

        If there is a backward pass, of that: a block of keys stays while blocks of queries and of the output's gradient
        pass it. Its kernels visit every block twice unless one computes all gradients. Raises ValueError.
        """
        blocks = blocks_of(self.name, spec, target, checked(self.name, self.options, dict(options)))
        q, kv, step = blocks.q, blocks.kv, blocks.kv_compute
        if spec.needs_grad:
            q, kv, step = blocks.q_backward, blocks.kv_backward, blocks.kv_backward_compute
        visited = visited_blocks(Masking.of(spec, *blocks.lengths), q, kv) * spec.batch * spec.num_heads
        twice = spec.needs_grad and "fused_backward" in self.options and not blocks.fused
        visited *= 2 if twice else 1
        dims = spec.head_dim + (spec.value_head_dim or spec.head_dim)
        element = 4 if spec.dtype == "float32" else 2
        moving, staying = (q, kv) if spec.needs_grad else (kv, q)
        return KernelWork(
            steps=visited,
            loaded_bytes=element * dims * visited * moving,
            buffer_bytes=2 * element * dims * (moving + staying) + 4 * (staying * dims + q * (step + 2 * LANES)),
        )


def maker(
    name: str, options: Mapping[str, str], kernel_of: Callable[..., Callable[..., Any]]
) -> Callable[[AttentionSpec, Layout, Target, Mode, dict[str, Any]], Plan]:
    """``VendorKernel.make`` of a splash kernel: the block masks are made once for all layers.

    ``kernel_of(masking, blocks, soft_cap, interpret)`` gives a function of query, key, value, segment ids and sinks.
    """
    read = reader(name, options)

    def make(spec: AttentionSpec, layout: Layout, target: Target, mode: Mode, given: dict[str, Any]) -> Plan:
        blocks, notes = read(spec, target, given)
        masking = Masking.of(spec, *blocks.lengths)
        run = kernel_of(masking, blocks, spec.logits_soft_cap, mode == "interpret")
        return plan_of(spec, layout, blocks, run, notes)

    return make


def reader(
    name: str, options: Mapping[str, str]
) -> Callable[[AttentionSpec, Target, Mapping[str, Any]], tuple[Blocks, tuple[str, ...]]]:
    """``VendorKernel.check`` of a splash kernel: the blocks of these options, and whose figures they follow."""

    def read(spec: AttentionSpec, target: Target, given: Mapping[str, Any]) -> tuple[Blocks, tuple[str, ...]]:
        checked_options, notes = read_options(name, options, spec, target, given)
        return blocks_of(name, spec, target, checked_options), notes

    return read


def read_options(
    name: str, accepted: Mapping[str, str], spec: AttentionSpec, target: Target, options: Mapping[str, Any] | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The options, over those of the file that ``tuned`` names, and whose figures they follow. Raises ValueError."""
    given, notes = choices.with_tuned(check_options(name, options, accepted), name, accepted, target, spec)
    return checked(name, accepted, given), notes


def checked(name: str, accepted: Mapping[str, str], options: dict[str, Any]) -> dict[str, Any]:
    """The options. Raises ValueError if one has a value that its kind does not accept."""
    for option, value in options.items():
        right = is_block(value) if option in BLOCK_OPTIONS else option in accepted and isinstance(value, bool)
        if not right:
            what = accepted.get(option, "no option of this backend")
            raise ValueError(f"{name}: {option}={value!r} is not accepted; {option} is {what}.")
    return options
