"""The keys that a ``config.json`` of Hugging Face may have: an allow-list.

Three kinds of keys are accepted: keys that are used, keys that change nothing, and keys whose only accepted values are
those that this transformer computes. null stands for a missing key. Every other key is refused, since an unknown key
may change the computation. The lists are those of transformers 5 and 4 for Llama, Mistral, Qwen2 and Qwen3
(``configuration_*.py``, ``configuration_utils.py``, ``generation/configuration_utils.py``) and of checkpoints that were
published with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from attnsuite.sentences import given

from .config import MOST_LAYERS
from .reading import CheckpointError, checked, refuse_other_values, refuse_unknown

CONFIG = "config.json"
OWN_TYPE = "attention_suite"


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


class OwnFields(msgspec.Struct, kw_only=True):
    """Fields of ``ModelConfig`` that only a configuration of this project's own type has."""

    attention: str | tuple[str, ...] = "global"
    window_size: int | None = None
    chunk_size: int | None = None
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    use_rope: bool = True
    use_rmsnorm: bool = True
    use_swiglu: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False


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
    attention_suite: OwnFields | None = None


# The defaults of a type that differ from those above.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    OWN_TYPE: {},
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
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


def read_fields(config: Mapping[str, Any]) -> Fields:
    """The keys of a ``config.json`` that are used. Raises CheckpointError for what the lists above do not hold."""
    model_type = config.get("model_type")
    if model_type not in [*DEFAULTS]:  # a list, because the value may not be hashable
        raise CheckpointError(
            f"model_type={given(model_type)} in {CONFIG} is not supported; use one of {', '.join(DEFAULTS)}."
        )
    said = {key: value for key, value in {**DEFAULTS[model_type], **config}.items() if value is not None}
    refuse_other_values(said, ONLY, CONFIG)
    refuse_unknown(said, {*Fields.__struct_fields__, *ONLY, *HARMLESS}, CONFIG)
    for key, kind in (("rope_scaling", RopeFields), ("rope_parameters", RopeFields), (OWN_TYPE, OwnFields)):
        if isinstance(said.get(key), Mapping):
            said[key] = {name: value for name, value in said[key].items() if value is not None}
            refuse_unknown(said[key], kind.__struct_encode_fields__, f"{key} in {CONFIG}")
    missing = [name for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                                 "num_attention_heads") if name not in said]  # fmt: skip
    if missing:
        raise CheckpointError(f"{CONFIG} lacks {', '.join(missing)}; a configuration of this type has it.")
    return checked(said, Fields, CONFIG)
