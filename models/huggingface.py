"""``config.json`` as Hugging Face writes it, to and from a :class:`~attnsuite.models.config.ModelConfig`.

Llama, Mistral, Qwen2 and Qwen3 are one transformer under four names. They differ in the projections that have a bias,
in the norms of queries and keys, and in the layers that see a window. Both spellings of RoPE are read:
``rope_parameters`` (transformers 5) and ``rope_theta`` with ``rope_scaling`` (4). A key for something that this
transformer does not compute is refused with a sentence; ``huggingface_keys.py`` lists the known keys. A configuration
that none of the four can express (an ablation switch, other attention) is written under
``model_type: attention_suite``, so that no other program opens it and computes something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from attnsuite.sentences import given

from .config import DTYPES, AttentionType, ModelConfig, RopeScaling
from .huggingface_keys import ARCHITECTURES, CONFIG, OWN_TYPE, Fields, OwnFields, RopeFields, read_fields
from .reading import CheckpointError

_LAYER_TYPES: dict[str, AttentionType] = {"full_attention": "global", "sliding_attention": "sliding"}


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The configuration in the keys of a ``config.json``. Raises CheckpointError for an unknown key or value."""
    fields = read_fields(config)
    _check_architectures(fields)
    theta, scaling = _rope(fields)
    stored = fields.dtype or fields.torch_dtype or "float32"
    if stored not in DTYPES:
        raise CheckpointError(f"dtype={given(stored)} in {CONFIG} is not supported; use one of {', '.join(DTYPES)}.")
    by_type = _by_type(fields)
    try:
        return ModelConfig(
            vocab_size=fields.vocab_size,
            hidden_size=fields.hidden_size,
            intermediate_size=fields.intermediate_size,
            num_layers=fields.num_hidden_layers,
            num_heads=fields.num_attention_heads,
            num_kv_heads=fields.num_key_value_heads,
            head_dim=fields.head_dim,
            max_length=fields.max_position_embeddings,
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=fields.rms_norm_eps,
            tie_embeddings=fields.tie_word_embeddings,
            dtype=stored,
            param_dtype=stored,
            **by_type,
        )
    except ValueError as error:
        raise CheckpointError(f"{CONFIG}: {error}") from error


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The fields of a ``config.json``, with RoPE in the spelling that transformers 4 and 5 both read."""
    model_type, fields_of_type = _type_of(config)
    fields: dict[str, Any] = {
        "architectures": [ARCHITECTURES[model_type]] if model_type in ARCHITECTURES else [],
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


def _check_architectures(fields: Fields) -> None:
    """Refuse other class names: another class may compute something else from the same weights."""
    causal = ARCHITECTURES.get(fields.model_type, "")
    for name in fields.architectures or ():
        if name not in (causal, causal.replace("ForCausalLM", "Model")):
            raise CheckpointError(
                f"architectures in {CONFIG} names {given(name)}; of model_type={fields.model_type!r} only "
                f"{causal or 'an empty list'} is supported."
            )


def _by_type(fields: Fields) -> dict[str, Any]:
    """The fields in which the model types differ: biases, norms of queries and keys, windows."""
    model_type, said, own = fields.model_type, fields.attention_bias, fields.attention_suite
    if model_type == OWN_TYPE:
        own = own or OwnFields()
        for name in ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"):
            if getattr(fields, name):
                raise CheckpointError(f"{name} in {CONFIG} has no place beside {OWN_TYPE}; leave it out.")
        if said not in (None, own.qkv_bias):
            raise CheckpointError(
                f"attention_bias={given(said)} in {CONFIG} is not qkv_bias={given(own.qkv_bias)} in {OWN_TYPE}."
            )
        return msgspec.structs.asdict(own)
    if own is not None:
        raise CheckpointError(f"{OWN_TYPE} in {CONFIG} is for model_type={OWN_TYPE!r}, not {model_type!r}.")
    if model_type in ("mistral", "qwen2") and said not in (None, model_type == "qwen2"):
        raise CheckpointError(
            f"attention_bias={given(said)} in {CONFIG} is not what model_type={model_type!r} means; leave it out."
        )
    windowed, bias = _windows(fields), bool(said)
    match model_type:
        case "llama":
            return windowed | {"qkv_bias": bias, "output_bias": bias}
        case "qwen2":
            return windowed | {"qkv_bias": True}
        case "qwen3":
            return windowed | {"qkv_bias": bias, "output_bias": bias, "qk_norm": True}
    return windowed


def _windows(fields: Fields) -> dict[str, Any]:
    """The layers that see only the last ``sliding_window`` tokens, itself included; nothing if none does."""
    window, named, model_type = fields.sliding_window, fields.layer_types, fields.model_type
    first = 0
    if model_type == "llama":
        for name, value in (("sliding_window", window), ("use_sliding_window", fields.use_sliding_window or None)):
            if value is not None:
                raise CheckpointError(f"{name}={given(value)} in {CONFIG} is not supported in a llama; leave it out.")
    elif model_type == "mistral":
        for name in ("layer_types", "use_sliding_window", "max_window_layers"):
            if getattr(fields, name) is not None:
                raise CheckpointError(f"{name} in {CONFIG} is not supported in a mistral; all of its layers are alike.")
    else:
        first = fields.max_window_layers or 0
        window = window if fields.use_sliding_window else None
    if named is None:
        layers = range(fields.num_hidden_layers)
        named = ["sliding_attention" if window is not None and i >= first else "full_attention" for i in layers]
    unknown = [kind for kind in named if kind not in _LAYER_TYPES]
    if unknown:
        raise CheckpointError(
            f"layer_types={given(unknown[0])} in {CONFIG} is not supported; use {' or '.join(_LAYER_TYPES)}."
        )
    if len(named) != fields.num_hidden_layers:
        raise CheckpointError(
            f"layer_types in {CONFIG} names {len(named)} layers, but num_hidden_layers={fields.num_hidden_layers}."
        )
    types = tuple(_LAYER_TYPES[kind] for kind in named)
    if "sliding" not in types:
        return {}
    if window is None:
        raise CheckpointError(f"layer_types in {CONFIG} has sliding_attention, but no sliding_window is in use.")
    return {"attention": types if "global" in types else "sliding", "window_size": window}


def _type_of(config: ModelConfig) -> tuple[str, dict[str, Any]]:
    """The model type under which this configuration is written, and the keys that only this type has."""
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
    own = {name: getattr(config, name) for name in OwnFields.__struct_fields__} | {
        "attention": list(config.layer_types)
    }
    return OWN_TYPE, {OWN_TYPE: own}


def _rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """Base and scaling from either spelling. A base inside the RoPE fields takes precedence over one beside them."""
    if fields.rope_parameters and fields.rope_scaling and fields.rope_parameters != fields.rope_scaling:
        raise CheckpointError(f"rope_parameters and rope_scaling in {CONFIG} differ; leave one of them out.")
    rope = fields.rope_parameters or fields.rope_scaling or RopeFields()
    theta = fields.rope_theta if rope.rope_theta is None else rope.rope_theta
    if rope.partial_rotary_factor not in (None, 1.0):
        raise CheckpointError(
            f"partial_rotary_factor={rope.partial_rotary_factor} in {CONFIG} is not supported; only 1.0 is."
        )
    kind = rope.rope_type or rope.kind or "default"
    if kind not in ("default", "llama3") or rope.kind not in (None, kind):
        raise CheckpointError(
            f"rope_type={given(kind)} in {CONFIG} is not supported; use 'default' or 'llama3' (type, where it stands "
            "too, has to be the same)."
        )
    sizes = {
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
    }
    if kind == "default":
        used = [name for name, value in sizes.items() if value is not None]
        if used:
            raise CheckpointError(f"rope_type='default' in {CONFIG} makes no use of {', '.join(used)}; leave them out.")
        return theta, None
    missing = [name for name, value in sizes.items() if value is None]
    if missing:
        raise CheckpointError(f"rope scaling 'llama3' in {CONFIG} lacks {', '.join(missing)}.")
    original = sizes.pop("original_max_position_embeddings")
    return theta, RopeScaling(original_max_length=original, **sizes)  # pyright: ignore[reportArgumentType]  (not None)
