"""JAX's Pallas kernel for TPUs, "splash" (sparse flash) attention, behind the contract.

The kernel is ``jax.experimental.pallas.ops.tpu.splash_attention``: FlashAttention-2's recurrence (arXiv 2307.08691)
over a static block mask, so that blocks with nothing visible cost nothing. It runs natively on TPUs, in Pallas'
interpreter anywhere, and compiles for absent TPUs. ``splash_operands.py`` adds what the kernel leaves to its caller.
The kernel has attention sinks of its own.

Making a kernel sorts its mask into blocks. Sorting reads every block, which takes seconds at long lengths. It needs
concrete numbers, although plans are made while a model is traced. Therefore the tables are NumPy arrays: they belong to
no device and no trace, and serve every head.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as inside
from jaxtyping import Array

from .contract import Part
from .devices import Target
from .features import Mode, Options, Takes
from .layout import Layout
from .spec import AttentionSpec
from .splash_blocks import TUNED_OPTION, SplashKernel, plan_of, read_blocks
from .splash_operands import (
    BLOCK_OPTIONS,
    DTYPES,
    FEATURES,
    Blocks,
    Masking,
    default_precision,
    from_kernel,
    no_sinks,
    of_nothing,
    reasons,
    rows_to_kernel,
    segment_ids,
    to_kernel,
)

OPTIONS = {
    **BLOCK_OPTIONS,
    "fused_backward": "whether one kernel computes dq, dk and dv (True or False)",
    **TUNED_OPTION,
}


class _Mask(Masking, kernel.Mask):
    """A mask that the kernel accepts: it asks for the type."""


@functools.lru_cache(maxsize=32)
def kernel_of(masking: Masking, blocks: Blocks, soft_cap: float | None, interpret: bool) -> Callable[..., Array]:
    """The kernel for this mask: a function of query, key, value, segment ids and sinks."""
    if masking.hides_everything:
        return of_nothing
    full = masking.mask_function is None
    mask = kernel.FullMask(masking.shape) if full else _Mask(*masking.shape, masking.mask_function)
    with jax.ensure_compile_time_eval():  # plans are made inside of jit too
        made = kernel.make_splash_mha_single_device(
            kernel.MultiHeadMask([mask]),
            block_sizes=block_sizes(blocks),
            attn_logits_soft_cap=soft_cap,
            interpret=interpret,
        )
        return jax.tree.map(np.asarray, made)


def block_sizes(blocks: Blocks) -> kernel.BlockSizes:
    """The blocks in the kernel's words."""
    backward: dict[str, Any] = {}
    if blocks.backward:
        backward = {"block_q_dkv": blocks.q_backward, "block_kv_dkv": blocks.kv_backward}
        backward |= {"block_kv_dkv_compute": blocks.kv_backward_compute, "use_fused_bwd_kernel": blocks.fused}
        backward |= {} if blocks.fused else {"block_q_dq": blocks.q_backward, "block_kv_dq": blocks.kv_backward}
    return kernel.BlockSizes(block_q=blocks.q, block_kv=blocks.kv, block_kv_compute=blocks.kv_compute, **backward)


class Splash(SplashKernel):
    """The ``splash`` backend, which can attend to a part of the keys."""

    def part(
        self, spec: AttentionSpec, layout: Layout, *, target: Target, mode: Mode = "native", options: Options = None
    ) -> Part:
        """As :meth:`plan`, for keys that are one part of all. The kernel rounds each part's results to its dtype.

        If a row sees one key only, over all devices, this part cannot know it: that key's gradient is zero but for
        rounding.
        """
        blocks, _ = read_blocks(self.name, self.options, spec, target, options)
        return _part(spec, layout, blocks, mode == "interpret")


def _part(spec: AttentionSpec, layout: Layout, blocks: Blocks, interpret: bool) -> Part:
    lengths = blocks.lengths
    made: Any = kernel_of(Masking.of(spec, *lengths), blocks, spec.logits_soft_cap, interpret)
    ids, sinks = segment_ids(spec, layout, lengths), no_sinks(spec)
    axes = None if ids is None else 0
    # Neither of a Part's two functions is differentiated.
    exactly = contextlib.nullcontext if spec.dtype == "float32" else default_precision

    def forward(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
        with_sum = type(made)(
            made.fwd_mask_info, made.dq_mask_info, made.dkv_mask_info, **(made.kwargs | {"save_residuals": True})
        )
        run = jax.vmap(lambda q, k, v, ids: with_sum(q, k, v, ids, sinks), (0, 0, 0, axes))
        with exactly():
            out, (lse,) = run(*to_kernel(spec, lengths, query, key, value), ids)
        lse = from_kernel(spec, lse[..., None])[..., 0]
        return from_kernel(spec, out).astype(jnp.float32), lse, jnp.zeros_like(lse)

    def pull_back(q: Array, k: Array, v: Array, ids: Any, out: Array, lse: Array, d_out: Array) -> Any:
        # The kernel's public gradient takes only its own output, which does not cover the keys of other devices. Hence
        # the private name; tests/backends/test_sharding.py fails if it changes.
        residuals = q, k, v, ids, sinks, out, lse, made.dq_mask_info, made.dkv_mask_info
        names = ("mask_value", "is_mqa", "block_sizes", "residual_checkpoint_name", "mask_function")
        static = {name: made.kwargs[name] for name in (*names, "attn_logits_soft_cap", "interpret")}
        return inside._splash_attention_bwd(save_residuals=False, **static, res=residuals, do=d_out)[3:6]  # noqa: SLF001

    def backward(
        query: Array, key: Array, value: Array, out: Array, top: Array, rest: Array, d_out: Array
    ) -> tuple[Array, Array, Array]:
        operands = to_kernel(spec, lengths, query, key, value)
        out, d_out, lse = (rows_to_kernel(spec, lengths[0], x) for x in (out, d_out, (top + rest)[..., None]))
        with exactly():
            gradients = jax.vmap(pull_back, (0, 0, 0, axes, 0, 0, 0))(*operands, ids, out, lse[..., 0], d_out)
        dq, dk, dv = (x.astype(jnp.float32) for x in gradients)
        dk, dv = (x[:, :, : spec.key_value_length].swapaxes(1, 2) for x in (dk, dv))
        return from_kernel(spec, dq) * spec.softmax_scale, dk, dv

    return Part(forward, backward)


_LINEAR = "whose memory is linear in the length"

SPLASH = Splash(
    name="splash",
    allowed=Takes(
        features=FEATURES,
        dtypes=DTYPES,
        parts=True,
        because={"dtype": "whose kernel computes as TPUs do", "mask": _LINEAR, "bias": _LINEAR},
    ),
    platform="tpu",
    reasons=functools.partial(reasons, "splash"),
    options=OPTIONS,
    make=functools.partial(plan_of, "splash", OPTIONS, kernel_of),
)
