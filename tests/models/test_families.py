"""Families beside Llama's, and every RoPE scaling, opened here and by transformers; see test_parity.py."""

import importlib
import inspect
import json
import re

import numpy as np
import pytest

from attnsuite.models import CheckpointError, convert, load
from attnsuite.models.checkpoint import read_config
from attnsuite.models.huggingface import from_hf, to_hf
from attnsuite.models.huggingface_keys import known_keys
from attnsuite.models.rope import inverse_frequencies
from landing import swept
from theirs import TOLERANCE, distance, drawn, their_logits, torch, transformers

pytestmark = pytest.mark.llama

LENGTH = 24
SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
TOKENS = np.random.default_rng(7).integers(0, SIZES["vocab_size"], (2, LENGTH))
GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 5, "final_logit_softcapping": 3.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 8}
EXPERTS = {"num_experts_per_tok": 2, "sliding_window": None}
# Name -> the class, what differs from SIZES, and the type under which it is written again.
FAMILIES = {
    "gemma2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 2.0}, "gemma2"),
    "gemma3": ("Gemma3", GEMMA | {"num_hidden_layers": 3, "sliding_window_pattern": 3}, "gemma3_text"),
    "phi3": ("Phi3", {"sliding_window": 6}, "mistral"),
    "olmo2": ("Olmo2", {}, "olmo2"),
    "mixtral": ("Mixtral", EXPERTS | {"num_local_experts": 4}, "attention_suite"),
    "qwen3_moe": (
        "Qwen3Moe",
        EXPERTS | {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 12, "norm_topk_prob": False},
        "attention_suite",
    ),
    "gpt_oss": (
        "GptOss",
        {"num_experts_per_tok": 2, "num_local_experts": 4, "head_dim": 12, "sliding_window": 5}
        | {"rope_parameters": YARN | {"truncate": False}},
        "attention_suite",
    ),
}
SCALINGS = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "yarn": YARN | {"beta_fast": 4.0, "beta_slow": 0.5},
    "yarn of DeepSeek": YARN | {"mscale": 0.7, "mscale_all_dim": 0.3},
}


def theirs(kind, changes, seed=0):
    """A model of transformers whose attention and routing are far from uniform, in eval mode and float32."""
    made = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")(**SIZES | changes)
    return drawn(kind, made, seed, _scale)


def _scale(name):
    if name.endswith((".bias", "_bias", ".sinks")):
        return 0.5
    if any(part in name for part in ("q_proj", "k_proj", "qkv_proj", "gate.weight", "router")):
        return 0.3
    return 0.15 if "layers" in name else None


def logits_of(model):
    return np.asarray(model(TOKENS, backend="standard"))


@pytest.fixture(scope="module", params=swept(FAMILIES, ("gemma3", "mixtral", "gpt_oss")))
def opened(request, tmp_path_factory):
    kind, changes, _ = FAMILIES[request.param]
    directory = tmp_path_factory.mktemp(request.param)
    model = theirs(kind, changes)
    model.save_pretrained(directory)
    return request.param, their_logits(model, TOKENS), directory


def test_logits_of_a_family_are_those_of_transformers(opened):
    _, expected, directory = opened
    assert distance(logits_of(load(directory)), expected) <= TOLERANCE


def test_what_is_converted_is_the_same_model_here_and_in_transformers(opened, tmp_path):
    name, expected, directory = opened
    config = convert(directory, tmp_path / "out")
    assert read_config(tmp_path / "out") == config
    written = json.loads((tmp_path / "out" / "config.json").read_text())["model_type"]
    assert written == FAMILIES[name][2]
    if written == "attention_suite":
        assert distance(logits_of(load(tmp_path / "out")), expected) <= TOLERANCE
    else:
        again = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", attn_implementation="eager", dtype=torch.float32
        )
        # One product in place of Phi-3's fused one rounds in another order.
        assert distance(their_logits(again.eval(), TOKENS), expected) <= (TOLERANCE if name == "phi3" else 1e-7)


