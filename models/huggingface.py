"""``config.json`` as Hugging Face writes it, to and from a :class:`~models.config.ModelConfig`.

Both spellings of RoPE are read: ``rope_parameters`` (transformers 5) and ``rope_theta`` with
``rope_scaling`` (4). What this transformer does not compute is refused with a sentence, never ignored. A
configuration that Llama cannot express (an ablation switch, attention other than causal) is written under
``model_type: attention_suite``, so that no other program opens it and computes something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.config import DTYPES, ModelConfig, RopeScaling

OWN_TYPE = "attention_suite"
_OWN_FIELDS = ("attention", "window_size", "chunk_size", "use_rope", "use_rmsnorm", "use_swiglu")
# A key of a Llama config.json that changes what is computed -> the only value computed here.
_ONLY_VALUES: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "sliding_window": None,
}


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Read the fields of a ``config.json``. Raises ValueError for a missing key or an unsupported value."""
    model_type = config.get("model_type")
    if model_type not in ("llama", OWN_TYPE):
        raise ValueError(f"model_type={model_type!r} is not supported; config.json must say 'llama' or {OWN_TYPE!r}.")
    for key, only in _ONLY_VALUES.items():
        if config.get(key, only) not in (only, None):
            raise ValueError(f"{key}={config[key]!r} in config.json is not supported; only {only!r} is.")
    own = dict(config.get(OWN_TYPE) or {}) if model_type == OWN_TYPE else {}
    unknown = sorted(set(own) - set(_OWN_FIELDS))
    if unknown:
        raise ValueError(
            f"{OWN_TYPE} in config.json has no field {', '.join(unknown)}; it has {', '.join(_OWN_FIELDS)}."
        )
    if isinstance(own.get("attention"), list):
        own["attention"] = tuple(own["attention"])
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
        **own,
    )


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The fields of a ``config.json``, with RoPE in the spelling that transformers 4 and 5 both read."""
    is_llama = config.use_rope and config.use_rmsnorm and config.use_swiglu and config.attention_types == ("global",)
    fields: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
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
    if not is_llama:
        fields |= {"architectures": [], "model_type": OWN_TYPE}
        fields[OWN_TYPE] = {name: getattr(config, name) for name in _OWN_FIELDS} | {
            "attention": list(config.layer_types)
        }
    return fields


def _required(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise ValueError(f"config.json lacks {key}; a Llama configuration has it.")
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
