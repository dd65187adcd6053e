"""Llama 4's attention against transformers: chunked layers with RoPE and norms, global ones without RoPE and sharpened.

The experts are left out. In transformers a rotated pair stands side by side, here half a vector apart: rows of layers
with RoPE are turned round on the way in.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.models import CheckpointError, ModelConfig, Transformer
from attnsuite.models.huggingface import from_hf
from attnsuite.models.parameters import checkpoint_names
from theirs import TOLERANCE, distance, drawn, their_logits, transformers

pytestmark = pytest.mark.llama

TOKENS = np.random.default_rng(7).integers(0, 67, (2, 24))
HEADS, KV_HEADS, DIM = 4, 2, 12
CALL = {"backend": "standard"}


def theirs():
    """Attention far from uniform; chunks and steps of the temperature end inside the 24 tokens; all layers dense."""
    config = transformers.Llama4TextConfig(
        vocab_size=67,
        hidden_size=32,
        intermediate_size_mlp=40,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        max_position_embeddings=512,
        moe_layers=[],
        no_rope_layer_interval=2,
        attention_chunk_size=7,
        floor_scale=5,
        attn_scale=0.4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        bos_token_id=None,
        eos_token_id=None,
    )
    return drawn("Llama4", config, 0, lambda _: 0.25)


def ours(model, **changes):
    fields = {
        "vocab_size": 67,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_layers": 3,
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": DIM,
        "attention": ("chunked", "nope", "chunked"),
        "chunk_size": 7,
        "qk_norm": True,
        "qk_norm_over": "rotated",
        "floor_scale": 5,
        "attn_scale": 0.4,
        "tie_embeddings": False,
    }
    config = ModelConfig(**fields | changes)
    tensors = {name.replace("feed_forward", "mlp"): x.numpy() for name, x in model.state_dict().items()}
    params = jax.tree.map(lambda name: jnp.asarray(tensors[name]), checkpoint_names(config))
    for layer in params["layers"][::2]:
        for name, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
            pairs = np.r_[0:DIM:2, 1:DIM:2]
            layer[name] = layer[name][np.concatenate([head * DIM + pairs for head in range(heads)])]
    return Transformer(config, params)


@pytest.fixture(scope="module")
def reference():
    model = theirs()
    return model, their_logits(model, TOKENS)


def test_logits_are_those_of_transformers_in_one_pass_and_from_a_cache(reference):
    model, expected = ours(reference[0]), reference[1]
    assert distance(model(TOKENS, **CALL), expected) <= TOLERANCE
    first, cache = model.prefill(TOKENS[:, :23], model.new_cache(2, 32), **CALL)
    last, cache = model.decode(TOKENS[:, 23], cache, **CALL)
    assert distance(np.concatenate([first, last[:, None]], axis=1), expected) <= TOLERANCE


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mistake",
    [
        {"attention": ("chunked", "global", "chunked"), "floor_scale": None, "attn_scale": None},
        {"floor_scale": None, "attn_scale": None},
        {"qk_norm": False, "qk_norm_over": "head"},
    ],
    ids=["RoPE everywhere", "no temperature", "no norm"],
)
def test_a_part_that_is_left_out_does_not_stay_within_the_tolerance(reference, mistake):
    assert distance(ours(reference[0], **mistake)(TOKENS, **CALL), reference[1]) > 20 * TOLERANCE


def test_the_configuration_is_refused_because_of_its_experts():
    made = transformers.Llama4TextConfig(num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=r"model_type='llama4_text' in config.json is not supported; use one of"):
        from_hf(made.to_dict())
