"""tokamax's Pallas attention for NVIDIA GPUs in Triton's dialect, forward and backward, behind the contract.

The kernels are ``_fwd`` and ``_bwd`` of ``tokamax._src.ops.attention.pallas_triton`` and ``pallas_triton_vjp`` of
tokamax 0.0.17, FlashAttention-2 (arXiv 2307.08691) for one batch entry. They are private, hence exactly one version is
taken. Called directly, they need none of what tokamax does around them (a cache of tuned sizes, flags, checks of the
present device), so they compile for GPUs that are not here. This file adds the gradient rule, rows that see nothing,
lengths as ranges of keys, and padding without which the backward pass reads past the arrays (:func:`_whole_blocks`).
``tokamax_interpreted.py`` executes them in Pallas' interpreter. They ran on an H200.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from . import tokamax_package
from .contract import Plan
from .devices import Target
from .features import INSTEAD, Mode, Takes, refusal
from .layout import Layout
from .operands import Terms
from .spec import AttentionSpec
from .splash_operands import scaling_notes
from .vendor_kernel import VendorKernel, padded, round_up

_FORWARD = "tokamax._src.ops.attention.pallas_triton"
_BACKWARD = f"{_FORWARD}_vjp"
# tokamax's own sizes where it has not tuned: rows and keys per block of the forward pass, and of the backward pass.
_BLOCK = 64
_BACKWARD_BLOCKS = {"block_m1": 32, "block_n1": 64, "block_m2": 64, "block_n2": 32}
_COMPILER = {"num_warps": 4, "num_stages": 2}
_PRECISION = jax.lax.DotAlgorithmPreset.DEFAULT  # of half precision, summed in float32

Ranges = tuple[Int[Array, "1 t"] | None, Int[Array, "1 t"] | None]  # per row: the first key, and behind the last


def _plan(spec: AttentionSpec, layout: Layout, target: Target, mode: Mode, options: Mapping[str, Any]) -> Plan:
    # Keys behind the last query see no row under a causal mask, and the backward pass does not expect them.
    keys = min(spec.key_value_length, spec.query_length) if spec.is_causal else spec.key_value_length
    lengths = layout.key_value_seq_lengths
    run = _attention(dataclasses.replace(spec, key_value_length=keys), mode == "interpret")
    run = jax.vmap(run, (0, 0, 0, None if lengths is None else 0))

    def attend(
        query: Float[Array, "b t n h"], key: Float[Array, "b s k h"], value: Float[Array, "b s k v"], terms: Terms
    ) -> Float[Array, "b t n v"]:
        # Scaled here: the kernels of the backward pass scale the query in one place and the key in another, in
        # their own dtype, and would see other scores than the forward pass.
        query = (query.astype(jnp.float32) * spec.softmax_scale).astype(query.dtype)
        return run(query, key[:, :keys], value[:, :keys], lengths)

    sizes = (_BLOCK, _BACKWARD_BLOCKS["block_n1"], _BACKWARD_BLOCKS["block_n2"])
    return Plan.stateless(attend, scaling_notes(spec), gradient=spec.needs_grad, key_blocks=sizes)


def _attention(spec: AttentionSpec, interpret: bool) -> Callable[..., Array]:
    """``(query, key, value, length)`` of one batch entry to its output, with the kernels' gradient."""
    forward, backward = _kernels(interpret)
    common: dict[str, Any] = {
        "dropout_rate": 0.0,
        "logits_dtype": jnp.dtype(jnp.float32),
        "logits_scale": 1.0,
        "logits_soft_cap": spec.logits_soft_cap,
        "q_k_dot_precision": _PRECISION,
        "weights_v_dot_precision": _PRECISION,
    }
    powers = (1 << (n - 1).bit_length() for n in (spec.query_length, spec.key_value_length))
    block_q, block_k = (min(max(n, 16), _BLOCK) for n in powers)
    run_forward = functools.partial(
        forward._fwd,  # noqa: SLF001
        config=forward.Config(block_q=block_q, block_k=block_k, **_COMPILER),
        use_base2=False,
        use_stable_softmax=True,
        normalize_output=True,
        **common,
    )
    run_backward = functools.partial(
        backward._bwd,  # noqa: SLF001
        config=backward.Config(**_BACKWARD_BLOCKS, **_COMPILER),
        is_causal=spec.is_causal,
        ds_dtype=None,
        **common,
    )

    def call(q: Array, k: Array, v: Array, length: Any, residuals: bool) -> tuple[Array, Any]:
        start, end = _ranges(spec, length)
        end = None if end is None else jnp.maximum(end, 1)  # a row without a key has no finite row sum
        without = (None,) * 5  # bias, mask, dropout mask, and the ranges of rows by key
        causal = spec.is_causal and end is None
        return run_forward(q, k, v, *without, start, end, is_causal=causal, return_residuals=residuals)

    @jax.custom_vjp
    def kernel(q: Array, k: Array, v: Array, length: Any) -> Array:
        return call(q, k, v, length, residuals=False)[0]

    def forwards(q: Array, k: Array, v: Array, length: Any) -> tuple[Array, Any]:
        # The kernel casts the query to the keys' dtype, and gives the output in the query's. The row sums of the
        # backward pass take this output; rounded to bfloat16, dq at large logits fails the judge.
        out, residuals = call(q.astype(jnp.float32), k, v, length, residuals=True)
        return out.astype(q.dtype), (q, k, v, length, residuals, out)

    def backwards(saved: Any, d_out: Array) -> tuple[Any, ...]:
        q, k, v, length, (largest, total), out = saved
        arrays = *map(_whole_blocks, (q, k, v)), None, _mask(spec, length), None
        residuals = _whole_blocks(largest, 1), _whole_blocks(total, 1, fill=1)
        d_q, d_k, d_v, _ = run_backward(*arrays, residuals, *map(_whole_blocks, (out, d_out)))
        # A softmax over one key is 1 whatever the scores. The kernel's gradient is 0 there but for rounding, which adds
        # up over all rows.
        alone = _seen_keys(spec, length) == 1
        return *(jnp.where(alone, 0, x[: y.shape[0]]) for x, y in ((d_q, q), (d_k, k))), d_v[: v.shape[0]], None

    kernel.defvjp(forwards, backwards)

    def attention(q: Array, k: Array, v: Array, length: Any) -> Array:
        start, end = _ranges(spec, length)
        if end is None:
            return kernel(q, k, v, length)
        seeing = (end > (0 if start is None else start))[0][:, None, None]
        return jnp.where(seeing, kernel(jnp.where(seeing, q, 0), k, v, length), 0)

    return attention


