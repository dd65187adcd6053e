"""The parameters of a model as one plain tree of arrays: their shapes, names on disk and initial values.

The tree is ``{"embed_tokens", "layers": [{"q_proj", ...}, ...], "norm", ...}``. Matrices are kept as ``[out, in]``, as
Hugging Face stores them: loading copies nothing, and the contracted dimension is last on both sides. Initialisation is
GPT-2's: normal, with the projections that write to the residual stream scaled down by the depth.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .config import AttentionType, ModelConfig, NormPlacement

Params = dict[str, Any]  # a tree of arrays as described above
Shape = tuple[int, ...]


class Parameter(NamedTuple):
    """What is known of one array of the tree.

    ``stored`` is its name in a checkpoint, below ``model.layers.{i}.`` for an array of a layer; ``shape`` names its
    dimensions (``_sizes``), and ``needs`` what a model or layer has that has the array (``_parts``). ``divided`` is the
    dimension of heads, of the MLP's inner size or of the vocabulary: devices and Meta's ranks divide the array along
    it. ``meta`` is Meta's name.
    """

    stored: str
    shape: str
    needs: str = "always"
    divided: int | None = None
    meta: str | None = None


# The names are Hugging Face's: post_attention_layernorm is before the MLP in Llama and after the attention in Gemma.
TOP = {
    "embed_tokens": Parameter("model.embed_tokens.weight", "vocab hidden", "always", 0, "tok_embeddings.weight"),
    "embed_positions": Parameter("model.embed_positions.weight", "positions hidden", "learned positions"),
    "norm": Parameter("model.norm.weight", "hidden", "always", None, "norm.weight"),
    "norm_bias": Parameter("model.norm.bias", "hidden", "centred norms"),
    "lm_head": Parameter("lm_head.weight", "vocab hidden", "head", 0, "output.weight"),
}
LAYER = {
    "input_layernorm": Parameter("input_layernorm.weight", "hidden", "norms before", None, "attention_norm.weight"),
    "input_layernorm_bias": Parameter("input_layernorm.bias", "hidden", "centred norms"),
    "q_proj": Parameter("self_attn.q_proj.weight", "query hidden", "queries in one", 0, "attention.wq.weight"),
    "k_proj": Parameter("self_attn.k_proj.weight", "key hidden", "keys", 0, "attention.wk.weight"),
    "v_proj": Parameter("self_attn.v_proj.weight", "key hidden", "keys", 0, "attention.wv.weight"),
    "o_proj": Parameter("self_attn.o_proj.weight", "hidden mixed", "always", 1, "attention.wo.weight"),
    "q_proj_bias": Parameter("self_attn.q_proj.bias", "query", "qkv_bias"),
    "k_proj_bias": Parameter("self_attn.k_proj.bias", "key", "qkv_bias"),
    "v_proj_bias": Parameter("self_attn.v_proj.bias", "key", "qkv_bias"),
    "o_proj_bias": Parameter("self_attn.o_proj.bias", "hidden", "output_bias"),
    "q_a_proj": Parameter("self_attn.q_a_proj.weight", "query_rank hidden", "queries in two"),
    "q_a_layernorm": Parameter("self_attn.q_a_layernorm.weight", "query_rank", "queries in two"),
    "q_b_proj": Parameter("self_attn.q_b_proj.weight", "query query_rank", "queries in two", 0),
    "kv_a_proj_with_mqa": Parameter("self_attn.kv_a_proj_with_mqa.weight", "cached hidden", "latents"),
    "kv_a_layernorm": Parameter("self_attn.kv_a_layernorm.weight", "rank", "latents"),
    "kv_b_proj": Parameter("self_attn.kv_b_proj.weight", "expanded rank", "latents", 0),
    "q_norm": Parameter("self_attn.q_norm.weight", "query_norm", "qk_norm"),
    "k_norm": Parameter("self_attn.k_norm.weight", "key_norm", "qk_norm"),
    "sinks": Parameter("self_attn.sinks", "heads", "sinks"),
    "post_attention_layernorm": Parameter("post_attention_layernorm.weight", "hidden", meta="ffn_norm.weight"),
    "pre_feedforward_layernorm": Parameter("pre_feedforward_layernorm.weight", "hidden", "norms on both sides"),
    "post_feedforward_layernorm": Parameter("post_feedforward_layernorm.weight", "hidden", "norms after"),
    "post_attention_layernorm_bias": Parameter("post_attention_layernorm.bias", "hidden", "centred norms"),
    "gate_proj": Parameter("mlp.gate_proj.weight", "inner hidden", "gate", 0, "feed_forward.w1.weight"),
    "up_proj": Parameter("mlp.up_proj.weight", "inner hidden", "one MLP", 0, "feed_forward.w3.weight"),
    "down_proj": Parameter("mlp.down_proj.weight", "hidden inner", "one MLP", 1, "feed_forward.w2.weight"),
    "router": Parameter("mlp.router.weight", "experts hidden", "experts"),
    "router_bias": Parameter("mlp.router.bias", "experts", "expert_bias"),
    "experts_gate_proj": Parameter("mlp.experts.gate_proj", "experts inner hidden", "experts"),
    "experts_up_proj": Parameter("mlp.experts.up_proj", "experts inner hidden", "experts"),
    "experts_down_proj": Parameter("mlp.experts.down_proj", "experts hidden inner", "experts"),
    "experts_gate_proj_bias": Parameter("mlp.experts.gate_proj_bias", "experts inner", "expert_bias"),
    "experts_up_proj_bias": Parameter("mlp.experts.up_proj_bias", "experts inner", "expert_bias"),
    "experts_down_proj_bias": Parameter("mlp.experts.down_proj_bias", "experts hidden", "expert_bias"),
}


class LayerNorms(NamedTuple):
    """The names of a layer's norms by place; None where there is none."""

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