def test_a_cache_gives_the_logits_of_one_pass_with_sinks_experts_and_alternating_windows(tmp_path):
    """gpt-oss has every feature that a cache could forget: sinks, experts, windows and scaled RoPE."""
    model = theirs(*FAMILIES["gpt_oss"][:2])
    model.save_pretrained(tmp_path)
    expected, ours = their_logits(model, TOKENS), load(tmp_path)
    first, cache = ours.prefill(TOKENS[:, :20], ours.new_cache(2, LENGTH), backend="standard")
    steps = [np.asarray(first)]
    for step in range(20, LENGTH):
        logits, cache = ours.decode(TOKENS[:, step], cache, backend="standard")
        steps.append(np.asarray(logits)[:, None])
    assert distance(np.concatenate(steps, 1), expected) <= TOLERANCE


@pytest.mark.parametrize("name", SCALINGS)
def test_a_scaling_of_rope_is_that_of_transformers_beyond_the_original_length(name, tmp_path):
    """One layer; the original length is 8, a third of the tokens."""
    changes = {"num_hidden_layers": 1, "max_position_embeddings": 8, "rope_parameters": SCALINGS[name]}
    model = theirs("Llama", changes)
    model.save_pretrained(tmp_path)
    expected, ours = their_logits(model, TOKENS), load(tmp_path)
    assert distance(logits_of(ours), expected) <= TOLERANCE
    frequencies = inverse_frequencies(8, 1e4, ours.config.rope_scaling)
    assert name == "dynamic" or np.abs(frequencies / inverse_frequencies(8, 1e4) - 1).max() > 0.1
    assert read_config(tmp_path) == from_hf(to_hf(ours.config))


def test_dynamic_scaling_grows_step_by_step_as_in_transformers(tmp_path):
    """A cached key keeps the rotation of the step that wrote it, so that one pass would give other logits."""
    changes = {"num_hidden_layers": 1, "max_position_embeddings": 8, "rope_parameters": SCALINGS["dynamic"]}
    model = theirs("Llama", changes)
    model.save_pretrained(tmp_path)
    ours, memory, steps, their_steps = load(tmp_path), None, [], []
    cache = ours.new_cache(2, LENGTH)
    for step in range(LENGTH):
        with torch.no_grad():
            made = model(torch.from_numpy(TOKENS[:, step : step + 1]), past_key_values=memory, use_cache=True)
        memory = made.past_key_values
        logits, cache = ours.decode(TOKENS[:, step], cache, backend="standard")
        steps.append(np.asarray(logits))
        their_steps.append(made.logits[:, 0].numpy())
    assert distance(np.stack(steps), np.stack(their_steps)) <= TOLERANCE
    assert distance(logits_of(ours)[:, -1], their_steps[-1]) > 20 * TOLERANCE


MISTAKES = {
    "gemma2": [{"norm_plus_one": False}, {"logits_soft_cap": None}, {"attention_scale": None}],
    "gpt_oss": [{"activation": "silu"}, {"normalise_experts": False}],
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", MISTAKES)
def test_a_part_of_a_family_that_is_left_out_does_not_stay_within_the_tolerance(name, tmp_path):
    model = theirs(*FAMILIES[name][:2])
    model.save_pretrained(tmp_path)
    expected = their_logits(model, TOKENS)
    for mistake in MISTAKES[name]:
        assert distance(logits_of(load(tmp_path, **mistake)), expected) > 20 * TOLERANCE, mistake


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
    kind, changes, _ = FAMILIES[name]
    made = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")(**SIZES | changes)
    said = json.loads(json.dumps(made.to_dict(), default=str))
    from_hf(said)
    with pytest.raises(CheckpointError) as error_info:
        from_hf(said | change)
    assert sentence in str(error_info.value)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_key_that_transformers_reads_of_a_family_is_known_here(name):
    kind = FAMILIES[name][0]
    config = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")()
    module = {"Qwen3Moe": "qwen3_moe", "GptOss": "gpt_oss"}.get(kind, kind.lower())
    source = inspect.getsource(importlib.import_module(f"transformers.models.{module}.modeling_{module}"))
    if kind == "Gemma3":  # the rest of the module is about images
        source = source[source.index("class Gemma3RMSNorm") : source.index("class Gemma3MultiModalProjector")]
    read = set(re.findall(r"\bconfig\.([a-z_]+)", source))
    unread = {"pad_token_id", "_attn_implementation", "num_hidden_layers", "per_layer_config"}
    assert not read - known_keys(config.model_type) - unread
    assert {"rms_norm_eps", "rope_parameters"} <= read