def _ranges(spec: AttentionSpec, length: Int[Array, ""] | None) -> Ranges:
    """The first key that each row sees, and the one behind the last; None where the kernel's own mask says it."""
    if length is None and spec.window is None:
        return None, None
    row, keys = jnp.arange(spec.query_length, dtype=jnp.int32)[None, :], spec.key_value_length
    left, right = spec.window or (None, None)
    end = jnp.full_like(row, keys) if length is None else jnp.broadcast_to(jnp.minimum(length, keys), row.shape)
    if spec.is_causal:
        end = jnp.minimum(end, row + 1)
    if right is not None:
        end = jnp.minimum(end, row + min(right, keys) + 1)
    return None if left is None else jnp.maximum(row - min(left, spec.query_length), 0), end


def _seen_keys(spec: AttentionSpec, length: Int[Array, ""] | None) -> int | Int[Array, ""]:
    """The keys of a sequence; one without any keeps one, for finite row sums."""
    return spec.key_value_length if length is None else jnp.clip(length, 1, spec.key_value_length)


def _whole_blocks(x: Array, axis: int = 0, fill: float = 0) -> Array:
    """``x`` padded to whole blocks of the backward pass.

    Under a causal mask its kernel for dk and dv walks whole blocks of rows (``hi_mask``), and that for dq blocks of
    keys, past the last one. tokamax checks bounds only where the length is no multiple of the block that is read, so
    at 160 tokens, say, the kernel reads what lies behind the arrays (docs/dev/upstream-issues.md).
    """
    return padded(x, round_up(x.shape[axis], _BLOCK), axis, fill)


def _mask(spec: AttentionSpec, length: Int[Array, ""] | None) -> Bool[Array, "1 1 padded"] | None:
    """The keys that the backward pass may see, beside its causal mask; None: all of them.

    A key of the padding has a score of zero, whose exponential is infinite where a row's scores are far below zero.
    """
    padded = spec.key_value_length + -spec.key_value_length % _BLOCK
    if length is None and padded == spec.key_value_length:
        return None
    return (jnp.arange(padded, dtype=jnp.int32) < _seen_keys(spec, length))[None, None, :]


def _kernels(interpret: bool) -> tuple[Any, Any]:
    if interpret:
        from . import tokamax_interpreted  # noqa: PLC0415 (imports tokamax, which may be missing)

        return tokamax_interpreted.modules(_FORWARD, _BACKWARD)
    return importlib.import_module(_FORWARD), importlib.import_module(_BACKWARD)


def _reasons(spec: AttentionSpec, target: Target, mode: Mode, options: Mapping[str, Any]) -> Iterator[str]:
    """GPUs before Ampere, and what the backward pass lacks."""
    if mode != "interpret" and (target.compute_capability or (8, 0)) < (8, 0):
        yield f"{target} is too old for tokamax_triton, which needs compute capability 8.0; {INSTEAD}."
    if not spec.needs_grad:
        return
    lacking = {
        "local_window_size": "whose backward pass reads a window as an array with an entry for every score",
        "logits_soft_cap": "whose backward pass has no soft cap",
    }
    for field, why in lacking.items():
        if (value := getattr(spec, field)) is not None:
            yield refusal("tokamax_triton", f"{field}={value} with needs_grad=True", why, "needs_grad=False")


def missing(_: Mode = "native") -> tuple[str, ...]:
    """Why tokamax cannot be used in this environment; nothing where it can."""
    return tokamax_package.missing("tokamax_triton", _FORWARD)


TOKAMAX_TRITON = VendorKernel(
    name="tokamax_triton",
    allowed=Takes(
        features=frozenset({
            "causal", "bidirectional", "window", "soft_cap", "scale", "lengths", "gradient", "grouped_queries",
            "cross_length", "value_head_dim",
        }),
        dtypes=("bfloat16", "float16"),
        head_dims=range(1, 257),
        value_head_dims=range(1, 257),
        because={
            "dtype": "whose dq of float32 at large logits fails the judge",
            "segments": "whose masks in linear memory are one range of keys per row",
            "positions": "which masks by slot",
            "bias": "which adds it before the soft cap, and whose gradient of it has an entry for every score",
        },
    ),
    platform="cuda",
    reasons=_reasons,
    missing=missing,
    make=_plan,
)  # fmt: skip
