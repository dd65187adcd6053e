"""The keys that a ``config.json`` of Hugging Face may have: an allow-list.

Three kinds of keys are accepted: keys that are used, keys that change nothing, and keys whose only accepted values are
those that this transformer computes. null stands for a missing key. Every other key is refused, since an unknown key
may change the computation. ``FAMILIES`` has a row for each model type: a key that a Gemma uses is refused in a Llama.
The lists are those of transformers 5 and 4 for these model types (``configuration_*.py``, ``configuration_utils.py``,
``generation/configuration_utils.py``) and of checkpoints that were published with them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, get_type_hints

import msgspec

from attnsuite.sentences import quoted

from .checked_json import CheckpointError, checked, refuse_other_values, refuse_unknown, require_keys
from .config import MOST_LAYERS, ModelConfig

CONFIG = "config.json"
SUITE_TYPE = "attention_suite"


class RopeFields(msgspec.Struct, kw_only=True, rename={"kind": "type"}):
    """``rope_scaling`` (transformers 4) or ``rope_parameters`` (5)."""

    rope_type: str | None = None
    kind: str | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None


# Fields of ModelConfig that have a key of Hugging Face's in every type.
SHARED = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_length": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
_READ_APART = ("rope_theta", "rope_scaling", "dtype", "param_dtype")
_TYPES = get_type_hints(ModelConfig)
# The other fields of ModelConfig, which stand under their names in a configuration of this project's own type.
SuiteFields = msgspec.defstruct(
    "SuiteFields",
    [
        (field.name, _TYPES[field.name], field.default)
        for field in dataclasses.fields(ModelConfig)
        if field.name not in (*SHARED, *_READ_APART)
    ],
    kw_only=True,
)


class Fields(msgspec.Struct, kw_only=True):
    """The keys that are used. A missing or null key has the default, which is Hugging Face's."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: Annotated[int, msgspec.Meta(ge=1, le=MOST_LAYERS)]
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    rope_theta: float = 10000.0
    rope_scaling: RopeFields | None = None
    rope_parameters: RopeFields | None = None
    attention_bias: bool | None = None
    sliding_window: int | None = None
    use_sliding_window: bool | None = None
    max_window_layers: int | None = None
    layer_types: list[str] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    architectures: list[str] | None = None
    attention_suite: SuiteFields | None = None  # pyright: ignore[reportInvalidTypeForm]  (made above)
    # sliding_rope is no key of the file: _split_rope makes it of Gemma 3's rope_parameters. The others are of some
    # families only (Family.keys).
    sliding_rope: RopeFields | None = None
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    sliding_window_pattern: Annotated[int, msgspec.Meta(ge=1)] | None = None
    rope_local_base_freq: float | None = None
    num_experts_per_tok: int | None = None
    num_local_experts: int | None = None
    num_experts: int | None = None
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool = False


# The keys about windows that a type has; the others are refused. Llama's layer_types name no window.
_NO_WINDOW = ("layer_types", "max_window_layers")
_ALIKE = ("sliding_window",)
_NAMED = ("sliding_window", "layer_types")
_UNUSED = ("sliding_window", "layer_types", "max_window_layers")
_CHOSEN = ("sliding_window", "use_sliding_window", "layer_types", "max_window_layers")
WINDOW_REASONS = {
    _ALIKE: "all of its layers are alike",
    _NAMED: "its layer_types say which layers have a window",
    _UNUSED: "its windows are not computed here",
}


class Family(NamedTuple):
    """What one model type means.

    ``fixed`` are the fields of ModelConfig that it decides, ``defaults`` those of its keys that differ from the ones of
    ``Fields``. Only this type has ``keys`` (of Fields), ``only`` (with the values that are computed here; they replace
    those of ONLY) and ``harmless``. Models are written under a type whose ``is_stored_alike`` says that its weights are
    stored under our names.
    """

    architecture: str  # its class in transformers
    windows: tuple[str, ...]
    fixed: Mapping[str, Any] = {}
    defaults: Mapping[str, Any] = {}
    keys: tuple[str, ...] = ()
    only: Mapping[str, tuple[Any, ...]] = {}
    harmless: tuple[str, ...] = ()
    is_stored_alike: bool = True


