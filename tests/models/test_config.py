import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.models import ModelConfig
from attnsuite.models.other_names import _NONE, _OF_THE_CALL, _OURS
from attnsuite.models.parameters import count_parameters, initialise

LATENT = {
    "attention": ("latent", "global"),
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 14,
}


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"tie_embeddings": False},
        {"use_rope": False},
        {"use_rmsnorm": False},
        {"use_swiglu": False},
        {"qkv_bias": True, "num_kv_heads": 1},
        {"output_bias": True},
        {"qk_norm": True, "head_dim": 24},
        LATENT,
        LATENT | {"q_lora_rank": 3, "output_bias": True},
    ],
    ids=str,
)
def test_num_parameters_counts_what_is_initialised(overrides):
    config = ModelConfig.from_preset("debug", **overrides)
    params = jax.eval_shape(lambda key: initialise(config, key), jax.random.key(0))
    assert sum(x.size for x in jax.tree.leaves(params)) == count_parameters(config)


def test_sizes_are_required_and_the_inner_one_follows_from_the_hidden_one():
    sizes = {"vocab_size": 8000, "hidden_size": 512, "num_heads": 8}
    with pytest.raises(ValueError, match="ModelConfig needs num_layers; give the sizes, or take those of a preset"):
        ModelConfig(**sizes)
    assert ModelConfig(**sizes, num_layers=4).intermediate_size == 1376
    assert ModelConfig(**sizes | {"hidden_size": 4096}, num_layers=4).intermediate_size == 11008


def test_uniform_attention_follows_the_number_of_layers():
    config = ModelConfig.from_preset("debug", attention="sliding", window_size=4).replace(num_layers=5)
    assert config.attention == ("sliding",) * 5


@pytest.mark.parametrize("number", [np.int64(3), np.array(3, np.uint8), jnp.int32(3)], ids=repr)
def test_an_integer_of_numpy_or_jax_is_kept_as_pythons(number):
    config = ModelConfig.from_preset("debug", num_layers=number)
    assert json.dumps(config.num_layers) == "3"
    assert config == ModelConfig.from_preset("debug", num_layers=3)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"num_layers": 0}, "num_layers=0 must be an integer of at least 1"),
        ({"num_layers": np.True_}, "num_layers=np.True_ must be an integer of at least 1"),
        ({"num_layers": 10**18}, "num_layers is above 10000, the most that is accepted"),
        ({"hidden_size": 10**18}, "hidden_size is above 2147483647"),
        ({"vocab_size": 1.5}, "vocab_size=1.5 must be an integer"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
        ({"hidden_size": 65}, "hidden_size=65 is not a multiple of num_heads=2"),
        ({"head_dim": 33}, "head_dim=33 is odd; RoPE rotates pairs"),
        ({"rope_theta": 0}, "rope_theta=0 must be a finite number above 0"),
        (
            {"rope_scaling": {"factor": 8.0}},
            "must be a RopeScaling, LinearScaling, DynamicScaling, YarnScaling or None",
        ),
        ({"use_rope": 1}, "use_rope=1 must be True or False"),
        ({"qk_norm": True, "use_rmsnorm": False}, "qk_norm=True is an RMSNorm; it needs use_rmsnorm=True"),
        ({"dtype": "float64"}, "dtype='float64' is not supported; use one of float32"),
        ({"attention": "local"}, "attention='local' must be one of global, sliding, chunked, full"),
        ({"attention": ("global", "global", "full")}, "attention names 3 layers, but num_layers=2"),
        ({"attention": "sliding"}, "attention='sliding' needs window_size"),
        ({"attention": "latent"}, "attention='latent' needs kv_lora_rank, an integer of at least 1"),
        (LATENT | {"v_head_dim": 0}, "v_head_dim=0 must be an integer of at least 1"),
        (LATENT | {"qk_rope_head_dim": 3}, "qk_rope_head_dim=3 is odd; RoPE rotates pairs"),
        (LATENT | {"use_rope": False}, "use_rope=False does not go with attention='latent'; it needs use_rope=True"),
        (LATENT | {"qkv_bias": True}, "qkv_bias=True does not go with attention='latent'; it needs qkv_bias=False"),
        ({"attention": "nope", "use_rope": False}, "attention='nope' and qk_norm_over='rotated' are about RoPE"),
        ({"qk_norm_over": "rotated"}, "qk_norm_over='rotated' needs qk_norm=True"),
        ({"attention": "nope", "floor_scale": 8}, "floor_scale=8 and attn_scale=None go together; give both"),
        ({"floor_scale": 8, "attn_scale": 0.1}, "floor_scale and attn_scale are for layers of attention='nope'"),
        ({"layers": 3}, "no field 'layers'; it has vocab_size"),
        ({"use_lora": True}, "attnsuite train --lora-rank 8"),
        ({"attention": "kascade"}, 'kascade is a backend: model(tokens, backend="kascade"'),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_a_wrong_field_is_refused_with_a_sentence(fields, sentence):
    with pytest.raises(ValueError, match=sentence.replace("(", r"\(")):
        ModelConfig.from_preset("debug", **fields)


def test_a_preset_is_named_first_by_a_known_name():
    with pytest.raises(ValueError, match="preset 'huge' is not known; use one of debug"):
        ModelConfig.from_preset("huge")
    with pytest.raises(ValueError, match=r'the preset comes first: ModelConfig.from_preset\("tiny"'):
        ModelConfig.from_preset(preset="tiny")


@pytest.mark.parametrize(
    "make",
    [ModelConfig, partial(ModelConfig.from_preset, "debug"), ModelConfig.from_preset("debug").replace],
    ids=["new", "preset", "replace"],
)
def test_a_field_of_another_transformer_is_refused_with_the_name_that_it_has_here(make):
    with pytest.raises(
        ValueError, match=r"no field 'd_model', 'x'; d_model is called hidden_size here; it has vocab_s"
    ):
        make(d_model=64, x=1)
    with pytest.raises(ValueError, match="the backend is given to the call"):
        make(use_flash_attention=True)


def test_every_name_that_a_refusal_says_is_a_field():
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    others = [name for names in _OURS.values() for name in names]
    assert set(_OURS) <= fields
    assert not fields & {*others, *_OF_THE_CALL, *_NONE}
    assert len(others) == len(set(others))
