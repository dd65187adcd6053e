"""Kvax's own functions, for code that calls them directly: by its names and signatures, on any machine.

``attnsuite.backends.kvax.ops`` has them on the device that is here, ``attnsuite.backends.kvax.interpreted_ops`` in
Triton's interpreter on a CPU. Both stand for ``kvax.ops`` and ``kvax.utils``; importing them loads neither Kvax nor
Triton. What Kvax computes wrongly without an error is refused; ``attention(..., backend="kvax")`` computes it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from ..devices import Target
from . import availability
from .backend import device_reasons, upstream_of
from .block_sizes import FlashAttentionParamsConfig as FlashAttentionParamsConfig
from .upstream import Upstream

PADDING_SEGMENT_ID = -1
_ROWS = 128  # the backward pass is wrong at lengths that this does not divide
_Axes = tuple[str | None, str | None, str | None, str | None]


@dataclasses.dataclass(frozen=True, slots=True)
class Functions:
    """Kvax's functions in one mode. Each raises RuntimeError where Kvax does not run in it, with what to do."""

    mode: Literal["native", "interpret"]

    def flash_attention(
        self,
        query: Float[Array, "batch q_len heads head_dim"],
        key: Float[Array, "batch kv_len kv_heads head_dim"],
        value: Float[Array, "batch kv_len kv_heads v_dim"],
        query_positions: Int[Array, "batch q_len"],
        query_segment_ids: Int[Array, "batch q_len"],
        kv_positions: Int[Array, "batch kv_len"],
        kv_segment_ids: Int[Array, "batch kv_len"],
        mask: tuple[Any, ...],
        scale: float = 1.0,
        bias: None = None,
        fwd_params: FlashAttentionParamsConfig | None = None,
        bwd_params: FlashAttentionParamsConfig | None = None,
        assume_sequential_positions: bool = False,
        memory_optimized_gqa_backward: bool = False,
        permute_tokens_for_load_balance: bool = True,
        debug: bool = False,
        mesh: Mesh | None = None,
    ) -> Float[Array, "batch q_len heads v_dim"]:
        """Causal attention over a mesh, inside :meth:`attention_specs`; ``mask`` is :meth:`create_attention_mask`'s.

        A row that may attend to nothing is unspecified, as in Kvax. Raises ValueError for a bias, which Kvax has not,
        and where it is differentiated at lengths at which Kvax's gradients are wrong.
        """
        if bias is not None:
            raise ValueError("bias is not supported by Kvax; use attention(..., bias=bias, backend='chunked').")
        kvax = self._kvax()
        options = {
            **self._parameters(kvax, fwd_params, bwd_params),
            "scale": scale,
            "assume_sequential_positions": assume_sequential_positions,
            "memory_optimized_gqa_backward": memory_optimized_gqa_backward,
            "permute_tokens_for_load_balance": permute_tokens_for_load_balance,
            "debug": debug,
            "mesh": mesh,
        }
        arrays = [query_positions, query_segment_ids, kv_positions, kv_segment_ids]
        run = _checked(functools.partial(kvax.flash_attention, **options), kvax.mask.unflatten)
        return run(query, key, value, arrays, [list(blocks.flatten()) for blocks in mask])

    def create_attention_mask(
        self,
        query_positions: Int[Array, "batch q_len"],
        query_segment_ids: Int[Array, "batch q_len"],
        kv_positions: Int[Array, "batch kv_len"],
        kv_segment_ids: Int[Array, "batch kv_len"],
        fwd_params: FlashAttentionParamsConfig | None = None,
        bwd_params: FlashAttentionParamsConfig | None = None,
        calc_bwd_mask: bool = False,
        skip_pad_tokens: bool = True,
        mesh: Mesh | None = None,
    ) -> tuple[Any, ...]:
        """The block masks of a forward pass, for all of its layers; with ``calc_bwd_mask`` those of gradients too."""
        kvax = self._kvax()
        return kvax.create_attention_mask(
            query_positions,
            query_segment_ids,
            kv_positions,
            kv_segment_ids,
            **self._parameters(kvax, fwd_params, bwd_params),
            calc_bwd_mask=calc_bwd_mask,
            skip_pad_tokens=skip_pad_tokens,
            mesh=mesh,
        )

    def attention_specs(self, query_specs: _Axes, kv_specs: _Axes) -> AbstractContextManager[None]:
        """The mesh axes of (batch, length, heads, head_dim) of queries and of keys, for what is called inside."""
        return self._kvax().attention_specs(query_specs, kv_specs)

    def permute_tokens_context_parallelism(
        self, inputs: Array | tuple[Array, ...], mesh: Mesh | None = None
    ) -> Array | tuple[Array, ...]:
        """Tokens (axis 1) in the order that gives each device of the context axis the same share of a causal mask."""
        return self._kvax().permute_tokens(inputs, mesh=mesh)

    def unpermute_tokens_context_parallelism(
        self, inputs: Array | tuple[Array, ...], mesh: Mesh | None = None
    ) -> Array | tuple[Array, ...]:
        """The inverse."""
        return self._kvax().unpermute_tokens(inputs, mesh=mesh)

    def _kvax(self) -> Upstream:
        target = Target.here()
        if reasons := tuple(device_reasons(target, self.mode)) or availability.missing(self.mode):
            instead = "attnsuite.backends.kvax.interpreted_ops has the same functions in Triton's interpreter."
            raise RuntimeError(" ".join([*reasons, *([instead] if self.mode == "native" else [])]))
        return upstream_of(self.mode, target)

    def _parameters(self, kvax: Upstream, *passes: FlashAttentionParamsConfig | None) -> dict[str, Any]:
        """Kvax's own class of them. Where none are given: Kvax's choice on a GPU, which it asks for; else defaults."""
        default = None if self.mode == "native" else FlashAttentionParamsConfig()
        chosen = (default if each is None else each for each in passes)
        made = (None if each is None else kvax.parameters(**dataclasses.asdict(each)) for each in chosen)
        return dict(zip(("fwd_params", "bwd_params"), made, strict=True))


def _checked(kernel: Callable[..., Array], mask_of: Callable[..., Any]) -> Callable[..., Array]:
    """``kernel(query, key, value, *arrays, masks)``, whose gradients are refused where they would be wrong."""

    def call(query: Array, key: Array, value: Array, arrays: list[Array], masks: list[list[Array]]) -> Array:
        return kernel(query, key, value, *arrays, tuple(mask_of(tuple(blocks)) for blocks in masks))

    run = jax.custom_vjp(call)

    def forward(
        query: Array, key: Array, value: Array, arrays: list[Array], masks: list[list[Array]]
    ) -> tuple[Array, Any]:
        rows, keys = query.shape[1], key.shape[1]
        if rows != keys or rows % _ROWS:
            raise ValueError(
                f"Kvax's gradients are wrong for {rows} queries and {keys} keys; it needs as many of the one as of the "
                f"other, and a multiple of {_ROWS}. Pad them, or use attention(..., backend='kvax'), which does."
            )
        if len(masks) != 3:
            raise ValueError("a gradient needs create_attention_mask(..., calc_bwd_mask=True).")
        return jax.vjp(lambda q, k, v: call(q, k, v, arrays, masks), query, key, value)

    run.defvjp(forward, lambda pull, d_out: (*pull(d_out), None, None))
    return run
