import json

import pytest

from attnsuite.models import PRESETS, CheckpointError, ModelConfig, RopeScaling
from attnsuite.models.checkpoint import read_config
from attnsuite.models.huggingface import from_hf, to_hf
from attnsuite.models.huggingface_keys import HARMLESS, ONLY

LLAMA = {"model_type": "llama", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
SCALING = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALING |= {"original_max_position_embeddings": 64}


@pytest.mark.parametrize("preset", PRESETS)
def test_config_survives_the_way_there_and_back(preset):
    config = ModelConfig.from_preset(preset)
    assert from_hf(to_hf(config)) == config


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig.from_preset(
            "debug", attention=("chunked", "full"), chunk_size=8, use_rope=False, use_swiglu=False, qkv_bias=True
        ),
        ModelConfig.from_preset(
            "debug", attention="nope", qk_norm=True, qk_norm_over="rotated", floor_scale=8, attn_scale=0.1
        ),
    ],
    ids=["switches", "Llama 4's attention"],
)
def test_config_that_llama_cannot_express_survives_under_its_own_type(config):
    written = to_hf(config)
    assert written["model_type"] != "llama"
    assert from_hf(written) == config


def test_both_spellings_of_rope_are_one():
    old = from_hf(LLAMA | {"rope_theta": 5e5, "rope_scaling": SCALING})
    new = from_hf(LLAMA | {"rope_parameters": SCALING | {"rope_theta": 5e5}})
    assert old == new
    assert old.rope_scaling == RopeScaling(factor=32.0, original_max_length=64)
    assert old.rope_theta == 5e5


# Others: test_presets.py, test_parity.py.
FAMILIES = {
    "llama with biases": ({"attention_bias": True}, {"qkv_bias": True, "output_bias": True}),
    "mistral without its key": ({"model_type": "mistral"}, {"attention": "sliding", "window_size": 4096}),
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
    assert written["model_type"] == given.get("model_type", "llama")


def test_null_and_default_scaling_are_none():
    assert from_hf(LLAMA | {"rope_scaling": None}).rope_scaling is None
    assert from_hf(LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}).rope_scaling is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2' in config.json is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' in config.json is not supported; only 'silu' or 'swish' is"),
        ({"mlp_bias": True}, "mlp_bias=true"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"sliding_window": 4096}, "sliding_window=4096 in config.json is not supported in a llama"),
        ({"model_type": "qwen2", "attention_bias": False}, "attention_bias=false in config.json is not what"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias=true in config.json is not what"),
        ({"model_type": "mistral", "layer_types": ["full_attention"] * 2}, "not supported in a mistral"),
        ({"model_type": "qwen3", "layer_types": ["linear_attention"] * 2}, "layer_types='linear_attention'"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 2}, "but no sliding_window is in use"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type='longrope'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn' in config.json lacks original_max_position"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' in config.json lacks factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "lacks low_freq_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"torch_dtype": "int8"}, "dtype='int8'"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_attention_heads": 3}, "not a multiple"),
        (
            {"rope_scaling": SCALING | {"high_freq_factor": 1.0}},
            "high_freq_factor=1.0 must be above low_freq_factor=1.0",
        ),
        # Values of the wrong type or size.
        ({"hidden_size": "64"}, "hidden_size in config.json is not accepted: expected `int`, got `str`"),
        ({"num_hidden_layers": 10**18}, "num_hidden_layers in config.json is not accepted: expected `int` <= 10000"),
        ({"num_hidden_layers": 1e18}, "num_hidden_layers in config.json is not accepted: expected `int`, got `float`"),
        ({"vocab_size": 2**31}, "vocab_size is above 2147483647"),
        ({"num_key_value_heads": []}, "num_key_value_heads in config.json is not accepted"),
        ({"head_dim": True}, "head_dim in config.json is not accepted: expected `int | null`, got `bool`"),
        ({"rms_norm_eps": {}}, "rms_norm_eps in config.json is not accepted"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings in config.json is not accepted: expected `bool`, got `int`"),
        ({"rope_scaling": "llama3"}, "rope_scaling in config.json is not accepted: expected `object | null`"),
        ({"rope_scaling": SCALING | {"factor": "8"}}, "rope_scaling.factor in config.json is not accepted"),
        ({"rope_scaling": SCALING | {"beta_fast": 32}}, "rope_type='llama3' in config.json makes no use of beta_fast"),
        ({"rope_scaling": {"factor": 8.0}}, "rope_type='default' in config.json makes no use of factor"),
        ({"rope_scaling": SCALING | {"type": "yarn"}}, "rope_type='llama3' in config.json is not supported"),
        ({"rope_scaling": SCALING, "rope_parameters": {"rope_type": "default"}}, "rope_parameters and rope_scaling"),
        ({"rope_parameters": {"full_attention": SCALING}}, "rope_parameters in config.json has 'full_attention'"),
        ({"layer_types": ["full_attention"]}, "layer_types in config.json names 1 layers, but num_hidden_layers=2"),
        ({"layer_types": [["x"]] * 2}, "layer_types[0] in config.json is not accepted"),
        ({"model_type": ["llama"]}, "model_type=a list in config.json is not supported"),
        ({"torch_dtype": 16}, "torch_dtype in config.json is not accepted"),
        ({"architectures": ["LlamaBidirectionalModel"]}, "architectures in config.json names 'LlamaBidirectionalM"),
        ({"use_sliding_window": True}, "use_sliding_window=true in config.json is not supported in a llama"),
        (
            {"model_type": "mistral", "max_window_layers": 1},
            "max_window_layers=1 in config.json is not supported in a m",
        ),
        ({"attention_suite": {}}, "attention_suite in config.json is for model_type='attention_suite', not 'llama'"),
        ({"model_type": "attention_suite", "attention_suite": {"windows": 1}}, "has 'windows' (1), which is not known"),
        ({"model_type": "attention_suite", "attention_suite": {"attention": [3]}}, "attention_suite.attention"),
        ({"model_type": "attention_suite", "sliding_window": 4}, "sliding_window in config.json has no place beside"),
        ({"model_type": "attention_suite", "attention_bias": True}, "attention_bias=true in config.json is not qkv"),
    ],
    ids=str,
)
def test_what_is_not_computed_here_is_refused(change, sentence):
    with pytest.raises(CheckpointError) as error_info:
        from_hf(LLAMA | change)
    assert sentence in str(error_info.value)


