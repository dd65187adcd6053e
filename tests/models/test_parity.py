"""The same checkpoint opened here and by transformers: every family, and every scaling of RoPE.

Weights are drawn large in queries, keys and routers, else softmax is uniform and no mistake in them shows; the original
length of scaled RoPE is at most 64, else no short test sees the scaling. Every mistake that was ever made in loading a
Llama is made here once more, and has to be seen. Meta's own form: test_meta.py.
"""

import inspect
import json
import re
import sys

import numpy as np
import pytest

from attnsuite.models import CheckpointError, RopeScaling, Transformer, convert, load
from attnsuite.models.checkpoint import read_config
from attnsuite.models.huggingface import from_hf
from attnsuite.models.huggingface_keys import HARMLESS, known_keys
from landing import is_landing, swept
from theirs import CALL, TOLERANCE, assert_agrees, config_of, distance, drawn, their_logits, torch, transformers

pytestmark = pytest.mark.llama

LENGTH = 24
SIZES = {"vocab_size": 67, "hidden_size": 48, "intermediate_size": 40, "max_position_embeddings": 512}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
TOKENS = np.random.default_rng(7).integers(0, SIZES["vocab_size"], (2, LENGTH))
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 8}
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}
GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 5, "final_logit_softcapping": 3.0}
EXPERTS = {"num_experts_per_tok": 2, "sliding_window": None}
SCALED = "factor32-sharded-old-keys"
# Name -> the class, and what differs from SIZES.
GRID = {
    "gqa": ("Llama", {}),
    "tied-factor8": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3 | {"factor": 8.0}}),
    SCALED: ("Llama", {"rope_parameters": LLAMA3 | {"factor": 32.0}, "rms_norm_eps": 1e-5}),
    "mqa-head-dim-22": ("Llama", {"num_key_value_heads": 1, "head_dim": 22}),
    "biases": ("Llama", {"attention_bias": True}),
    "mistral-yarn": (
        "Mistral",
        {"sliding_window": 7, "head_dim": 16, "rope_parameters": YARN | {"beta_fast": 4.0, "beta_slow": 0.5}},
    ),
    "mistral-no-window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2-window-yarn-of-deepseek": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
        | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.3}},
    ),
    "qwen3-linear": ("Qwen3", {"head_dim": 24, "rope_parameters": LINEAR}),
    "gemma2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3", GEMMA | {"num_hidden_layers": 3, "sliding_window_pattern": 3}),
    "phi3": ("Phi3", {"sliding_window": 6}),
    "olmo2": ("Olmo2", {}),
    "mixtral": ("Mixtral", EXPERTS | {"num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3Moe",
        EXPERTS | {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 12, "norm_topk_prob": False},
    ),
    "gpt_oss": (
        "GptOss",
        {"num_experts_per_tok": 2, "num_local_experts": 4, "head_dim": 12, "sliding_window": 5}
        | {"rope_parameters": YARN | {"truncate": False}},
    ),
}
# The type under which a model is written again, where it is not that of its class.
WRITTEN = {"mistral-no-window": "llama", "gemma3": "gemma3_text", "phi3": "mistral"}
WRITTEN |= dict.fromkeys(("mixtral", "qwen3_moe", "gpt_oss"), "attention_suite")
# With each feature that a cache could forget: sinks, experts, windows, scaled RoPE. The others scale it in other ways.
CACHED = (SCALED, "gemma3", "gpt_oss")
FIRST = (*CACHED, "qwen2-window-yarn-of-deepseek", "qwen3-linear")


def theirs(name):
    """A model of transformers whose attention and routing are far from uniform, in eval mode and float32."""
    kind, changes = GRID[name]
    return drawn(kind, config_of(kind, **SIZES | changes), len(name), _scale)


def _scale(name):
    if name.endswith((".bias", "_bias", ".sinks")):
        return 0.5
    if any(part in name for part in ("q_proj", "k_proj", "qkv_proj", "gate.weight", "router")):
        return 0.3
    return 0.15 if "layers" in name else None


@pytest.fixture(scope="module", params=swept(GRID, FIRST))
def opened(request, tmp_path_factory):
    """Logits of transformers' model, and the directory in which transformers saved it."""
    name, directory = request.param, tmp_path_factory.mktemp(request.param)
    model = theirs(name)
    model.save_pretrained(directory, max_shard_size="30KB" if "sharded" in name else "5GB")
    if "old-keys" in name:
        spell_as_transformers_4(directory / "config.json")
    return name, their_logits(model, TOKENS), directory


