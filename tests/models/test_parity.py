"""The same checkpoint opened here and by transformers, and Meta's own form against Meta's arithmetic.

Weights are drawn large in queries and keys, else softmax is uniform and no mistake in them shows; the original
length of scaled RoPE is 64, else no short test sees the scaling. Every mistake that was ever made in loading a
Llama is made here once more, and has to be seen.
"""

import importlib
import inspect
import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file

from attnsuite.models import CheckpointError, ModelConfig, RopeScaling, Transformer, convert, generate, load
from landing import swept
from theirs import TOLERANCE, distance, drawn, their_logits, torch, transformers

pytestmark = pytest.mark.llama

LENGTH = 24
SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}


def llama3(factor):
    return {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }


GRID = {
    "gqa": ("Llama", {}),
    "tied-factor8": ("Llama", {"tie_word_embeddings": True, "rope_parameters": llama3(8.0)}),
    "factor32-sharded-old-keys": ("Llama", {"rope_parameters": llama3(32.0), "rms_norm_eps": 1e-5}),
    "mqa-head-dim-22": ("Llama", {"num_key_value_heads": 1, "head_dim": 22}),
    "biases": ("Llama", {"attention_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 7, "head_dim": 16}),
    "mistral-no-window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 24, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
}
TOKENS = np.random.default_rng(7).integers(0, SIZES["vocab_size"], (2, LENGTH))


def theirs(name):
    """A model of transformers whose attention is far from uniform, in eval mode and float32."""
    kind, changes = GRID[name]
    return drawn(kind, getattr(transformers, f"{kind}Config")(**SIZES | changes), len(name), _scale)


def _scale(name):
    if name.endswith(".bias"):
        return 0.5
    return 0.25 if "q_proj" in name or "k_proj" in name else 0.1 if "layers" in name else None


@pytest.fixture(scope="module", params=swept(GRID, ("factor32-sharded-old-keys", "qwen2-window", "qwen3")))
def opened(request, tmp_path_factory):
    """transformers' model, its logits, and the directory in which transformers saved it."""
    name, directory = request.param, tmp_path_factory.mktemp(request.param)
    model = theirs(name)
    model.save_pretrained(directory, max_shard_size="30KB" if "sharded" in name else "5GB")
    if "old-keys" in name:
        spell_as_transformers_4(directory / "config.json")
    return name, model, their_logits(model, TOKENS), directory


def spell_as_transformers_4(path):
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    path.write_text(json.dumps(config | {"rope_scaling": rope}))


def every_way(model):
    """Logits of TOKENS from one pass, and from a cache: of the first ten in one call, of the others one by one."""
    call = {"backend": "standard"}
    yield "full", model(TOKENS, **call)
    first, cache = model.prefill(TOKENS[:, :10], model.new_cache(2, LENGTH + 3), **call)
    parts = [np.asarray(first)]
    for step in range(10, LENGTH):
        logits, cache = model.decode(TOKENS[:, step], cache, **call)
        parts.append(np.asarray(logits)[:, None])
    yield "cached", np.concatenate(parts, axis=1)


def test_logits_are_those_of_transformers_in_one_pass_and_step_by_step(opened):
    name, _, expected, directory = opened
    if "sharded" in name:
        assert len(list(directory.glob("*.safetensors"))) > 2
    for way, logits in every_way(load(directory)):
        assert distance(logits, expected) <= TOLERANCE, way


def test_the_next_32_tokens_are_those_of_transformers(opened):
    _, model, _, directory = opened
    prompt = TOKENS[:1, :12]
    with torch.no_grad():
        made = model.generate(torch.from_numpy(prompt), max_new_tokens=32, min_new_tokens=32, do_sample=False)
    assert generate(load(directory), prompt, 32, backend="standard").tolist() == made[:, 12:].tolist()


def test_what_is_converted_opens_in_transformers_as_the_same_model(opened, tmp_path):
    name, _, expected, directory = opened
    convert(directory, tmp_path / "out", chunked="gqa" in name)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", dtype=torch.float32
    )
    assert distance(their_logits(again.eval(), TOKENS), expected) <= 1e-7
    assert type(again).__name__ == f"{GRID[name][0]}ForCausalLM" or name in ("mistral-no-window", "biases")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_weights_are_read_as_they_are(dtype, tmp_path):
    model = theirs("gqa").to(getattr(torch, dtype))
    model.save_pretrained(tmp_path)
    rounded = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    expected = their_logits(rounded.eval(), TOKENS)  # .float() would keep RoPE's frequencies in half precision
    assert distance(load(tmp_path, dtype="float32")(TOKENS, backend="standard"), expected) <= TOLERANCE
    assert load(tmp_path).config.param_dtype == dtype


def interleaved(weight, head_dim):
    """Rows as Meta has them: the inverse of what a reader has to do."""
    halves = weight.reshape(-1, 2, head_dim // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def with_layers(model, change):
    params = model.arrays()
    return Transformer(model.config, {**params, "layers": [{**layer, **change(layer)} for layer in params["layers"]]})


BUGS = {
    "q/k rows interleaved": lambda m: with_layers(
        m, lambda layer: {n: interleaved(layer[n], m.config.dim) for n in ("q_proj", "k_proj")}
    ),
    "only k rows interleaved": lambda m: with_layers(
        m, lambda layer: {"k_proj": interleaved(layer["k_proj"], m.config.dim)}
    ),
    "gate and up swapped": lambda m: with_layers(
        m, lambda layer: {"gate_proj": layer["up_proj"], "up_proj": layer["gate_proj"]}
    ),
    "wrong theta": lambda m: m.with_config(rope_theta=1e4),
    "no scaling": lambda m: m.with_config(rope_scaling=None),
    "factor of another model": lambda m: m.with_config(rope_scaling=RopeScaling(factor=8.0, original_max_length=64)),
    "wrong norm epsilon": lambda m: m.with_config(norm_eps=1e-6),
}


@pytest.mark.thorough
@pytest.mark.parametrize("bug", BUGS)
def test_a_known_bug_does_not_stay_within_the_tolerance(bug, tmp_path_factory):
    directory = tmp_path_factory.getbasetemp() / "bugs"
    if not directory.is_dir():
        theirs("factor32-sharded-old-keys").save_pretrained(directory)
    model = load(directory)
    right = np.asarray(model(TOKENS, backend="standard"))
    assert distance(BUGS[bug](model)(TOKENS, backend="standard"), right) > 20 * TOLERANCE


def meta_logits(state, params, scaling):
    """Meta's arithmetic (llama-models, models/llama3/model.py): pairs of neighbours turned as complex numbers."""
    heads, dim = params["n_heads"], params["dim"] // params["n_heads"]
    frequencies = params["rope_theta"] ** -(torch.arange(0, dim, 2).double() / dim)
    if scaling is not None:
        turns = scaling.original_max_length * frequencies / (2 * torch.pi)
        smooth = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
        frequencies = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    phase = torch.polar(torch.ones(LENGTH, dim // 2).double(), torch.arange(LENGTH)[:, None] * frequencies)

    def norm(name, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + params["norm_eps"]) * state[name].double()

    def heads_of(x, weight):
        return (x @ state[weight].double().T).reshape(*x.shape[:2], -1, dim)

    def turn(x):
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
        return torch.view_as_real(pairs * phase[None, :, None]).flatten(3)

    x = state["tok_embeddings.weight"].double()[torch.from_numpy(TOKENS)]
    hidden = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)
    for i in range(params["n_layers"]):
        at = f"layers.{i}."
        h = norm(at + "attention_norm.weight", x)
        q, k, v = (heads_of(h, f"{at}attention.w{n}.weight") for n in "qkv")
        k, v = (y.repeat_interleave(heads // y.shape[2], 2) for y in (turn(k), v))
        scores = torch.einsum("btnd,bsnd->bnts", turn(q), k) / dim**0.5 + hidden
        mixed = torch.einsum("bnts,bsnd->btnd", scores.softmax(-1), v).flatten(2)
        x = x + mixed @ state[at + "attention.wo.weight"].double().T
        h = norm(at + "ffn_norm.weight", x)
        w1, w2, w3 = (state[f"{at}feed_forward.w{n}.weight"].double() for n in "123")
        x = x + (torch.nn.functional.silu(h @ w1.T) * (h @ w3.T)) @ w2.T
    return (norm("norm.weight", x) @ state["output.weight"].double().T).numpy()


META = {"dim": 48, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 132, "norm_eps": 1e-5}
META |= {"multiple_of": 16, "ffn_dim_multiplier": 1.3, "rope_theta": 500000.0}


def meta_state(tied=False):
    torch.manual_seed(3)
    shapes = {"tok_embeddings.weight": (132, 48), "norm.weight": (48,), "output.weight": (132, 48)}
    for i in range(2):
        names = {"wq": (48, 48), "wk": (24, 48), "wv": (24, 48), "wo": (48, 48)}
        shapes |= {f"layers.{i}.attention.{n}.weight": shape for n, shape in names.items()}
        shapes |= {f"layers.{i}.feed_forward.{n}.weight": (80, 48) for n in ("w1", "w3")}
        shapes |= {f"layers.{i}.feed_forward.w2.weight": (48, 80)}
        shapes |= {f"layers.{i}.{n}.weight": (48,) for n in ("attention_norm", "ffn_norm")}
    scales = {"tok_embeddings.weight": 0.02, "output.weight": 0.1}
    state = {n: torch.randn(s) * scales.get(n, 0.25 if n[-9:-7] in ("wq", "wk") else 0.1) for n, s in shapes.items()}
    state |= {n: 1 + 3 * w for n, w in state.items() if n.endswith("norm.weight")}
    if tied:
        state["output.weight"] = state["tok_embeddings.weight"].clone()
    return state


def write_meta(directory, state, params, ranks=1, embedding_axis=0):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "params.json").write_text(json.dumps(params))
    by_columns = ("wo.weight", "w2.weight", *(("tok_embeddings.weight",) if embedding_axis else ()))
    for rank in range(ranks):
        part = {
            name: w if w.ndim == 1 else w.chunk(ranks, 1 if name.endswith(by_columns) else 0)[rank].clone()
            for name, w in state.items()
        }
        part["rope.freqs"] = torch.ones(6)
        torch.save(part, directory / f"consolidated.{rank:02d}.pth")


@pytest.mark.parametrize(
    ("ranks", "factor", "tied", "embedding_axis"),
    swept([(1, None, False, 0), (1, 8.0, True, 0), (2, 32.0, False, 0), (4, None, False, 1)], [(1, 8.0, True, 0)]),
    ids=["one-file", "tied-factor8", "two-files-factor32", "four-files-llama2"],
)
def test_a_checkpoint_of_meta_means_what_it_means_to_meta(ranks, factor, tied, embedding_axis, tmp_path):
    state, scaling = meta_state(tied), None if factor is None else RopeScaling(factor=factor, original_max_length=64)
    write_meta(tmp_path, state, META | ({} if factor is None else {"use_scaled_rope": True}), ranks, embedding_axis)
    expected = meta_logits(state, META, scaling)
    overrides = {} if scaling is None else {"rope_scaling": scaling}
    model = load(tmp_path, **overrides)
    assert model.config.tie_embeddings == tied
    for way, logits in every_way(model):
        assert distance(logits, expected) <= TOLERANCE, way
    convert(tmp_path, tmp_path / "out", **overrides)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert distance(their_logits(again, TOKENS), expected) <= TOLERANCE
    prompt = torch.from_numpy(TOKENS[:1])
    made = again.generate(prompt, max_new_tokens=32, min_new_tokens=32, do_sample=False)[:, LENGTH:]
    assert generate(model, TOKENS[:1], 32, backend="standard").tolist() == made.tolist()


def test_a_file_that_transformers_saved_with_pytorch_is_the_same_model(tmp_path):
    model = theirs("gqa")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert distance(load(tmp_path)(TOKENS, backend="standard"), their_logits(model, TOKENS)) <= TOLERANCE


@pytest.mark.parametrize("swap", [("w1", "w3"), ("wq", "wk")], ids=" and ".join)
def test_metas_names_are_not_taken_for_one_another(swap, tmp_path):
    state = meta_state()
    state = {n: state[n.replace(swap[0], "?").replace(swap[1], swap[0]).replace("?", swap[1])] for n in state}
    if swap == ("wq", "wk"):  # a swap of other shapes is refused before anything is computed
        write_meta(tmp_path, state, META)
        with pytest.raises(ValueError, match="has shape"):
            load(tmp_path)
        return
    write_meta(tmp_path, state, META)
    expected = meta_logits(meta_state(), META, None)
    assert distance(load(tmp_path)(TOKENS, backend="standard"), expected) > 20 * TOLERANCE


def test_bfloat16_of_meta_is_kept_and_the_sizes_find_the_preset(tmp_path, monkeypatch):
    state = {name: w.bfloat16() for name, w in meta_state().items()}
    write_meta(tmp_path, state, META | {"use_scaled_rope": True})
    with pytest.raises(ValueError, match=r"not by which factor, and no preset has these sizes \(vocab_size 132"):
        load(tmp_path)
    sizes = {"vocab_size": 132, "hidden_size": 48, "intermediate_size": 80, "num_layers": 2, "num_heads": 4}
    preset = sizes | {"num_kv_heads": 2, "rope_scaling": RopeScaling(factor=32.0)}
    monkeypatch.setitem(importlib.import_module("attnsuite.models.config").PRESETS, "mine", preset)
    model = load(tmp_path)
    assert (model.config.rope_scaling, model.config.param_dtype) == (RopeScaling(factor=32.0), "bfloat16")
    convert(tmp_path, tmp_path / "out", dtype="float16")
    assert {x.dtype.name for x in load_file(tmp_path / "out" / "model.safetensors").values()} == {"float16"}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda at: (at / "consolidated.00.pth").write_bytes(b"PK no zip"), "cannot be read as a PyTorch checkpoint"),
        (lambda at: torch.save([torch.ones(1)], at / "consolidated.00.pth"), "does not hold a dictionary of tensors"),
        (
            lambda at: torch.save({"norm.weight": torch.ones(4)}, at / "consolidated.00.pth"),
            "the checkpoint lacks tok_embeddings.weight, layers.0.feed_forward.w1.weight",
        ),
        (
            lambda at: write_meta(at, meta_state(), META | {"moe": 8}),
            r"params.json has 'moe' \(8\), which is not known",
        ),
        (lambda at: write_meta(at, meta_state(), {"dim": 48}), "lacks n_layers, n_heads, norm_eps"),
        (lambda at: write_meta(at, meta_state(), META | {"dim": 64, "n_heads": 8}), "has shape"),
        (lambda at: write_meta(at, meta_state(), META | {"n_layers": 3}), "lacks 'model.layers.2"),
        (
            lambda at: write_meta(at, meta_state() | {"lora.weight": torch.ones(4)}, META),
            "holds 'lora.weight', which this configuration has no place for",
        ),
        (
            lambda at: torch.save({"norm.weight": torch.ones(4)}, at / "consolidated.01.pth"),
            "is not in equal pieces in all of 2 files",
        ),
        (lambda at: write_meta(at, meta_state(), META | {"dim": "48"}), "dim in params.json is not accepted"),
        (lambda at: write_meta(at, meta_state(), META | {"n_layers": 10**18}), "n_layers in params.json is not acc"),
        (lambda at: write_meta(at, meta_state(), META | {"n_kv_heads": 3}), "params.json: num_heads=4 is not a mul"),
    ],
    ids=[
        "no-zip",
        "list",
        "empty",
        "params",
        "no-params",
        "dim",
        "layers",
        "unknown",
        "ranks",
        "type",
        "huge",
        "heads",
    ],
)
def test_a_checkpoint_of_meta_that_does_not_fit_is_refused_with_a_sentence(change, sentence, tmp_path):
    write_meta(tmp_path, meta_state(), META)
    load(tmp_path)
    change(tmp_path)
    with pytest.raises(ValueError, match=sentence):
        load(tmp_path)


WQ = "layers.1.attention.wq.weight"


@pytest.mark.parametrize("dtype", ["float64", "int8", "float8_e4m3fn"])
def test_a_dtype_that_no_weight_of_meta_has_is_refused_by_name(dtype, tmp_path):
    state = meta_state()
    write_meta(tmp_path, state | {WQ: state[WQ].to(getattr(torch, dtype))}, META)
    with pytest.raises(CheckpointError, match=rf"'{WQ}' in consolidated.00.pth is stored as {dtype}; weights are read"):
        load(tmp_path)


def test_a_weight_of_meta_that_is_not_finite_is_refused_by_name(tmp_path):
    state = meta_state()
    state["layers.1.feed_forward.w2.weight"][0, 0] = torch.nan
    write_meta(tmp_path, state, META)
    with pytest.raises(
        CheckpointError, match=r"'model.layers.1.mlp.down_proj.weight' in consolidated.00.pth holds NaN"
    ):
        load(tmp_path)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_every_key_that_transformers_writes_or_reads_is_known_here(family):
    """What a new release of transformers reads and this package passes over fails here."""
    keys = importlib.import_module("attnsuite.models.huggingface_keys")
    config = getattr(transformers, f"{family}Config")()
    known = {*keys.USED, *keys.ONLY, *keys.HARMLESS}
    written = config.to_dict()
    assert not set(written) - known
    folder = importlib.import_module(f"transformers.models.{family.lower()}.modeling_{family.lower()}")
    source = inspect.getsource(folder)
    read = set(re.findall(r"\bconfig\.([a-z_]+)", source))
    read |= set(re.findall(r"""getattr\((?:self\.)?config, "([a-z_]+)\"""", source))
    # An embedding's row for padding is as it was stored; who computes attention is no matter of what is computed.
    assert not read - {*keys.USED, *keys.ONLY} - {"pad_token_id", "_attn_implementation"}
    assert {"rms_norm_eps", "hidden_act", "rope_parameters"} <= read
    sizes = SIZES | ({"sliding_window": 7} if family == "Mistral" else {})
    from_hf = importlib.import_module("attnsuite.models.huggingface").from_hf
    small = type(config)(**sizes)
    diff = json.loads(small.to_json_string(use_diff=True))
    full = json.loads(json.dumps(small.to_dict(), default=str))
    assert from_hf(full) == from_hf(diff)


def test_the_configurations_here_are_what_transformers_reads():
    config = ModelConfig.from_preset(
        "debug", qkv_bias=True, num_layers=3, attention=("global", "sliding", "sliding"), window_size=4
    )
    written = importlib.import_module("attnsuite.models.huggingface").to_hf(config)
    read = transformers.Qwen2Config.from_dict(written)
    assert read.layer_types == ["full_attention", "sliding_attention", "sliding_attention"]
    assert read.sliding_window == 4
