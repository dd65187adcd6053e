"""Meta's own form of a checkpoint against Meta's arithmetic, and as transformers opens it when it is converted."""

import importlib
import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file

from attnsuite.models import CheckpointError, RopeScaling, convert, generate, load
from landing import swept
from theirs import CALL, TOLERANCE, assert_agrees, config_of, distance, drawn, their_logits, torch, transformers

pytestmark = pytest.mark.llama

LENGTH = 24
TOKENS = np.random.default_rng(7).integers(0, 132, (2, LENGTH))


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
    assert_agrees(model, TOKENS, expected)
    convert(tmp_path, tmp_path / "out", **overrides)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert distance(their_logits(again, TOKENS), expected) <= TOLERANCE
    prompt = torch.from_numpy(TOKENS[:1])
    made = again.generate(prompt, max_new_tokens=32, min_new_tokens=32, do_sample=False)[:, LENGTH:]
    assert generate(model, TOKENS[:1], 32, **CALL).tolist() == made.tolist()


def test_a_file_that_transformers_saved_with_pytorch_is_the_same_model(tmp_path):
    sizes = {"vocab_size": 132, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 1}
    config = config_of("Llama", **sizes, num_attention_heads=4, num_key_value_heads=2)
    model = drawn("Llama", config, 0, lambda _: 0.1)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert distance(load(tmp_path)(TOKENS, **CALL), their_logits(model, TOKENS)) <= TOLERANCE


def test_metas_names_are_not_taken_for_one_another(tmp_path):
    other = {"w1": "w3", "w3": "w1"}
    state = {re.sub(r"\bw[13]\b", lambda found: other[found[0]], name): x for name, x in meta_state().items()}
    write_meta(tmp_path, state, META)
    assert distance(load(tmp_path)(TOKENS, **CALL), meta_logits(meta_state(), META, None)) > 20 * TOLERANCE


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


def changed(name, change):
    """Writes a checkpoint in which one weight is another."""
    return lambda at: write_meta(at, meta_state() | {name: change(meta_state().get(name))}, META)


def saved(value, file="consolidated.00.pth"):
    return lambda at: torch.save(value, at / file)


WQ, DOWN = "layers.1.attention.wq.weight", "layers.1.feed_forward.w2.weight"
REFUSED = {
    "no zip": (lambda at: (at / "consolidated.00.pth").write_bytes(b"PK no zip"), "cannot be read as a PyTorch check"),
    "list": (saved([torch.ones(1)]), "does not hold a dictionary of tensors"),
    "empty": (
        saved({"norm.weight": torch.ones(4)}),
        "the checkpoint lacks tok_embeddings.weight, layers.0.feed_forward.w1.weight",
    ),
    "ranks": (
        saved({"norm.weight": torch.ones(4)}, "consolidated.01.pth"),
        "is not in equal pieces in all of 2 files",
    ),
    "unknown": (
        changed("lora.weight", lambda _: torch.ones(4)),
        "holds 'lora.weight', which this configuration has no place for",
    ),
    "shape": (changed(WQ, lambda _: torch.ones(24, 48)), "has shape"),
    "NaN": (
        changed(DOWN, lambda x: x.index_fill(0, torch.tensor([0]), torch.nan)),
        "'model.layers.1.mlp.down_proj.weight' in consolidated.00.pth holds NaN",
    ),
    **{
        dtype: (
            changed(WQ, lambda x, dtype=dtype: x.to(getattr(torch, dtype))),
            f"'{WQ}' in consolidated.00.pth is stored as {dtype}; weights are read",
        )
        for dtype in ("float64", "int8", "float8_e4m3fn")
    },
}
# Of params.json: what it holds.
REFUSED |= {
    f"params {number}": (lambda at, params=params: write_meta(at, meta_state(), params), sentence)
    for number, (params, sentence) in enumerate(
        [
            (META | {"moe": 8}, r"params.json has 'moe' \(8\), which is not known"),
            ({"dim": 48}, "lacks n_layers, n_heads, norm_eps"),
            (META | {"dim": 64, "n_heads": 8}, "has shape"),
            (META | {"n_layers": 3}, "lacks 'model.layers.2"),
            (META | {"dim": "48"}, "dim in params.json is not accepted"),
            (META | {"n_layers": 10**18}, "n_layers in params.json is not acc"),
            (META | {"n_kv_heads": 3}, "params.json: num_heads=4 is not a mul"),
        ]
    )
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_checkpoint_of_meta_that_does_not_fit_is_refused_with_a_sentence(case, tmp_path):
    change, sentence = REFUSED[case]
    write_meta(tmp_path, meta_state(), META)
    change(tmp_path)
    with pytest.raises(CheckpointError, match=sentence):
        load(tmp_path)
