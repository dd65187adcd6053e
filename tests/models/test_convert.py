"""Converting and reading layer by layer: what is written is what was read, in a layer's memory."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import load_file

from attnsuite.models import ModelConfig, Transformer, convert, load, load_layer, open_checkpoint, save
from attnsuite.models.shards import write_safetensors
from command import code_of
from script import printed

CONFIGS = {
    "tied": ModelConfig.from_preset("debug", num_kv_heads=1, num_layers=3),
    "untied": ModelConfig.from_preset("debug", tie_embeddings=False),
    "qwen2": ModelConfig.from_preset("debug", qkv_bias=True, attention=("global", "sliding"), window_size=4),
    "qwen3": ModelConfig.from_preset("debug", qk_norm=True, head_dim=24, num_kv_heads=1),
    "layernorm": ModelConfig.from_preset("debug", use_rope=False, use_rmsnorm=False, use_swiglu=False, max_length=64),
}
TOKENS = np.random.default_rng(0).integers(0, 256, (3, 17))


def equal(first, second):
    return all(jax.tree.leaves(jax.tree.map(lambda a, b: a.dtype == b.dtype and bool((a == b).all()), first, second)))


# glibc's malloc keeps what was freed under a threshold that rises to 32 MiB, a feed-forward tensor of ``two_depths``:
# which of them it keeps changes from run to run, by up to 0.7 of a layer. A threshold that is set does not rise.
GIVING_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}


@pytest.fixture
def checkpoint(tmp_path):
    save(Transformer(ModelConfig.from_preset("debug", num_layers=3)), tmp_path / "in")
    return tmp_path / "in"


@pytest.mark.parametrize(("name", "chunked"), [(name, name in ("untied", "qwen2", "layernorm")) for name in CONFIGS])
def test_what_is_converted_is_the_same_model(name, chunked, tmp_path):
    model = Transformer(CONFIGS[name])
    save(model, tmp_path / "in")
    assert convert(tmp_path / "in", tmp_path / "out", chunked=chunked) == model.config
    again = load(tmp_path / "out")
    assert again.config == model.config
    assert equal(again.arrays(), model.arrays())
    files = {path.name for path in (tmp_path / "out").glob("*.safetensors")}
    layers = {f"layer-{i:05d}.safetensors" for i in range(model.config.num_layers)}
    assert files == ({"outer.safetensors", *layers} if chunked else {"model.safetensors"})


@pytest.mark.parametrize("chunked", [False, True], ids=["one-file", "chunked"])
def test_a_layer_is_read_alone_as_it_stands_in_the_whole(chunked, checkpoint, tmp_path):
    convert(checkpoint, tmp_path / "out", chunked=chunked)
    whole = load(checkpoint).arrays()
    for i in range(3):
        assert equal(load_layer(tmp_path / "out", i), whole["layers"][i])
    assert not equal(load_layer(tmp_path / "out", 0), whole["layers"][1])
    opened = open_checkpoint(tmp_path / "out")
    assert set(opened.outer()) == {"embed_tokens", "norm"}
    assert set(opened.outer("norm")) == {"norm"}
    for index in (3, -1):
        with pytest.raises(ValueError, match=rf"layer {index} does not exist; this checkpoint has layers 0 to 2"):
            load_layer(checkpoint, index)


def test_a_layer_is_read_from_its_own_file_only(checkpoint, tmp_path):
    convert(checkpoint, tmp_path / "out", chunked=True)
    opened = open_checkpoint(tmp_path / "out")
    (tmp_path / "out" / "layer-00002.safetensors").unlink()
    opened.layer(1)
    with pytest.raises(ValueError, match=r"layer-00002.safetensors' cannot be read"):
        opened.layer(2)


def test_the_dtype_can_be_changed(checkpoint, tmp_path):
    convert(checkpoint, tmp_path / "out", dtype="bfloat16", chunked=True)
    stored = load_file(tmp_path / "out" / "layer-00001.safetensors")
    assert {x.dtype for x in stored.values()} == {jnp.dtype("bfloat16")}
    rounded = load(checkpoint, param_dtype="bfloat16", dtype="bfloat16")
    again = load(tmp_path / "out")
    assert again.config == rounded.config
    assert equal(again.arrays(), rounded.arrays())


def test_tokenizer_files_come_along(checkpoint, tmp_path):
    (checkpoint / "tokenizer.json").write_text("{}")
    convert(checkpoint, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_an_interrupted_conversion_is_no_checkpoint(checkpoint, tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("attnsuite.models.weights.to_hf", fail)
    with pytest.raises(ValueError, match="cannot be written to: No space left on device"):
        convert(checkpoint, tmp_path / "out")
    with pytest.raises(ValueError, match=r"config.json' cannot be read"):
        load(tmp_path / "out")


def test_the_writer_refuses_what_was_not_announced(tmp_path):
    values = [("a", np.zeros((2, 3), np.float32))]
    with pytest.raises(ValueError, match=r"'a' is float32\[2, 3\]; expected float32\[3, 2\]"):
        write_safetensors(tmp_path / "x.safetensors", {"a": (3, 2)}, "float32", values)
    with pytest.raises(ValueError, match=r"expected float16\[2, 3\]"):
        write_safetensors(tmp_path / "x.safetensors", {"a": (2, 3)}, "float16", values)
    assert not list(tmp_path.iterdir())


def test_the_command_converts_and_says_what_it_wrote(checkpoint, capsys):
    assert code_of("convert", "--input", checkpoint, "--dtype", "float16", "--quantize", "none", "--chunked") == 0
    output = checkpoint.with_name("in-converted")
    assert capsys.readouterr().out == f"165,056 parameters, float16: {output}\n"
    assert load(output).config.param_dtype == "float16"


def test_a_preset_beside_what_says_its_own_scaling_is_refused(tmp_path, capsys):
    save(Transformer(ModelConfig.from_preset("debug")), tmp_path / "in")
    for given in (str(tmp_path / "in"), "debug"):
        assert code_of("convert", "--input", given, "--output", tmp_path / "out", "--preset", "llama-3.2-1b") == 2
        assert f"{given} says its own" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_preset_is_written_with_random_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert code_of("convert", "--input", "debug", "--output", "out", "--dtype", "bfloat16", "--chunked") == 0
    assert "random parameters, bfloat16: out" in capsys.readouterr().out
    model = load(tmp_path / "out")
    assert model.config == ModelConfig.from_preset("debug", dtype="bfloat16", param_dtype="bfloat16")
    layer = jax.tree.map(lambda x: np.asarray(x, np.float32), model.arrays()["layers"][1])
    assert set(layer["input_layernorm"].tolist()) == {1.0}
    assert layer["up_proj"].std() == pytest.approx(0.02, rel=0.05)
    assert len({tuple(row) for row in layer["up_proj"].tolist()}) == len(layer["up_proj"])
    assert np.isfinite(model(TOKENS, backend="standard")).all()


GROWTH = """
import sys
from attnsuite import models
from attnsuite.suite.measure.memory import high_water, mark_baseline
call, output, *sources = sys.argv[1:]
first = mark_baseline()
for number, source in enumerate(sources):
    mark_baseline()
    kept = models.load(source) if call == "load" else models.convert(source, output + str(number), dtype="float16")
    print(high_water(first))
    del kept
"""


@pytest.mark.thorough
def test_converting_takes_no_more_memory_for_more_layers_and_loading_does(two_depths, tmp_path):
    sources, layer = two_depths
    more = {}
    for call in ("convert", "load"):
        shallow, deep = map(int, printed(GROWTH, call, tmp_path / call, *sources, **GIVING_BACK).split())
        more[call] = (deep - shallow) / layer
    assert more["convert"] < 0.2, more
    assert more["load"] > 2.8, more  # three layers more


def test_config_json_is_written_last(checkpoint, tmp_path):
    convert(checkpoint, tmp_path / "out", chunked=True)
    newest = max((tmp_path / "out").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert newest.name == "config.json"
    assert json.loads(newest.read_text())["model_type"] == "llama"
