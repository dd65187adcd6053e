"""A splash kernel as a backend: its plan, and its block sizes, read from options, tried by ``tune``, and counted.

For JAX's splash and tokamax's alike; no kernel is imported here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from . import choices
from .contract import Plan, check_options
from .devices import Target
from .features import Mode, Options
from .layout import Layout
from .operands import Terms
from .spec import AttentionSpec
from .splash_operands import (
    BLOCK_OPTIONS,
    LANES,
    Blocks,
    Masking,
    blocks_of,
    default_precision,
    from_kernel,
    in_context,
    is_block,
    no_sinks,
    one_key_is_seen,
    scaling_notes,
    segment_ids,
    to_kernel,
    visited_blocks,
)
from .tunable import KernelWork
from .vendor_kernel import VendorKernel, round_up

TUNED_OPTION = {"tuned": "path of a policy that attnsuite tune wrote; options given beside it hold over the policy's"}
_SIZES = (256, 512, 1024, 2048)  # sizes that are tried: of 128 a grid has too many steps, 4096 fit no core


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplashKernel(VendorKernel):
    """The backend of a splash kernel, with what ``attnsuite tune`` asks of it."""

    def defaults(self, spec: AttentionSpec, target: Target, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """The rule's block sizes, with which ``attnsuite tune`` compares the candidates."""
        blocks = blocks_of(self.name, spec, target, checked(self.name, self.options, dict(options)))
        if not spec.needs_grad:
            return {"block_q": blocks.q, "block_kv": blocks.kv, "block_kv_compute": blocks.kv_compute}
        fused = {"fused_backward": blocks.fused} if "fused_backward" in self.options else {}
        return {"block_q_backward": blocks.q_backward, "block_kv_backward": blocks.kv_backward, **fused}

    def candidates(
        self, spec: AttentionSpec, target: Target, options: Mapping[str, Any]
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


def plan_of(
    name: str,
    accepted: Mapping[str, str],
    kernel_of: Callable[..., Callable[..., Array]],
    spec: AttentionSpec,
    layout: Layout,
    target: Target,
    mode: Mode,
    options: Mapping[str, Any],
) -> Plan:
    """The plan of a splash kernel. The block masks are made once for all layers.

    ``kernel_of(masking, blocks, soft_cap, interpret)`` gives a function of query, key, value, segment ids and sinks of
    one batch entry, padded to whole blocks.
    """
    blocks, notes = read_blocks(name, accepted, spec, target, options)
    lengths = blocks.lengths
    run = kernel_of(Masking.of(spec, *lengths), blocks, spec.logits_soft_cap, mode == "interpret")
    ids, without = segment_ids(spec, layout, lengths), no_sinks(spec)
    alone = one_key_is_seen(ids) if spec.needs_grad and not spec.has_sinks else None
    call = jax.vmap(run, (0, 0, 0, None if ids is None else 0, None))
    call = call if spec.dtype == "float32" else in_context(call, default_precision)

    def attend(
        query: Float[Array, "b t n h"], key: Float[Array, "b s k h"], value: Float[Array, "b s k v"], terms: Terms
    ) -> Float[Array, "b t n v"]:
        sinks = without if terms.sinks is None else jnp.asarray(terms.sinks)
        if alone is not None:
            query, key = (jnp.where(alone, jax.lax.stop_gradient(x), x) for x in (query, key))
        q, k, v = to_kernel(spec, lengths, query, key, value)
        return from_kernel(spec, call(q, k, v, ids, sinks))

    notes = (*scaling_notes(spec), *notes)
    return Plan.stateless(attend, notes, gradient=spec.needs_grad, key_blocks=blocks.keys)


def read_blocks(
    name: str, accepted: Mapping[str, str], spec: AttentionSpec, target: Target, options: Options
) -> tuple[Blocks, tuple[str, ...]]:
    """The blocks of the options, and whose figures they follow. Raises ValueError."""
    checked_options, notes = read_options(name, accepted, spec, target, options)
    return blocks_of(name, spec, target, checked_options), notes


def read_options(
    name: str, accepted: Mapping[str, str], spec: AttentionSpec, target: Target, options: Options
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The options, over those of the file that ``tuned`` names, and whose figures they follow. Raises ValueError."""
    checked_options, notes = choices.with_tuned(check_options(name, options, accepted), name, accepted, target, spec)
    return checked(name, accepted, checked_options), notes


def checked(name: str, accepted: Mapping[str, str], options: dict[str, Any]) -> dict[str, Any]:
    """The options. Raises ValueError if one has a value that its kind does not accept."""
    for option, value in options.items():
        right = is_block(value) if option in BLOCK_OPTIONS else option in accepted and isinstance(value, bool)
        if not right:
            what = accepted.get(option, "no option of this backend")
            raise ValueError(f"{name}: {option}={value!r} is not accepted; {option} is {what}.")
    return options
