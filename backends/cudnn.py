"""NVIDIA's fused attention, as JAX offers it: ``jax.nn.dot_product_attention(implementation="cudnn")``.

The refusals follow JAX's own source (``jax/_src/cudnn/fused_attention_stablehlo.py`` and ``jax/_src/nn/functions.py``,
0.10 to 0.12): features that this path rejects, drops or leaves open are refused here with the reason, before anything
is traced, and so is what an H200 refused or gave in too few digits. Batch entries without a valid key, and keys that
nothing sees, are handled here, because the library leaves them open. It is closed, and needs an NVIDIA GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .contract import Plan, may_attend
from .devices import Target
from .features import INSTEAD, Mode, Takes, refusal
from .layout import Layout
from .operands import Terms
from .spec import AttentionSpec
from .vendor_kernel import VendorKernel


def _plan(spec: AttentionSpec, layout: Layout, target: Target, mode: Mode, options: Mapping[str, Any]) -> Plan:
    # A window that ends at the query is causal by itself. The library takes it only together with the causal mask,
    # which already hides everything on the right.
    run = functools.partial(
        jax.nn.dot_product_attention,
        scale=spec.softmax_scale,
        is_causal=_is_causal(spec),
        local_window_size=None if spec.window is None else (spec.window[0], 0),
        implementation="cudnn",
    )

    def attend(
        query: Float[Array, "b t n h"], key: Float[Array, "b s k h"], value: Float[Array, "b s k h"], terms: Terms
    ) -> Float[Array, "b t n h"]:
        lengths = layout.key_value_seq_lengths
        arrays, visible = _arrays(spec, layout, terms)
        if visible is None and lengths is None:
            return run(query, key, value)
        seeing = seen = jnp.ones((), bool)
        if visible is not None:
            seeing, seen = visible.any(-1).swapaxes(1, 2)[..., None], _seen_keys(visible, spec.num_kv_heads)
        if lengths is not None:
            # The library leaves open the gradients of keys beyond the length, and its output where the length is 0.
            # The selects make both zero, forward and backward.
            seen &= (jnp.arange(spec.key_value_length, dtype=jnp.int32)[None, :] < lengths[:, None])[..., None, None]
            seeing &= (lengths > 0)[:, None, None, None]
            lengths = jnp.maximum(lengths, 1).astype(jnp.int32)
        query = jnp.where(seeing, query, jnp.zeros_like(query))
        key, value = (jnp.where(seen, x, jnp.zeros_like(x)) for x in (key, value))
        out = run(query, key, value, key_value_seq_lengths=lengths, **arrays)
        return jnp.where(seeing, out, jnp.zeros_like(out))

    return Plan.stateless(attend)


def _arrays(
    spec: AttentionSpec, layout: Layout, terms: Terms
) -> tuple[dict[str, Any], Bool[Array, "#b #n t s"] | None]:
    """Mask and bias as the library takes them, and what sees what by them; None without either.

    JAX adds a large negative number where the mask is false: a row without a visible key averages over all, and a score
    that overflows stays infinite. A bias of -inf hides its key; as a large number it does so without NaN, and small
    enough to be added to the mask's.
    """
    if layout.mask is None and terms.bias is None:
        return {}, None
    whole, visible = (spec.query_length, spec.key_value_length), may_attend(spec, layout)
    arrays = {}
    if layout.mask is not None:
        arrays["mask"] = jnp.broadcast_to(layout.mask, (*layout.mask.shape[:2], *whole))
    if terms.bias is not None:
        hides = jnp.isneginf(terms.bias)
        bias = jnp.where(hides, 0.25 * float(jnp.finfo(spec.dtype).min), terms.bias).astype(spec.dtype)
        arrays["bias"] = jnp.broadcast_to(bias, (*bias.shape[:2], *whole))
        visible = ~hides if visible is None else visible & ~hides
    assert visible is not None  # noqa: S101 (for the type checker: one of the two is there)
    return arrays, jnp.broadcast_to(visible, (*visible.shape[:2], *whole))


def _seen_keys(visible: Bool[Array, "#b #n t s"], kv_heads: int) -> Bool[Array, "#b s #k 1"]:
    """The keys that any query of their group of heads sees."""
    seen = visible.any(2)
    if seen.shape[1] > 1:
        seen = seen.reshape(len(seen), kv_heads, -1, seen.shape[-1]).any(2)
    return seen.swapaxes(1, 2)[..., None]


def _is_causal(spec: AttentionSpec) -> bool:
    return spec.is_causal or (spec.window is not None and spec.window[1] == 0)


def _device_reasons(target: Target, mode: Mode) -> Iterator[str]:
    if target.platform != "cuda":
        yield f"cuDNN runs on NVIDIA GPUs, not on {target}; {INSTEAD}, which runs on every platform."
        return
    if mode == "compile" and not target.present:
        yield (
            f"cuDNN attention cannot be compiled for {target} from here, because JAX asks the present device for its "
            f"compute capability and the cuDNN version; compile on such a machine, or {INSTEAD}."
        )
    capability = target.compute_capability
    if capability is None:
        yield (
            f"the compute capability of {target} is not known and decides what cuDNN takes; give it, as in "
            "Target('cuda', compute_capability=(9, 0)), or name a known kind such as 'h100'."
        )
    elif capability < (8, 0):
        yield f"compute capability {_dotted(capability)} is too old for cuDNN (needs 8.0); {INSTEAD}."
    elif capability == (10, 3):
        yield f"compute capability 10.3 needs cuDNN 9.11 or newer, which is not established here; {INSTEAD}."


def _shape_reasons(spec: AttentionSpec, target: Target) -> Iterator[str]:
    capability = target.compute_capability or (8, 0)
    # Hopper takes 256 forward and backward. For later devices JAX's check says so too, but for the forward pass and
    # the backward pass alike, which cuDNN's own tables do not: only what both agree on is taken.
    limit = 256 if capability[0] == 9 or (capability[0] > 9 and not spec.needs_grad) else 128
    if limit < spec.head_dim <= 256:
        passes = "forward and backward" if spec.needs_grad else "forward"
        why = f"which has narrower heads on compute capability {_dotted(capability)}"
        yield refusal("cudnn", f"head_dim={spec.head_dim}", why, f"{passes}: at most {limit}")


def _mask_reasons(spec: AttentionSpec) -> Iterator[str]:
    causal, window = _is_causal(spec), spec.window
    if causal and spec.query_length != spec.key_value_length:
        yield (
            f"query_length={spec.query_length} with key_value_length={spec.key_value_length} is not supported by cudnn "
            "under a causal mask or window (needs equal lengths): JAX does not say at which end the mask is aligned; "
            f"{INSTEAD}."
        )
    if window is not None and window[1] > 0 and not spec.is_causal:
        requested = f"local_window_size={window} without is_causal"
        yield refusal("cudnn", requested, "", "is_causal=True, or a right side of 0")
    if window is not None and spec.has_seq_lengths:
        yield (
            f"local_window_size={window} together with key_value_seq_lengths is not supported by cudnn here (one of "
            f"the two): JAX's source does not establish the combination; {INSTEAD}."
        )
    if spec.has_bias and spec.needs_grad:
        why = f"which gives a bias its gradient in {spec.dtype}, off by 0.003 to 0.01 of its largest value on an H200"
        yield refusal("cudnn", "a bias array with needs_grad=True", why, "needs_grad=False, or a mask array")
    odd = [name for name in ("query_length", "key_value_length") if getattr(spec, name) % 2 and getattr(spec, name) > 1]
    if odd and spec.needs_grad:
        why = "since a check in JAX takes what stands for no bias for one"
        yield refusal("cudnn", f"{odd[0]}={getattr(spec, odd[0])} with a gradient", why, "even", f"pad, or {INSTEAD}")


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


CUDNN = VendorKernel(
    name="cudnn",
    allowed=Takes(
        features=frozenset({
            "causal", "bidirectional", "window", "lengths", "scale", "gradient", "grouped_queries", "cross_length",
            "mask", "bias",
        }),
        dtypes=("float16", "bfloat16"),
        head_dims=range(8, 257, 8),
        least_length=2,
        modes=("native", "compile"),
        because={
            "mode": "which is a closed library without a source to interpret",
            "least_length": "since JAX's source says nothing of single tokens, and PyTorch refuses them to it",
            "value_head_dim": "whose JAX interface takes keys and values of one shape",
            "segments": "whose JAX interface has no argument for them",
            "positions": "which masks by slot",
        },
    ),
    reasons=lambda spec, target, mode, _: (
        *_device_reasons(target, mode), *_shape_reasons(spec, target), *_mask_reasons(spec),
    ),
    make=_plan,
)  # fmt: skip
