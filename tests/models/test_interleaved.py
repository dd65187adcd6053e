"""DeepSeek-V3's latent attention, and Llama 4's chunked layers beside global ones without RoPE, against transformers.

Their experts are left out. In transformers a rotated pair stands side by side, here half a vector apart: rows of layers
with RoPE are turned round on the way in.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.models import ModelConfig, Transformer
from attnsuite.models.parameters import checkpoint_names
from theirs import CALL, TOLERANCE, assert_agrees, config_of, distance, drawn, their_logits

pytestmark = pytest.mark.llama

TOKENS = np.random.default_rng(7).integers(0, 67, (2, 24))
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 14}
SIZES = {"vocab_size": 67, "hidden_size": 48, "intermediate_size": 80}
# Chunks and steps of the temperature end inside the 24 tokens; all layers are dense.
THEIRS = {
    "DeepseekV3": LATENT | {"num_hidden_layers": 2, "num_key_value_heads": 4, "first_k_dense_replace": 2},
    "Llama4": {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 12, "intermediate_size_mlp": 80}
    | {"moe_layers": [], "no_rope_layer_interval": 2, "attention_chunk_size": 7, "floor_scale": 5, "attn_scale": 0.4},
}
OURS = {
    "DeepseekV3": LATENT | {"num_layers": 2, "attention": "latent", "norm_eps": 1e-6},
    "Llama4": {"num_layers": 3, "num_kv_heads": 2, "head_dim": 12, "attention": ("chunked", "nope", "chunked")}
    | {"chunk_size": 7, "qk_norm": True, "qk_norm_over": "rotated", "floor_scale": 5, "attn_scale": 0.4},
}
# Of a projection of the layers with RoPE: its heads, and of each the numbers that are not rotated and those that are.
TURNED = {
    "DeepseekV3": {"q_b_proj": (4, 12, 8), "kv_a_proj_with_mqa": (1, 20, 8)},
    "Llama4": {"q_proj": (4, 0, 12), "k_proj": (2, 0, 12)},
}
MISTAKES = {
    "RoPE everywhere": {"attention": ("chunked", "global", "chunked"), "floor_scale": None, "attn_scale": None},
    "no temperature": {"floor_scale": None, "attn_scale": None},
    "no norm": {"qk_norm": False, "qk_norm_over": "head"},
}


def theirs(kind):
    """Attention far from uniform."""
    rope = {"rope_type": "default", "rope_theta": 1e4}
    sizes = SIZES | {"num_attention_heads": 4, "max_position_embeddings": 512, "rope_parameters": rope}
    config = config_of(kind, **sizes | THEIRS[kind], bos_token_id=None, eos_token_id=None)
    return drawn(kind, config, 0, lambda _: 0.25)


def ours(kind, model, *, turned=True, **changes):
    config = ModelConfig(**SIZES | OURS[kind] | changes, num_heads=4, tie_embeddings=False)
    tensors = {name.replace("feed_forward", "mlp"): x.numpy() for name, x in model.state_dict().items()}
    params = jax.tree.map(lambda name: jnp.asarray(tensors[name]), checkpoint_names(config))
    for layer in params["layers"][:: 2 if kind == "Llama4" else 1] if turned else ():
        for name, (heads, plain, rotated) in TURNED[kind].items():
            row = np.r_[:plain, plain : plain + rotated : 2, plain + 1 : plain + rotated : 2]
            layer[name] = layer[name][np.concatenate([head * (plain + rotated) + row for head in range(heads)])]
    return Transformer(config, params)


@pytest.mark.parametrize("kind", OURS)
def test_logits_are_those_of_transformers_in_one_pass_and_from_a_cache(kind):
    model = theirs(kind)
    expected = their_logits(model, TOKENS)
    assert_agrees(ours(kind, model), TOKENS, expected)
    as_they_lie = ours(kind, model, turned=False)
    assert distance(as_they_lie(TOKENS, **CALL), expected) > 1e-2, "the order of rotated rows must matter"


@pytest.mark.thorough
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_part_that_is_left_out_does_not_stay_within_the_tolerance(mistake):
    model = theirs("Llama4")
    got = ours("Llama4", model, **MISTAKES[mistake])(TOKENS, **CALL)
    assert distance(got, their_logits(model, TOKENS)) > 20 * TOLERANCE
