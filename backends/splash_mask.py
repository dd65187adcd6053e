"""Splash's block masks: the visibility that follows from slots alone, sorted into blocks once and cached.

Sorting reads every block of the mask, which takes seconds at long lengths. It needs concrete numbers, although plans
are made while a model is traced. Therefore the kernel is made once per shape, mask and block sizes, with its tables as
NumPy arrays: they belong to no device and no trace, and serve every head.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as inside
from jaxtyping import Array, Bool

from .contract import AttentionSpec


@dataclasses.dataclass(frozen=True, slots=True)
class Masking:
    """The visibility that follows from slots alone, known before there is data. Hashable: the key of the cache."""

    query_length: int
    key_value_length: int
    is_causal: bool = False
    window: tuple[int, int] | None = None
    chunk_size: int | None = None

    @staticmethod
    def of(spec: AttentionSpec, query_length: int, key_value_length: int) -> Masking:
        """The mask of ``spec`` over padded lengths."""
        if spec.query_length == 1:  # all of it is in the segment ids
            return Masking(query_length, key_value_length)
        return Masking(query_length, key_value_length, spec.is_causal, spec.window, spec.chunk_size)

    @property
    def hides_nothing(self) -> bool:
        """Whether every slot sees every slot."""
        return not self.is_causal and self.window is None and self.chunk_size is None

    def visible(self, q: Any, k: Any) -> Any:
        """Whether a query slot sees a key slot; NumPy arrays for the block mask, traced ones inside the kernel."""
        terms = [k <= q] if self.is_causal else []
        if self.window is not None:
            terms += [k >= q - self.window[0], k <= q + self.window[1]]
        if self.chunk_size is not None:
            terms.append(q // self.chunk_size == k // self.chunk_size)
        return functools.reduce(lambda a, b: a & b, terms)


def visited_blocks(masking: Masking, block_q: int, block_kv: int) -> int:
    """How many blocks of the score matrix have a visible pair, or nearly so where a mask has several conditions."""
    q = np.arange(0, masking.query_length, block_q)[:, None]
    k = np.arange(0, masking.key_value_length, block_kv)[None]
    q_end, k_end = q + block_q - 1, k + block_kv - 1
    seen = np.ones((q.shape[0], k.shape[1]), bool)
    if masking.is_causal:
        seen &= k <= q_end
    if masking.window is not None:
        seen &= (k_end >= q - masking.window[0]) & (k <= q_end + masking.window[1])
    if masking.chunk_size is not None:
        chunk = masking.chunk_size
        seen &= (q // chunk <= k_end // chunk) & (k // chunk <= q_end // chunk)
    return int(seen.sum())


class _SlotMask(kernel.Mask):
    """A :class:`Masking` as the kernel's block sorting asks for it.

    With ``q_sequence`` and ``mask_function`` the kernel computes the mask of a mixed block by itself.
    """

    def __init__(self, masking: Masking) -> None:
        self.masking = masking
        self.q_sequence = np.arange(masking.query_length, dtype=np.int32)
        self.mask_function = masking.visible

    @property
    def shape(self) -> tuple[int, int]:
        return self.masking.query_length, self.masking.key_value_length

    def __getitem__(self, index: tuple[slice, slice]) -> Bool[np.ndarray, "q k"]:
        rows, columns = (np.arange(n, dtype=np.int32)[part] for n, part in zip(self.shape, index, strict=True))
        return self.masking.visible(rows[:, None], columns[None, :])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SlotMask) and self.masking == other.masking

    def __hash__(self) -> int:
        return hash(self.masking)


@functools.lru_cache(maxsize=32)
def kernel_of(
    masking: Masking, blocks: kernel.BlockSizes, soft_cap: float | None, interpret: bool
) -> Callable[..., Array]:
    """The kernel for this mask: a function of query, key, value, segment ids and sinks."""
    mask = kernel.FullMask(_SlotMask(masking).shape) if masking.hides_nothing else _SlotMask(masking)
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
    """dq, dk and dv of a kernel of :func:`kernel_of`, for an output and a log-sum-exp over more keys than its own.

    The kernel's public gradient takes only its own output, hence the private name; ``tests/backends/test_sharding.py``
    fails if it changes.
    """
    residuals = q, k, v, ids, sinks, out, log_sum_exp, made.dq_mask_info, made.dkv_mask_info
    names = ("mask_value", "is_mqa", "block_sizes", "residual_checkpoint_name", "mask_function")
    names += ("attn_logits_soft_cap", "interpret")
    static = {name: made.kwargs[name] for name in names}
    gradients = inside._splash_attention_bwd(save_residuals=False, **static, res=residuals, do=d_out)  # noqa: SLF001
    return gradients[3], gradients[4], gradients[5]
