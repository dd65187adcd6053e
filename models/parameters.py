"""The parameters of a model as one plain tree of arrays: their shapes, their names on disk, their initial values.

The tree is ``{"embed_tokens", "layers": [{"q_proj", ...}, ...], "norm", ...}``. Matrices are kept as ``[out, in]``, as
Hugging Face stores them: loading copies nothing, and the contracted dimension is last on both sides. Initialisation is
GPT-2's: normal, with the projections that write to the residual stream scaled down by the depth.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .config import ModelConfig, NormPlacement

Params = dict[str, Any]  # a tree of arrays as described above

# Name in the tree -> name in a checkpoint, below "model.layers.{i}." for those of a layer.
LAYER_NAMES = {
    "input_layernorm": "input_layernorm.weight",
    "input_layernorm_bias": "input_layernorm.bias",
    "q_proj": "self_attn.q_proj.weight",
    "k_proj": "self_attn.k_proj.weight",
    "v_proj": "self_attn.v_proj.weight",
    "o_proj": "self_attn.o_proj.weight",
    "q_proj_bias": "self_attn.q_proj.bias",
    "k_proj_bias": "self_attn.k_proj.bias",
    "v_proj_bias": "self_attn.v_proj.bias",
    "o_proj_bias": "self_attn.o_proj.bias",
    "q_a_proj": "self_attn.q_a_proj.weight",
    "q_a_layernorm": "self_attn.q_a_layernorm.weight",
    "q_b_proj": "self_attn.q_b_proj.weight",
    "kv_a_proj_with_mqa": "self_attn.kv_a_proj_with_mqa.weight",
    "kv_a_layernorm": "self_attn.kv_a_layernorm.weight",
    "kv_b_proj": "self_attn.kv_b_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "sinks": "self_attn.sinks",
    "post_attention_layernorm": "post_attention_layernorm.weight",
    "pre_feedforward_layernorm": "pre_feedforward_layernorm.weight",
    "post_feedforward_layernorm": "post_feedforward_layernorm.weight",
    "post_attention_layernorm_bias": "post_attention_layernorm.bias",
    "gate_proj": "mlp.gate_proj.weight",
    "up_proj": "mlp.up_proj.weight",
    "down_proj": "mlp.down_proj.weight",
    "router": "mlp.router.weight",
    "router_bias": "mlp.router.bias",
    "experts_gate_proj": "mlp.experts.gate_proj",
    "experts_up_proj": "mlp.experts.up_proj",
    "experts_down_proj": "mlp.experts.down_proj",
    "experts_gate_proj_bias": "mlp.experts.gate_proj_bias",
    "experts_up_proj_bias": "mlp.experts.up_proj_bias",
    "experts_down_proj_bias": "mlp.experts.down_proj_bias",
}
TOP_NAMES = {
    "embed_tokens": "model.embed_tokens.weight",
    "embed_positions": "model.embed_positions.weight",
    "norm": "model.norm.weight",
    "norm_bias": "model.norm.bias",
    "lm_head": "lm_head.weight",
}


class LayerNorms(NamedTuple):
    """The names of a layer's norms by place; None where there is none.

    They are Hugging Face's: ``post_attention_layernorm`` is before the MLP in Llama and after the attention in Gemma.
    """

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None


LAYER_NORMS: dict[NormPlacement, LayerNorms] = {
    "before": LayerNorms("input_layernorm", None, "post_attention_layernorm", None),
    "after": LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "both": LayerNorms(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    ),
}


def parameter_shapes(config: ModelConfig) -> Params:
    """The tree with a shape in the place of each array."""
    d = config.hidden_size
    layer: dict[str, tuple[int, ...]] = {name: (d,) for name in LAYER_NORMS[config.norms] if name is not None}
    layer |= _mlp_shapes(config) if config.num_experts is None else _expert_shapes(config, config.num_experts)
    top: dict[str, tuple[int, ...]] = {"embed_tokens": (config.vocab_size, d), "norm": (d,)}
    if config.output_bias:
        layer["o_proj_bias"] = (d,)
    if not config.use_rmsnorm:
        layer |= {"input_layernorm_bias": (d,), "post_attention_layernorm_bias": (d,)}
        top["norm_bias"] = (d,)
    if not config.use_rope:
        top["embed_positions"] = (config.max_length, d)
    if not config.tie_embeddings:
        top["lm_head"] = (config.vocab_size, d)
    attention = {
        kind: _latent_shapes(config) if kind == "latent" else _attention_shapes(config)
        for kind in config.attention_types
    }
    return {**top, "layers": [layer | attention[kind] for kind in config.layer_types]}


def _mlp_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    d, f = config.hidden_size, config.inner_size
    shapes: dict[str, tuple[int, ...]] = {"up_proj": (f, d), "down_proj": (d, f)}
    return shapes | ({"gate_proj": (f, d)} if config.use_swiglu else {})


def _expert_shapes(config: ModelConfig, experts: int) -> dict[str, tuple[int, ...]]:
    """Of ``models/experts.py``: one array for all experts of a layer."""
    d, f = config.hidden_size, config.inner_size
    shapes: dict[str, tuple[int, ...]] = {
        "router": (experts, d),
        "experts_gate_proj": (experts, f, d),
        "experts_up_proj": (experts, f, d),
        "experts_down_proj": (experts, d, f),
    }
    if config.expert_bias:
        shapes |= {f"{name}_bias": shape[:-1] for name, shape in shapes.items()}
    return shapes


def _attention_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    d, q, kv = config.hidden_size, config.num_heads * config.dim, config.kv_heads * config.dim
    shapes: dict[str, tuple[int, ...]] = {"q_proj": (q, d), "k_proj": (kv, d), "v_proj": (kv, d), "o_proj": (d, q)}
    if config.qkv_bias:
        shapes |= {"q_proj_bias": (q,), "k_proj_bias": (kv,), "v_proj_bias": (kv,)}
    if config.qk_norm and config.qk_norm_over != "rotated":
        over = (config.dim, config.dim) if config.qk_norm_over == "head" else (q, kv)
        shapes |= {"q_norm": over[:1], "k_norm": over[1:]}
    if config.attention_sinks:
        shapes["sinks"] = (config.num_heads,)
    return shapes


def _latent_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of ``models/latent.py``, under the names of DeepSeek's checkpoints."""
    d, heads, sizes, compressed = config.hidden_size, config.num_heads, config.latent, config.q_lora_rank
    q = heads * (sizes.nope + sizes.rope)
    shapes: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa": (sizes.rank + sizes.rope, d),
        "kv_a_layernorm": (sizes.rank,),
        "kv_b_proj": (heads * (sizes.nope + sizes.value), sizes.rank),
        "o_proj": (d, heads * sizes.value),
    }
    if compressed is None:
        return shapes | {"q_proj": (q, d)}
    return shapes | {"q_a_proj": (compressed, d), "q_a_layernorm": (compressed,), "q_b_proj": (q, compressed)}


