import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import load_file, save_file

from attnsuite.models import (
    CheckpointError,
    ModelConfig,
    RopeScaling,
    Transformer,
    convert,
    load,
    load_layer,
    open_checkpoint,
    save,
)

NORM = "model.layers.1.input_layernorm.weight"
LATENT = {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 14}
CONFIGS = {
    "tied": ModelConfig.from_preset("debug", num_kv_heads=1, rope_scaling=RopeScaling(factor=8.0)),
    "untied": ModelConfig.from_preset("debug", tie_embeddings=False),
    "bfloat16": ModelConfig.from_preset("debug", dtype="bfloat16", param_dtype="bfloat16"),
    "latent": ModelConfig.from_preset("debug", attention=("latent", "global"), q_lora_rank=9, **LATENT),
    "no-llama": ModelConfig.from_preset(
        "debug", use_rope=False, use_rmsnorm=False, use_swiglu=False, attention="chunked", chunk_size=4
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_saving_and_loading_gives_the_same_model(name, tmp_path):
    model = Transformer(CONFIGS[name])
    save(model, tmp_path / "checkpoint")
    loaded = load(tmp_path / "checkpoint")
    assert loaded.config == model.config
    same = jax.tree.map(lambda a, b: a.dtype == b.dtype and bool((a == b).all()), model.arrays(), loaded.arrays())
    assert all(jax.tree.leaves(same))


@pytest.fixture
def checkpoint(tmp_path):
    save(Transformer(ModelConfig.from_preset("debug")), tmp_path)
    return tmp_path


def rewrite(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def reconfigure(directory, **change):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def test_names_are_hugging_faces_and_tied_heads_are_left_out(checkpoint):
    names = set(load_file(checkpoint / "model.safetensors"))
    assert "model.layers.1.self_attn.q_proj.weight" in names
    assert "model.layers.0.mlp.gate_proj.weight" in names
    assert "lm_head.weight" not in names


def test_fields_can_be_overridden(checkpoint):
    model = load(checkpoint, dtype="bfloat16", param_dtype="bfloat16", attention="sliding", window_size=3)
    assert model.config.attention == ("sliding", "sliding")
    assert model.arrays()["norm"].dtype == jnp.bfloat16


def test_shards_are_read_through_their_index(checkpoint):
    whole = load(checkpoint).arrays()
    tensors = load_file(checkpoint / "model.safetensors")
    names = sorted(tensors)
    mapping = {}
    for number, part in enumerate((names[:5], names[5:])):
        save_file({name: tensors[name] for name in part}, checkpoint / f"part-{number}.safetensors")
        mapping |= dict.fromkeys(part, f"part-{number}.safetensors")
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapping}))
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, whole, load(checkpoint).arrays())))


def test_a_tied_head_that_equals_the_embeddings_is_accepted_and_another_refused(checkpoint):
    def tie(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    rewrite(checkpoint, tie)
    load(checkpoint)
    rewrite(checkpoint, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"] + 1}))
    with pytest.raises(ValueError, match=r"'lm_head.weight' differs from 'model.embed_tokens.weight'"):
        load(checkpoint)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda tensors: tensors.pop(NORM), f"lacks '{NORM}', which"),
        (
            lambda tensors: tensors.update({"model.layers.7.mlp.up_proj.weight": jnp.ones(2)}),
            "holds 'model.layers.7.mlp.up_proj.weight', which this configuration",
        ),
        (lambda tensors: tensors.update({NORM: jnp.ones(63)}), rf"'{NORM}' .* has shape \(63,\); expected \(64,\)"),
    ],
    ids=["missing", "unexpected", "of another shape"],
)
def test_a_tensor_that_does_not_fit_is_named(change, sentence, checkpoint):
    rewrite(checkpoint, change)
    with pytest.raises(ValueError, match=sentence):
        load(checkpoint)


def fuse(tensors):
    """Phi-3's matrices: those of queries, keys and values in one, and gate and up in one."""
    for i in range(2):
        for fused, parts in (("self_attn.qkv", "qkv"), ("mlp.gate_up", ("gate", "up"))):
            block = f"model.layers.{i}.{fused.split('.')[0]}."
            rows = [tensors.pop(f"{block}{part}_proj.weight") for part in parts]
            tensors[f"model.layers.{i}.{fused}_proj.weight"] = jnp.concatenate(rows)


