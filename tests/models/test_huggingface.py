import pytest

from models import PRESETS, ModelConfig, RopeScaling
from models.huggingface import from_hf, to_hf

LLAMA = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
}
SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("preset", PRESETS)
def test_config_survives_the_way_there_and_back(preset):
    config = ModelConfig.from_preset(preset)
    assert from_hf(to_hf(config)) == config


def test_config_that_llama_cannot_express_survives_under_its_own_type():
    config = ModelConfig(attention=("chunked", "full"), chunk_size=8, use_rope=False, use_swiglu=False, qkv_bias=True)
    written = to_hf(config)
    assert written["model_type"] != "llama"
    assert from_hf(written) == config


def test_both_spellings_of_rope_are_one():
    old = from_hf(LLAMA | {"rope_theta": 5e5, "rope_scaling": SCALING})
    new = from_hf(LLAMA | {"rope_parameters": SCALING | {"rope_theta": 5e5}})
    assert old == new
    assert old.rope_scaling == RopeScaling(factor=32.0, original_max_length=64)
    assert old.rope_theta == 5e5


FAMILIES = {
    "llama": ({}, {}),
    "llama with biases": ({"attention_bias": True}, {"qkv_bias": True, "output_bias": True}),
    "mistral": ({"model_type": "mistral", "sliding_window": 6}, {"attention": "sliding", "window_size": 6}),
    "mistral without its key": ({"model_type": "mistral"}, {"attention": "sliding", "window_size": 4096}),
    "mistral of later versions": ({"model_type": "mistral", "sliding_window": None}, {}),
    "qwen2": ({"model_type": "qwen2", "sliding_window": 6}, {"qkv_bias": True}),
    "qwen2 with windows from layer 1": (
        {"model_type": "qwen2", "sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1},
        {"qkv_bias": True, "attention": ("global", "sliding"), "window_size": 6},
    ),
    "qwen3": ({"model_type": "qwen3"}, {"qk_norm": True, "head_dim": 128}),
    "qwen3 with named layers": (
        {"model_type": "qwen3", "head_dim": 16, "use_sliding_window": True, "sliding_window": 6}
        | {"layer_types": ["sliding_attention", "full_attention"]},
        {"qk_norm": True, "head_dim": 16, "attention": ("sliding", "global"), "window_size": 6},
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families_differ_by_their_configuration_only(name):
    given, expected = FAMILIES[name]
    config = from_hf(LLAMA | given)
    assert config == from_hf(LLAMA).replace(**{"head_dim": 16} | expected)
    written = to_hf(config)
    assert from_hf(written) == config
    assert written["model_type"] == (
        given.get("model_type", "llama") if name != "mistral of later versions" else "llama"
    )


def test_null_and_default_scaling_are_none():
    assert from_hf(LLAMA | {"rope_scaling": None}).rope_scaling is None
    assert from_hf(LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}).rope_scaling is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2' in config.json is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' in config.json is not supported; only 'silu' is"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"sliding_window": 4096}, "sliding_window=4096 in config.json is not supported in a llama"),
        ({"model_type": "qwen2", "attention_bias": False}, "attention_bias=False in config.json is not what"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias=True in config.json is not what"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 2}, "not supported in a mistral"),
        ({"model_type": "qwen3", "layer_types": ["linear_attention"] * 2}, "layer_types='linear_attention'"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 2}, "but no sliding_window is in use"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type='yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "lacks low_freq_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"torch_dtype": "int8"}, "dtype='int8'"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_attention_heads": 3}, "not a multiple"),
    ],
    ids=str,
)
def test_what_is_not_computed_here_is_refused(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        from_hf(LLAMA | change)