def checkpoint_names(config: ModelConfig) -> Params:
    """The tree with the name that a checkpoint uses (Hugging Face's) in the place of each array."""
    shapes = parameter_shapes(config)
    layers = [
        {name: f"model.layers.{i}.{LAYER_NAMES[name]}" for name in layer} for i, layer in enumerate(shapes["layers"])
    ]
    return {**{name: TOP_NAMES[name] for name in shapes if name != "layers"}, "layers": layers}


def initialise(config: ModelConfig, key: jax.Array) -> Params:
    """Fresh parameters in ``param_dtype``: norms multiply by one, biases and sinks are zero, the rest is normal."""
    shapes = parameter_shapes(config)
    leaves, tree = jax.tree.flatten_with_path(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(key, len(leaves))
    # By index: iterating over an array compiles a program with an output for each element.
    return jax.tree.unflatten(
        tree, [_first_value(config, path[-1].key, shape, keys[i]) for i, (path, shape) in enumerate(leaves)]
    )


def _first_value(config: ModelConfig, name: str, shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    if name.endswith("_bias") or name == "sinks" or (len(shape) == 1 and config.norm_plus_one):
        return jnp.zeros(shape, config.param_dtype)
    if len(shape) == 1:
        return jnp.ones(shape, config.param_dtype)
    scale = 0.02 if name.startswith("embed_") else shape[-1] ** (-0.5)
    if name in ("o_proj", "down_proj", "experts_down_proj"):
        scale /= math.sqrt(2 * config.num_layers)
    return (jax.random.normal(key, shape, jnp.float32) * scale).astype(config.param_dtype)