FUSED = "model.layers.1.self_attn.qkv_proj.weight"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda tensors: tensors.pop(FUSED), f"lacks '{FUSED}', which"),
        (lambda tensors: tensors.update({FUSED: jnp.ones((3, 64))}), rf"'{FUSED}' .* has shape \(3, 64\); expected"),
        (
            lambda tensors: tensors.update({"model.layers.1.self_attn.q_proj.weight": jnp.ones((64, 64))}),
            "holds 'model.layers.1.self_attn.q_proj.weight', which this configuration",
        ),
    ],
    ids=["missing", "of another shape", "not fused"],
)
def test_a_tensor_that_does_not_fit_a_fused_file_is_named(change, sentence, checkpoint):
    whole = load(checkpoint).arrays()
    reconfigure(checkpoint, model_type="phi3", architectures=["Phi3ForCausalLM"])
    rewrite(checkpoint, fuse)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, whole, load(checkpoint).arrays())))
    rewrite(checkpoint, change)
    with pytest.raises(ValueError, match=sentence):
        load(checkpoint)


def test_a_truncated_file_is_refused_with_a_sentence(checkpoint):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        load(checkpoint)


def test_a_directory_without_weights_is_refused_with_the_files_that_are_read(checkpoint):
    (checkpoint / "model.safetensors").rename(checkpoint / "flax_model.msgpack")
    with pytest.raises(ValueError, match=r"holds neither model.safetensors nor .* nor pytorch_model.bin nor"):
        load(checkpoint)


def test_an_index_cannot_point_outside_its_directory(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(ValueError, match="shards lie beside it, without a path"):
        load(checkpoint)


def test_bad_configurations_are_refused_with_a_sentence(checkpoint):
    reconfigure(checkpoint, num_hidden_layers=1)
    with pytest.raises(ValueError, match="has no place for"):
        load(checkpoint)
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not valid JSON"):
        load(checkpoint)
    (checkpoint / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="is not accepted: expected `object`, got `array`"):
        load(checkpoint)
    with pytest.raises(ValueError, match="cannot be read"):
        load(checkpoint / "nowhere")


def redeclare(directory, name, code, size):
    """Another dtype for a tensor in the header, its bytes (zeros) at the end: the library writes not all of these."""
    path = directory / "model.safetensors"
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    begin, count = len(raw) - end, int(np.prod(header[name]["shape"]))
    filler = header[name]["data_offsets"]  # whose bytes have to be somebody's
    header["rotary_emb.inv_freq"] = {"dtype": "U8", "shape": [filler[1] - filler[0]], "data_offsets": filler}
    header[name] |= {"dtype": code, "data_offsets": [begin, begin + count * size]}
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + raw[end:] + bytes(count * size))


@pytest.mark.parametrize(("code", "size"), [("F64", 8), ("I8", 1), ("F8_E4M3", 1)])
def test_a_dtype_that_no_weight_has_is_refused_by_name(code, size, checkpoint):
    redeclare(checkpoint, NORM, code, size)
    sentence = rf"'{NORM}' in model.safetensors is stored as {code}; weights are read from F32, BF16, F16"
    for call in (open_checkpoint, load, lambda at: convert(at, at / "out")):
        with pytest.raises(CheckpointError, match=sentence):
            call(checkpoint)


@pytest.mark.parametrize(("code", "size"), [("F32", 4), ("BF16", 2), ("F16", 2)])
def test_the_dtypes_of_weights_are_read(code, size, checkpoint):
    redeclare(checkpoint, NORM, code, size)
    assert not np.asarray(load(checkpoint).arrays()["layers"][1]["input_layernorm"]).any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_is_refused_by_name(value, checkpoint):
    rewrite(checkpoint, lambda tensors: tensors.update({NORM: tensors[NORM].at[5].set(value)}))
    sentence = rf"'{NORM}' in model.safetensors holds NaN or infinity"
    for call in (load, lambda at: load_layer(at, 1), lambda at: convert(at, at / "out")):
        with pytest.raises(CheckpointError, match=sentence):
            call(checkpoint)
    load_layer(checkpoint, 0)


def test_a_weight_beyond_the_range_of_the_dtype_asked_for_is_refused(checkpoint):
    rewrite(checkpoint, lambda tensors: tensors.update({NORM: tensors[NORM].at[5].set(1e5)}))
    load(checkpoint, param_dtype="bfloat16")
    for call in (lambda at: load(at, param_dtype="float16"), lambda at: convert(at, at / "out", dtype="float16")):
        with pytest.raises(CheckpointError, match=rf"'{NORM}' .* values beyond the range of float16"):
            call(checkpoint)


def test_a_tensor_in_two_shards_is_refused(checkpoint):
    tensors = load_file(checkpoint / "model.safetensors")
    for part in "ab":
        save_file(tensors, checkpoint / f"{part}.safetensors")
    (checkpoint / "model.safetensors").unlink()
    mapping = {name: f"{part}.safetensors" for name, part in zip(tensors, "ab" * len(tensors), strict=False)}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapping}))
    with pytest.raises(CheckpointError, match=r"is in a.safetensors and in b.safetensors; expected once"):
        load(checkpoint)


@pytest.mark.parametrize(
    "index", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "b\\u0000"}}']
)
def test_an_index_of_another_form_is_refused(index, checkpoint):
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"model.safetensors.index.json"):
        load(checkpoint)