# Real keys of other families, which change what is computed: in a llama each of them was once passed over.
CHANGING = {
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "attention_sinks": 4,
    "attention_chunk_size": 8192,
    "no_rope_layers": [1, 0],
    "clip_qkv": 8.0,
    "use_qk_norm": True,
    "rope_interleaved": True,
    "use_bidirectional_attention": True,
    "attention_dropout": 0.1,
    "embedding_multiplier": 12.0,
    "auto_map": {"AutoModelForCausalLM": "modeling.Custom"},
    "num_local_experts": 8,  # known to nobody here, as are the next ones
    "query_pre_attn_scalar": 256,
    "sliding_window_pattern": 6,
    "text_config": {"hidden_size": 8},
    "original_max_position_embeddings": 4096,
}


@pytest.mark.parametrize("key", CHANGING)
def test_a_key_that_changes_what_is_computed_is_never_passed_over(key):
    with pytest.raises(CheckpointError, match=rf"{key}.* in config.json is not supported|has '{key}' \(.* not known"):
        from_hf(LLAMA | {key: CHANGING[key]})
    assert from_hf(LLAMA | {key: None}) == from_hf(LLAMA), "null says nothing"


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in ONLY.items() for value in values])
def test_a_key_at_its_neutral_value_is_accepted(key, value):
    assert from_hf(LLAMA | {key: value}) == from_hf(LLAMA)


@pytest.mark.parametrize("key", sorted(HARMLESS))
def test_a_key_that_changes_nothing_is_accepted_whatever_it_holds(key):
    assert from_hf(LLAMA | {key: ["anything", 3]}) == from_hf(LLAMA)


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ("1e400", "number out of range"),
        ("NaN", "is not valid JSON"),
        ("9" * 5000, "integer value out of range"),
        ("[" * 100_000 + "]" * 100_000, "is nested too deeply"),
        ('"\\ud800"', "is not valid JSON"),
        ('"\xff"', "is not valid JSON"),
    ],
    ids=["overflow", "nan", "digits", "nesting", "surrogate", "latin1"],
)
def test_json_that_no_checkpoint_has_is_refused(raw, sentence, tmp_path):
    text = json.dumps(LLAMA | {"max_length": "here"}).replace('"here"', raw)
    (tmp_path / "config.json").write_bytes(text.encode("latin1"))
    with pytest.raises(CheckpointError, match=sentence):
        read_config(tmp_path)


@pytest.mark.parametrize("directory", ["x" * 300, "a\0b", "nowhere"], ids=["long", "null", "missing"])
def test_a_directory_that_cannot_be_is_refused(directory):
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_config(directory)
