"""Multi-head latent attention against transformers' DeepSeek-V3, whose experts are left out.

In transformers a rotated pair stands side by side, here half a vector apart: rows are turned round on the way in.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.models import ModelConfig, Transformer
from attnsuite.models.parameters import checkpoint_names
from theirs import TOLERANCE, distance, drawn, their_logits, transformers

pytestmark = pytest.mark.llama

TOKENS = np.random.default_rng(7).integers(0, 131, (2, 24))
SHARED = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "q_lora_rank": 16,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
}


def theirs():
    """Attention far from uniform, all layers dense, in eval mode and float32."""
    config = transformers.DeepseekV3Config(
        **SHARED,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=False,
    )
    return drawn("DeepseekV3", config, 0, lambda _: 0.25)


def ours(model, *, turned=True):
    config = ModelConfig.from_preset(
        "debug",
        **SHARED,
        num_layers=2,
        num_heads=4,
        attention="latent",
        norm_eps=1e-6,
        tie_embeddings=False,
    )
    tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    params = jax.tree.map(lambda name: jnp.asarray(tensors[name]), checkpoint_names(config))
    if turned:
        queries = np.concatenate([head * 20 + np.r_[:12, 12 + pairs_apart(8)] for head in range(4)])
        key = np.r_[:20, 20 + pairs_apart(8)]
        for layer in params["layers"]:
            layer["q_b_proj"] = layer["q_b_proj"][queries]
            layer["kv_a_proj_with_mqa"] = layer["kv_a_proj_with_mqa"][key]
    return Transformer(config, params)


def pairs_apart(width):
    """The even ones, then the odd ones."""
    return np.r_[0:width:2, 1:width:2]


def test_logits_are_those_of_transformers_in_one_pass_and_from_a_cache():
    reference = theirs()
    expected = their_logits(reference, TOKENS)
    model, call = ours(reference), {"backend": "standard"}
    assert distance(model(TOKENS, **call), expected) <= TOLERANCE
    first, cache = model.prefill(TOKENS[:, :10], model.new_cache(2, 32), **call)
    more, cache = model.prefill(TOKENS[:, 10:23], cache, **call)
    last, cache = model.decode(TOKENS[:, 23], cache, **call)
    assert distance(np.concatenate([first, more, last[:, None]], axis=1), expected) <= TOLERANCE
    as_they_lie = ours(reference, turned=False)
    assert distance(as_they_lie(TOKENS, **call), expected) > 1e-2, "the order of rotated rows must matter"
