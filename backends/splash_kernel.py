"""JAX's splash kernel for one mask: made once per shape, mask and block sizes, and cached.

Making a kernel sorts its mask into blocks. Sorting reads every block, which takes seconds at long lengths. It needs
concrete numbers, although plans are made while a model is traced. Therefore the tables are NumPy arrays: they belong to
no device and no trace, and serve every head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as inside
from jaxtyping import Array

from .splash_mask import Masking, SlotMask, of_nothing


class _Mask(SlotMask, kernel.Mask):
    """A mask that the kernel accepts: it asks for the type."""


@functools.lru_cache(maxsize=32)
def kernel_of(
    masking: Masking, blocks: kernel.BlockSizes, soft_cap: float | None, interpret: bool
) -> Callable[..., Array]:
    """The kernel for this mask: a function of query, key, value, segment ids and sinks."""
    if masking.hides_everything:
        return of_nothing
    lengths = masking.query_length, masking.key_value_length
    mask = kernel.FullMask(lengths) if masking.mask is None else _Mask(masking, masking.mask)
    with jax.ensure_compile_time_eval():  # plans are made inside of jit too
        made = kernel.make_splash_mha_single_device(
            kernel.MultiHeadMask([mask]), block_sizes=blocks, attn_logits_soft_cap=soft_cap, interpret=interpret
        )
        return jax.tree.map(np.asarray, made)


def with_log_sum_exp(made: Any, *arguments: Any) -> tuple[Array, Array]:
    """Output and log-sum-exp ``[heads, rows]`` of a kernel that :func:`kernel_of` made."""
    made = type(made)(
        made.fwd_mask_info, made.dq_mask_info, made.dkv_mask_info, **(made.kwargs | {"save_residuals": True})
    )
    out, (log_sum_exp,) = made(*arguments)
    return out, log_sum_exp


def pull_back(
    made: Any, q: Array, k: Array, v: Array, ids: Any, sinks: Array, out: Array, log_sum_exp: Array, d_out: Array
) -> tuple[Array, Array, Array]:
    """dq, dk and dv of a kernel of :func:`kernel_of`. ``out`` and ``log_sum_exp`` may cover keys that it does not read.

    The kernel's public gradient takes only its own output, hence the private name; ``tests/backends/test_sharding.py``
    fails if it changes.
    """
    residuals = q, k, v, ids, sinks, out, log_sum_exp, made.dq_mask_info, made.dkv_mask_info
    names = ("mask_value", "is_mqa", "block_sizes", "residual_checkpoint_name", "mask_function")
    names += ("attn_logits_soft_cap", "interpret")
    static = {name: made.kwargs[name] for name in names}
    gradients = inside._splash_attention_bwd(save_residuals=False, **static, res=residuals, do=d_out)  # noqa: SLF001
    return gradients[3], gradients[4], gradients[5]