def _parts(config: ModelConfig, kind: AttentionType) -> dict[str, bool]:
    """What a model and its layers of one type have."""
    latent, compressed, experts = kind == "latent", config.q_lora_rank is not None, config.num_experts is not None
    return {
        "always": True,
        "learned positions": not config.use_rope,
        "centred norms": not config.use_rmsnorm,
        "head": not config.tie_embeddings,
        "norms before": config.norms != "after",
        "norms on both sides": config.norms == "both",
        "norms after": config.norms != "before",
        "queries in one": not (latent and compressed),
        "queries in two": latent and compressed,
        "keys": not latent,
        "latents": latent,
        "qkv_bias": config.qkv_bias and not latent,
        "output_bias": config.output_bias,
        "qk_norm": config.qk_norm and config.qk_norm_over != "rotated" and not latent,
        "sinks": config.attention_sinks and not latent,
        "one MLP": not experts,
        "gate": config.use_swiglu and not experts,
        "experts": experts,
        "expert_bias": config.expert_bias,
    }


def _sizes(config: ModelConfig, kind: AttentionType) -> dict[str, int]:
    """The dimensions by name."""
    heads, query, key = config.num_heads, config.num_heads * config.dim, config.kv_heads * config.dim
    by_head = config.qk_norm_over == "head"
    sizes = {
        "vocab": config.vocab_size,
        "positions": config.max_length,
        "hidden": config.hidden_size,
        "inner": config.inner_size,
        "experts": config.num_experts or 0,
        "heads": heads,
        "query": query,
        "key": key,
        "mixed": query,
        "query_norm": config.dim if by_head else query,
        "key_norm": config.dim if by_head else key,
    }
    if kind != "latent":
        return sizes
    rank, nope, rope, value = config.latent
    return sizes | {
        "query": heads * (nope + rope),
        "mixed": heads * value,
        "query_rank": config.q_lora_rank or 0,
        "rank": rank,
        "cached": rank + rope,
        "expanded": heads * (nope + value),
    }


def _shapes(table: dict[str, Parameter], config: ModelConfig, kind: AttentionType) -> dict[str, Shape]:
    parts, sizes = _parts(config, kind), _sizes(config, kind)
    return {
        name: tuple(sizes[dimension] for dimension in row.shape.split())
        for name, row in table.items()
        if parts[row.needs]
    }


def parameter_shapes(config: ModelConfig) -> Params:
    """The tree with a shape in the place of each array."""
    layers = {kind: _shapes(LAYER, config, kind) for kind in config.attention_types}
    return {**_shapes(TOP, config, "global"), "layers": [dict(layers[kind]) for kind in config.layer_types]}


def checkpoint_names(config: ModelConfig) -> Params:
    """The tree with the name that a checkpoint uses (Hugging Face's) in the place of each array."""
    shapes = parameter_shapes(config)
    layers = [
        {name: f"model.layers.{i}.{LAYER[name].stored}" for name in layer} for i, layer in enumerate(shapes["layers"])
    ]
    return {**{name: TOP[name].stored for name in shapes if name != "layers"}, "layers": layers}


def stored_shapes(config: ModelConfig) -> dict[str, Shape]:
    """The name that a checkpoint uses -> the shape, of every array."""
    shapes = jax.tree.leaves(parameter_shapes(config), is_leaf=lambda x: isinstance(x, tuple))
    return dict(zip(jax.tree.leaves(checkpoint_names(config)), shapes, strict=True))


def count_parameters(config: ModelConfig) -> int:
    """How many numbers the parameters hold; tied embeddings count once.

    >>> count_parameters(ModelConfig.from_preset("debug"))
    115520
    """
    return sum(math.prod(shape) for shape in stored_shapes(config).values())


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
