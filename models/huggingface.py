"""``config.json`` as Hugging Face writes it, to and from a :class:`~models.config.ModelConfig`.

Llama, Mistral, Qwen2 and Qwen3 are one transformer under four names: they differ in which projections have a
bias, whether queries and keys are normalised, and which layers see a window. Both spellings of RoPE are read:
``rope_parameters`` (transformers 5) and ``rope_theta`` with ``rope_scaling`` (4). What this transformer does
not compute is refused with a sentence, never ignored. A configuration that none of the four can express (an
ablation switch, other attention) is written under ``model_type: attention_suite``, so that no other program
opens it and computes something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.config import DTYPES, AttentionType, ModelConfig, RopeScaling

OWN_TYPE = "attention_suite"
_OWN_FIELDS = (
    "attention",
    "window_size",
    "chunk_size",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "use_rope",
    "use_rmsnorm",
    "use_swiglu",
    "qkv_bias",
    "output_bias",
    "qk_norm",
)
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# What a missing key means there, where it is not what a missing field means here.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    OWN_TYPE: {},
}
# A key of a config.json that changes what is computed -> the only value computed here.
_ONLY_VALUES: dict[str, Any] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
_LAYER_TYPES: dict[str, AttentionType] = {"full_attention": "global", "sliding_attention": "sliding"}


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Read the fields of a ``config.json``. Raises ValueError for a missing key or an unsupported value."""
    model_type = config.get("model_type")
    if model_type not in _DEFAULTS:
        raise ValueError(
            f"model_type={model_type!r} in config.json is not supported; use one of {', '.join(_DEFAULTS)}."
        )
    for key, only in _ONLY_VALUES.items():
        if config.get(key, only) not in (only, None):
            raise ValueError(f"{key}={config[key]!r} in config.json is not supported; only {only!r} is.")
    config = {**_DEFAULTS[model_type], **config}
    theta, scaling = _rope(config)
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    if stored not in DTYPES:
        raise ValueError(f"dtype={stored!r} in config.json is not supported; use one of {', '.join(DTYPES)}.")
    return ModelConfig(
        vocab_size=_required(config, "vocab_size"),
        hidden_size=_required(config, "hidden_size"),
        intermediate_size=_required(config, "intermediate_size"),
        num_layers=_required(config, "num_hidden_layers"),
        num_heads=_required(config, "num_attention_heads"),
        num_kv_heads=config.get("num_key_value_heads"),
        head_dim=config.get("head_dim"),
        max_length=config.get("max_position_embeddings", 2048),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=config.get("rms_norm_eps", 1e-6),  # Hugging Face's default, not ours
        tie_embeddings=config.get("tie_word_embeddings", False),
        dtype=stored,
        param_dtype=stored,
        **_by_type(model_type, config),
    )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The fields of a ``config.json``, with RoPE in the spelling that transformers 4 and 5 both read."""
    model_type, fields_of_type = _type_of(config)
    fields: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[model_type]] if model_type in _ARCHITECTURES else [],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": config.qkv_bias,
        "mlp_bias": False,
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": config.param_dtype,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if config.rope_scaling is not None:
        fields["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_freq_factor,
            "high_freq_factor": config.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling.original_max_length,
        }
    return fields | fields_of_type


def _by_type(model_type: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields in which the model types differ: biases, norms of queries and keys, windows."""
    if model_type == OWN_TYPE:
        own = dict(config.get(OWN_TYPE) or {})
        unknown = sorted(set(own) - set(_OWN_FIELDS))
        if unknown:
            raise ValueError(
                f"{OWN_TYPE} in config.json has no field {', '.join(unknown)}; it has {', '.join(_OWN_FIELDS)}."
            )
        if isinstance(own.get("attention"), list):
            own["attention"] = tuple(own["attention"])
        return own
    bias = bool(config.get("attention_bias"))
    if model_type in ("mistral", "qwen2") and config.get("attention_bias") not in (None, model_type == "qwen2"):
        raise ValueError(
            f"attention_bias={config['attention_bias']!r} in config.json is not what model_type={model_type!r} means; "
            "leave it out."
        )
    windowed = _windows(model_type, config)
    match model_type:
        case "llama":
            return windowed | {"qkv_bias": bias, "output_bias": bias}
        case "qwen2":
            return windowed | {"qkv_bias": True}
        case "qwen3":
            return windowed | {"qkv_bias": bias, "output_bias": bias, "qk_norm": True}
    return windowed


def _windows(model_type: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers see the last ``sliding_window`` tokens only, itself included; nothing where none does."""
    window, named = config.get("sliding_window"), config.get("layer_types")
    if model_type == "llama":
        if window is not None:
            raise ValueError(f"sliding_window={window!r} in config.json is not supported in a llama; only None is.")
    elif model_type == "mistral" and named is not None:
        raise ValueError("layer_types in config.json is not supported in a mistral; all of its layers are alike.")
    elif model_type in ("qwen2", "qwen3") and not config.get("use_sliding_window"):
        window = None
    if named is None:
        first = config["max_window_layers"] if model_type in ("qwen2", "qwen3") else 0
        named = [
            "sliding_attention" if window is not None and i >= first else "full_attention"
            for i in range(_required(config, "num_hidden_layers"))
        ]
    unknown = [kind for kind in named if kind not in _LAYER_TYPES]
    if unknown:
        raise ValueError(
            f"layer_types={unknown[0]!r} in config.json is not supported; use {' or '.join(_LAYER_TYPES)}."
        )
    types = tuple(_LAYER_TYPES[kind] for kind in named)
    if "sliding" not in types:
        return {}
    if window is None:
        raise ValueError("layer_types in config.json has sliding_attention, but no sliding_window is in use.")
    return {"attention": types if "global" in types else "sliding", "window_size": window}


def _type_of(config: ModelConfig) -> tuple[str, dict[str, Any]]:
    """The model type under which this configuration is written, and the keys that this type has for itself."""
    types = config.attention_types
    is_plain = config.use_rope and config.use_rmsnorm and config.use_swiglu and set(types) <= {"global", "sliding"}
    biases = (config.qkv_bias, config.output_bias)
    names = {ours: theirs for theirs, ours in _LAYER_TYPES.items()}
    if is_plain and types == ("global",) and not config.qk_norm and biases in ((False, False), (True, True)):
        return "llama", {}
    if is_plain and types == ("sliding",) and not config.qk_norm and biases == (False, False):
        return "mistral", {"sliding_window": config.window_size}
    if is_plain and biases in (((False, False), (True, True)) if config.qk_norm else ((True, False),)):
        return "qwen3" if config.qk_norm else "qwen2", {
            "use_sliding_window": "sliding" in types,
            "sliding_window": config.window_size,
            "layer_types": [names[kind] for kind in config.layer_types],
        }
    own = {name: getattr(config, name) for name in _OWN_FIELDS} | {"attention": list(config.layer_types)}
    return OWN_TYPE, {OWN_TYPE: own}


def _required(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise ValueError(f"config.json lacks {key}; a configuration of this type has it.")
    return config[key]


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling from either spelling; ``rope_parameters`` wins where both stand."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor={rope['partial_rotary_factor']!r} is not supported; only 1.0 is.")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"rope_type={kind!r} in config.json is not supported; use 'default' or 'llama3'.")
    names = {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_length",
    }
    missing = [key for key in names if rope.get(key) is None]
    if missing:
        raise ValueError(f"rope scaling 'llama3' in config.json lacks {', '.join(missing)}.")
    return theta, RopeScaling(**{ours: rope[theirs] for theirs, ours in names.items()})
