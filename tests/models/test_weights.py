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
    "qwen2": ModelConfig.from_preset("debug", qkv_bias=True, attention=("global", "sliding"), window_size=4),
    "qwen3": ModelConfig.from_preset("debug", qk_norm=True, head_dim=24, num_kv_heads=1),
    "no-llama": ModelConfig.from_preset(
        "debug", use_rope=False, use_rmsnorm=False, use_swiglu=False, attention="chunked", chunk_size=4
    ),
}


def equal(first, second):
    return all(jax.tree.leaves(jax.tree.map(lambda a, b: a.dtype == b.dtype and bool((a == b).all()), first, second)))


@pytest.mark.parametrize(("name", "chunked"), [(name, at % 2 == 1) for at, name in enumerate(CONFIGS)])
def test_what_is_saved_or_converted_is_the_same_model(name, chunked, tmp_path):
    model = Transformer(CONFIGS[name])
    save(model, tmp_path / "in")
    assert convert(tmp_path / "in", tmp_path / "out", chunked=chunked) == model.config
    for directory in ("in", "out"):
        loaded = load(tmp_path / directory)
        assert loaded.config == model.config
        assert equal(loaded.arrays(), model.arrays())
    files = {path.name for path in (tmp_path / "out").glob("*.safetensors")}
    layers = {f"layer-{i:05d}.safetensors" for i in range(model.config.num_layers)}
    assert files == ({"outer.safetensors", *layers} if chunked else {"model.safetensors"})


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


def index(directory, said):
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps(said))


def shard(directory, *parts):
    """The tensors of these names in a file each; of a name in both the index says the second."""
    tensors = load_file(directory / "model.safetensors")
    for file, names in zip("ab", parts, strict=True):
        save_file({name: tensors[name] for name in names}, directory / f"{file}.safetensors")
    said = {name: f"{file}.safetensors" for file, names in zip("ab", parts, strict=True) for name in names}
    index(directory, {"weight_map": said})


def test_shards_are_read_through_their_index(checkpoint):
    whole = load(checkpoint).arrays()
    names = sorted(load_file(checkpoint / "model.safetensors"))
    shard(checkpoint, names[:5], names[5:])
    assert equal(whole, load(checkpoint).arrays())


def test_a_tied_head_that_equals_the_embeddings_is_accepted_and_another_refused(checkpoint):
    def tie(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    rewrite(checkpoint, tie)
    load(checkpoint)
    rewrite(checkpoint, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"] + 1}))
    with pytest.raises(ValueError, match=r"'lm_head.weight' differs from 'model.embed_tokens.weight'"):
        load(checkpoint)


def fuse(tensors):
    """Phi-3's matrices: those of queries, keys and values in one, and gate and up in one."""
    for i in range(2):
        for fused, parts in (("self_attn.qkv", "qkv"), ("mlp.gate_up", ("gate", "up"))):
            block = f"model.layers.{i}.{fused.split('.')[0]}."
            rows = [tensors.pop(f"{block}{part}_proj.weight") for part in parts]
            tensors[f"model.layers.{i}.{fused}_proj.weight"] = jnp.concatenate(rows)


@pytest.mark.parametrize("fused", [False, True], ids=["Llama", "Phi-3"])
def test_a_tensor_that_does_not_fit_is_named(fused, checkpoint):
    whole, name, odd = load(checkpoint).arrays(), NORM, "model.layers.7.mlp.up_proj.weight"
    if fused:
        name, odd = (f"model.layers.1.self_attn.{part}_proj.weight" for part in ("qkv", "q"))
        reconfigure(checkpoint, model_type="phi3", architectures=["Phi3ForCausalLM"])
        rewrite(checkpoint, fuse)
        assert equal(whole, load(checkpoint).arrays())
    right = load_file(checkpoint / "model.safetensors")
    for tensors, sentence in (
        ({key: x for key, x in right.items() if key != name}, f"lacks '{name}', which"),
        (right | {name: jnp.ones(63)}, rf"'{name}' .* has shape \(63,\); expected \("),
        (right | {odd: jnp.ones((64, 64))}, f"holds '{odd}', which this configuration"),
    ):
        save_file(tensors, checkpoint / "model.safetensors")
        with pytest.raises(ValueError, match=sentence):
            load(checkpoint)


BROKEN = {
    "cut off": (
        lambda at: (at / "model.safetensors").write_bytes((at / "model.safetensors").read_bytes()[:1000]),
        "cannot be read as safetensors",
    ),
    "shard elsewhere": (
        lambda at: index(at, {"weight_map": {"a": "../a.safetensors"}}),
        "shards lie beside it, without a path",
    ),
    "tensor in two shards": (
        lambda at: shard(at, ["model.norm.weight", NORM], [NORM]),
        r"'model.layers.1.* is in a.safetensors and in b.safetensors; expected once",
    ),
    **{
        f"index {said}": (lambda at, said=said: index(at, said), r"model.safetensors.index.json")
        for said in ([], {}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": {"a": "b\0"}})
    },
    "fewer layers": (lambda at: reconfigure(at, num_hidden_layers=1), "has no place for"),
    "no table": (lambda at: (at / "config.json").write_text("[]"), "is not accepted: expected `object`, got `array`"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_checkpoint_is_refused_with_a_sentence(case, checkpoint):
    change, sentence = BROKEN[case]
    change(checkpoint)
    with pytest.raises(CheckpointError, match=sentence):
        load(checkpoint)


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