_NO_BIAS = {"qkv_bias": False, "output_bias": False}
_QWEN = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA = {"norms": "both", "norm_plus_one": True, "scale_embeddings": True, "activation": "gelu_tanh"}
_GEMMA_KEYS = ("query_pre_attn_scalar", "final_logit_softcapping")
_GEMMA_2 = {"num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256, "tie_word_embeddings": True} | {
    "sliding_window": 4096,
    "max_position_embeddings": 8192,
}
_GELU = {"hidden_act": ("gelu_pytorch_tanh",), "hidden_activation": ("gelu_pytorch_tanh",)}
_LONG = {"max_position_embeddings": 131072, "rope_theta": 1000000.0}
_EXPERTS = ("num_experts_per_tok", "num_local_experts", "num_experts")
_ROUTING = {"output_router_logits": (False,), "router_jitter_noise": (0.0,)}  # the noise is that of training
_LOSS = ("router_aux_loss_coef",)
FAMILIES = {
    "llama": Family("LlamaForCausalLM", _NO_WINDOW),
    "mistral": Family("MistralForCausalLM", _ALIKE, _NO_BIAS, {"num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen2": Family("Qwen2ForCausalLM", _CHOSEN, {"qkv_bias": True, "output_bias": False}, _QWEN),
    "qwen3": Family("Qwen3ForCausalLM", _CHOSEN, {"qk_norm": True}, _QWEN | {"head_dim": 128}),
    "phi3": Family(
        "Phi3ForCausalLM", _ALIKE, _NO_BIAS, {"rms_norm_eps": 1e-5}, is_stored_alike=False,
        only={"resid_pdrop": (0.0,), "embd_pdrop": (0.0,)},
        harmless=("original_max_position_embeddings",),  # of longrope alone, which is refused
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM", _NO_WINDOW, {"norms": "after", "qk_norm": True, "qk_norm_over": "projection"},
        {"rms_norm_eps": 1e-5},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM", _NAMED, _GEMMA,
        _GEMMA_2 | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        (*_GEMMA_KEYS, "attn_logit_softcapping"), _GELU, ("cache_implementation",),
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", _NAMED, _GEMMA | {"qk_norm": True},
        _GEMMA_2 | _LONG | {"rope_local_base_freq": 10000.0, "sliding_window_pattern": 6},
        (*_GEMMA_KEYS, "sliding_window_pattern", "rope_local_base_freq"), _GELU,
        ("cache_implementation", "_sliding_window_pattern"),  # transformers writes the latter, unread
    ),
    "mixtral": Family(
        "MixtralForCausalLM", _ALIKE, _NO_BIAS,
        _LONG | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "num_experts_per_tok": 2},
        _EXPERTS, _ROUTING, _LOSS, is_stored_alike=False,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", _UNUSED, {"qk_norm": True},
        {"num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts_per_tok": 8}
        | {"sliding_window": 4096, "max_position_embeddings": 32768},
        (*_EXPERTS, "moe_intermediate_size", "norm_topk_prob"),
        _ROUTING | {"decoder_sparse_step": (1,), "mlp_only_layers": ([],)}, _LOSS, is_stored_alike=False,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM", _NAMED, {"attention_sinks": True, "activation": "clipped_silu", "expert_bias": True},
        {"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "rms_norm_eps": 1e-5}
        | {"num_experts_per_tok": 4, "attention_bias": True, "rope_theta": 150000.0, "max_position_embeddings": 131072},
        _EXPERTS, _ROUTING | {"swiglu_limit": (7.0,), "swiglu_alpha": (1.702,)},
        (*_LOSS, "experts_per_token", "initial_context_length"), is_stored_alike=False,
    ),
    SUITE_TYPE: Family("", _NO_WINDOW, is_stored_alike=False),
}  # fmt: skip
# A key that changes what is computed -> the values with which this transformer computes it (null beside them).
ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "attention_dropout": (0.0,),
    "quantization_config": (),
    "auto_map": ({},),  # names code beside the checkpoint, which would compute the model
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({},),
    "use_bidirectional_attention": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "attention_sinks": (False, 0),
    "attention_chunk_size": (),
    "no_rope_layers": (),
    "clip_qkv": (),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
}
# fmt: off
HARMLESS = frozenset((
    # who wrote it, and how attention is to be computed
    "_name_or_path", "name_or_path", "transformers_version", "_commit_hash", "transformers.js_config",
    "is_llama_config", "unsloth_fixed", "unsloth_version", "torchscript", "use_bfloat16", "tf_legacy_loss",
    "_attn_implementation", "attn_implementation", "_attn_implementation_autoset",
    # what is returned beside the logits, and how the model was made
    "return_dict", "output_hidden_states", "output_attentions", "use_cache", "is_decoder", "initializer_range",
    "pretraining_tp", "chunk_size_feed_forward", "max_sequence_length", "gradient_checkpointing",
    # tasks and tokens
    "problem_type", "id2label", "label2id", "num_labels", "finetuning_task", "task_specific_params", "prefix",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id",
    "tokenizer_class",
    # how tokens are drawn from the logits: transformers takes these to generation_config.json
    "do_sample", "temperature", "top_k", "top_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "max_length",
    "min_length", "num_beams", "num_beam_groups", "num_return_sequences", "early_stopping", "diversity_penalty",
    "length_penalty", "repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens",
    "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty",
    "output_scores", "return_dict_in_generate", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind",
))
# fmt: on


_OF_SOME = {"sliding_rope", *(key for family in FAMILIES.values() for key in family.keys)}
USED = frozenset({*Fields.__struct_encode_fields__} - _OF_SOME)  # of every family


def read_fields(config: Mapping[str, Any]) -> Fields:
    """The keys of a ``config.json`` that are used. Raises CheckpointError for what the lists above do not hold."""
    model_type = config.get("model_type")
    if model_type not in [*FAMILIES]:  # a list, because the value may not be hashable
        raise CheckpointError(
            f"model_type={quoted(model_type)} in {CONFIG} is not supported; use one of {', '.join(FAMILIES)}."
        )
    family = FAMILIES[model_type]
    entries = {key: value for key, value in {**family.defaults, **config}.items() if value is not None}
    only = {key: values for key, values in {**ONLY, **family.only}.items() if key not in family.keys}
    refuse_other_values(entries, only, CONFIG)
    refuse_unknown(entries, known_keys(model_type), CONFIG)
    if model_type == "gemma3_text":
        _split_rope(entries)
    for key in ("rope_scaling", "rope_parameters", "sliding_rope"):
        _check_nested(entries, key, RopeFields)
    _check_nested(entries, SUITE_TYPE, SuiteFields)
    require_keys(entries, Fields, CONFIG, "a configuration of this type has")
    return checked(entries, Fields, CONFIG)


def known_keys(model_type: str) -> frozenset[str]:
    """Every key that a ``config.json`` of this type may have."""
    family = FAMILIES[model_type]
    return USED | HARMLESS | {*ONLY, *family.keys, *family.only, *family.harmless}


def _split_rope(entries: dict[str, Any]) -> None:
    """Make one entry of each part of Gemma 3's ``rope_parameters``, which transformers 5 writes per layer type."""
    rope = entries.get("rope_parameters")
    if isinstance(rope, Mapping) and rope:
        if "full_attention" not in rope:  # transformers does not read it
            raise CheckpointError(
                f"rope_parameters in {CONFIG} of a gemma3_text has no full_attention; give full_attention and "
                "sliding_attention, each with its rope_type and rope_theta."
            )
        refuse_unknown(rope, ("full_attention", "sliding_attention"), f"rope_parameters in {CONFIG}")
        entries["rope_parameters"] = rope["full_attention"]
        entries["sliding_rope"] = rope.get("sliding_attention")


def _check_nested(entries: dict[str, Any], key: str, kind: type[msgspec.Struct]) -> None:
    if isinstance(entries.get(key), Mapping):
        entries[key] = {name: value for name, value in entries[key].items() if value is not None}
        refuse_unknown(entries[key], kind.__struct_encode_fields__, f"{key} in {CONFIG}")