def spell_as_transformers_4(path):
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    path.write_text(json.dumps(config | {"rope_scaling": rope}))


def test_logits_are_those_of_transformers_in_one_pass_and_step_by_step(opened):
    name, expected, directory = opened
    if "sharded" in name:
        assert len(list(directory.glob("*.safetensors"))) > 2
    if is_landing() and name not in CACHED:
        assert distance(load(directory)(TOKENS, **CALL), expected) <= TOLERANCE
    else:
        assert_agrees(load(directory), TOKENS, expected)


def test_what_is_converted_is_the_same_model_here_and_in_transformers(opened, tmp_path):
    name, expected, directory = opened
    config = convert(directory, tmp_path / "out", chunked="sharded" in name)
    assert read_config(tmp_path / "out") == config
    written = json.loads((tmp_path / "out" / "config.json").read_text())["model_type"]
    assert written == WRITTEN.get(name, GRID[name][0].lower())
    if written == "attention_suite":
        assert distance(load(tmp_path / "out")(TOKENS, **CALL), expected) <= TOLERANCE
        return
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", dtype=torch.float32
    )
    # One product in place of Phi-3's fused one rounds in another order.
    assert distance(their_logits(again.eval(), TOKENS), expected) <= (TOLERANCE if name == "phi3" else 1e-7)


def test_dynamic_scaling_grows_step_by_step_as_in_transformers(tmp_path):
    """A cached key keeps the rotation of the step that wrote it, so that one pass gives other logits.

    One layer; the original length is a third of the tokens.
    """
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    changes = {"num_hidden_layers": 1, "max_position_embeddings": 8, "rope_parameters": rope}
    model = drawn("Llama", config_of("Llama", **SIZES | changes), 0, _scale)
    model.save_pretrained(tmp_path)
    ours, memory, steps, their_steps = load(tmp_path), None, [], []
    cache = ours.new_cache(2, LENGTH)
    for step in range(LENGTH):
        with torch.no_grad():
            made = model(torch.from_numpy(TOKENS[:, step : step + 1]), past_key_values=memory, use_cache=True)
        memory = made.past_key_values
        logits, cache = ours.decode(TOKENS[:, step], cache, **CALL)
        steps.append(np.asarray(logits))
        their_steps.append(made.logits[:, 0].numpy())
    assert distance(np.stack(steps), np.stack(their_steps)) <= TOLERANCE
    whole = np.asarray(ours(TOKENS, **CALL))
    assert distance(whole, their_logits(model, TOKENS)) <= TOLERANCE
    assert distance(whole[:, -1], their_steps[-1]) > 20 * TOLERANCE


@pytest.mark.parametrize("dtype", swept(("bfloat16", "float16"), ("bfloat16",)))
def test_half_precision_weights_are_read_as_they_are(dtype, tmp_path):
    model = theirs("gqa").to(getattr(torch, dtype))
    model.save_pretrained(tmp_path)
    rounded = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    expected = their_logits(rounded.eval(), TOKENS)  # .float() would keep RoPE's frequencies in half precision
    assert distance(load(tmp_path, dtype="float32")(TOKENS, **CALL), expected) <= TOLERANCE
    assert load(tmp_path).config.param_dtype == dtype


def interleaved(layer, *names):
    """Rows of heads of 12 as Meta has them: the inverse of what a reader has to do."""
    halves = {name: layer[name].reshape(-1, 2, 6, layer[name].shape[1]) for name in names}
    return {name: x.swapaxes(1, 2).reshape(layer[name].shape) for name, x in halves.items()}


