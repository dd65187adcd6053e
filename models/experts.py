"""A mixture of experts: each token's MLP is the weighted sum of a few of a layer's experts.

The router's probabilities (softmax, float32) choose the ``experts_per_token`` largest; these are divided by their sum
if ``normalise_experts`` (Mixtral, arXiv 2401.04088; gpt-oss), or taken as they are (Qwen3's ``norm_topk_prob``). Every
expert computes every token, and the weight of an expert that was not chosen is zero: exact, with static shapes, at
``num_experts / experts_per_token`` times the FLOPs of a kernel that groups the tokens. One expert's activations are in
memory at a time.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .config import Activation, ModelConfig
from .parameters import Params
from .rope import along_last

_CLIP, _SHARPNESS = 7.0, 1.702  # swiglu_limit and swiglu_alpha of gpt-oss
_MATRICES = ("experts_gate_proj", "experts_up_proj", "experts_down_proj")


def gated(activation: Activation, gate: Array, up: Array) -> Array:
    """``activation(gate) * up``; gpt-oss's clips both, and adds one to ``up``."""
    match activation:
        case "silu":
            return jax.nn.silu(gate) * up
        case "gelu_tanh":
            return jax.nn.gelu(gate, approximate=True) * up
        case "clipped_silu":
            gate, up = jnp.minimum(gate, _CLIP), jnp.clip(up, -_CLIP, _CLIP)
            return (up + 1) * gate * jax.nn.sigmoid(gate * _SHARPNESS)


def mixture(
    config: ModelConfig, layer: Params, x: Float[Array, "batch length hidden"]
) -> Float[Array, "batch length hidden"]:
    """The output of a layer's experts. In float32 the router weighs them: zero for an expert that was not chosen."""
    scores = jnp.einsum("bti,ei->bte", x, layer["router"].astype(x.dtype), preferred_element_type=jnp.float32)
    if config.expert_bias:
        scores = scores + along_last(layer["router_bias"], 3).astype(jnp.float32)
    chosen_weights, chosen = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), config.chosen_experts)
    if config.normalise_experts:
        chosen_weights = chosen_weights / chosen_weights.sum(-1, keepdims=True)
    weights = (jax.nn.one_hot(chosen, scores.shape[-1]) * chosen_weights[..., None]).sum(-2)
    weights = jnp.moveaxis(weights.astype(x.dtype), -1, 0)
    names = [*_MATRICES, *(f"{name}_bias" for name in _MATRICES)] if config.expert_bias else [*_MATRICES]

    def add(total: Array, one: tuple[Array, Params]) -> tuple[Array, None]:
        weight, expert = one
        gate, up = (_linear(x, expert, name) for name in _MATRICES[:2])
        out = _linear(gated(config.activation, gate, up), expert, _MATRICES[2])
        return total + weight[..., None] * out, None

    return jax.lax.scan(add, jnp.zeros_like(x), (weights, {name: layer[name] for name in names}))[0]


def _linear(x: Array, expert: Params, name: str) -> Array:
    out = jnp.einsum("bti,oi->bto", x, expert[name].astype(x.dtype))
    bias = expert.get(f"{name}_bias")
    return out if bias is None else out + along_last(bias, 3).astype(x.dtype)