# What is changed: the weights of each layer, or fields of the configuration.
BUGS = {
    "q/k rows interleaved": (SCALED, lambda layer: interleaved(layer, "q_proj", "k_proj")),
    "only k rows interleaved": (SCALED, lambda layer: interleaved(layer, "k_proj")),
    "gate and up swapped": (SCALED, lambda x: {"gate_proj": x["up_proj"], "up_proj": x["gate_proj"]}),
    "wrong theta": (SCALED, {"rope_theta": 1e4}),
    "no scaling": (SCALED, {"rope_scaling": None}),
    "factor of another model": (SCALED, {"rope_scaling": RopeScaling(factor=8.0, original_max_length=64)}),
    "wrong norm epsilon": (SCALED, {"norm_eps": 1e-6}),
    "no linear scaling": ("qwen3-linear", {"rope_scaling": None}),
    "no YaRN": ("qwen2-window-yarn-of-deepseek", {"rope_scaling": None}),
    "norms from zero": ("gemma2", {"norm_plus_one": False}),
    "no soft cap": ("gemma2", {"logits_soft_cap": None}),
    "scale of head_dim": ("gemma2", {"attention_scale": None}),
    "another activation": ("gpt_oss", {"activation": "silu"}),
    "shares of all experts": ("gpt_oss", {"normalise_experts": False}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("bug", BUGS)
def test_a_known_bug_does_not_stay_within_the_tolerance(bug, tmp_path):
    name, change = BUGS[bug]
    theirs(name).save_pretrained(tmp_path)
    model = load(tmp_path)
    if callable(change):
        params = model.arrays()
        wrong = Transformer(model.config, params | {"layers": [x | change(x) for x in params["layers"]]})
    else:
        wrong = model.with_config(**change)
    assert distance(wrong(TOKENS, **CALL), np.asarray(model(TOKENS, **CALL))) > 20 * TOLERANCE


REFUSED = {
    "another gate": ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
    "layers without experts": (
        "qwen3_moe",
        {"mlp_only_layers": [0]},
        "mlp_only_layers=a list in config.json is not supported; only an empty list is",
    ),
    "another clip": ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit=5.0"),
    "stored as MXFP4": ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config="),
    "no scaling": ("gpt_oss", {"rope_parameters": None}, "lacks rope_scaling; gpt_oss has YaRN"),
    "long RoPE": ("phi3", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type='longrope'"),
    "a part of each head": ("phi3", {"partial_rotary_factor": 0.75}, "partial_rotary_factor=0.75"),
    "a soft cap of attention": ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    "a key of Gemma": ("olmo2", {"query_pre_attn_scalar": 256}, "query_pre_attn_scalar' (256), which is not known"),
    "windows that are not computed": (
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": 5},
        "use_sliding_window=true in config.json is not supported in a qwen3_moe; its windows are not computed here",
    ),
    "one RoPE of two": (
        "gemma3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
        "no full_attention",
    ),
    "two numbers of experts": ("mixtral", {"num_experts": 8}, "num_experts=8 and num_local_experts=4"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_family_has_and_is_not_computed_here_is_refused(case):
    name, change, sentence = REFUSED[case]
    kind, changes = GRID[name]
    said = json.loads(json.dumps(config_of(kind, **SIZES | changes).to_dict(), default=str))
    from_hf(said)
    with pytest.raises(CheckpointError) as error_info:
        from_hf(said | change)
    assert sentence in str(error_info.value)


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in GRID.values()}))
def test_every_key_that_transformers_writes_or_reads_is_known_here(kind):
    """What a new release of transformers reads and this package passes over fails here."""
    config = config_of(kind, **SIZES | ({"sliding_window": 7} if kind == "Mistral" else {}))
    known = known_keys(config.model_type)
    full = json.loads(json.dumps(config.to_dict(), default=str))
    assert not set(full) - known
    assert from_hf(full) == from_hf(json.loads(config.to_json_string(use_diff=True)))
    source = inspect.getsource(sys.modules[getattr(transformers, f"{kind}ForCausalLM").__module__])
    if kind == "Gemma3":  # the rest of the module is about images
        source = source[source.index("class Gemma3RMSNorm") : source.index("class Gemma3MultiModalProjector")]
    read = set(re.findall(r"\bconfig\.([a-z_]+)", source))
    read |= set(re.findall(r"""getattr\((?:self\.)?config, "([a-z_]+)\"""", source))
    # An embedding's row for padding is as it was stored; initial weights, and who computes attention, are no matter of
    # what is computed.
    unread = {"pad_token_id", "initializer_range", "_attn_implementation", "num_hidden_layers", "per_layer_config"}
    assert not read - (known - HARMLESS) - unread
    assert {"rms_norm_eps", "rope_parameters"} <= read
