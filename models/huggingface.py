"""``config.json`` as Hugging Face writes it, to and from a :class:`~attnsuite.models.config.ModelConfig`.

The model types are one transformer under many names. Llama, Mistral, Qwen2, Qwen3 and Phi-3 differ in the projections
that have a bias, in the norms of queries and keys, and in the layers that see a window. OLMo 2 and Gemma have other
norms, Gemma also soft caps and scales; Mixtral, Qwen3-MoE and gpt-oss have experts, gpt-oss also sinks. Both spellings
of RoPE are read (``huggingface_rope.py``). A key for something that this transformer does not compute is refused with a
sentence; ``huggingface_keys.py`` lists the known keys.

A configuration is written under the first type that is read as exactly it. One that no type can express (an ablation
switch, other attention, experts) is written under ``model_type: attention_suite``, so that no other program opens it
and computes something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from attnsuite.sentences import quoted

from .checked_json import CheckpointError
from .config import DTYPES, Activation, AttentionType, ModelConfig
from .huggingface_keys import (
    CONFIG,
    FAMILIES,
    SHARED,
    SUITE_TYPE,
    WINDOW_REASONS,
    Family,
    Fields,
    SuiteFields,
    read_fields,
)
from .huggingface_rope import read_rope, sliding_theta, write_rope

_LAYER_TYPES: dict[str, AttentionType] = {"full_attention": "global", "sliding_attention": "sliding"}
_ACTIVATIONS: dict[Activation, str] = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh", "clipped_silu": "silu"}


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The configuration in the keys of a ``config.json``. Raises CheckpointError for an unknown key or value."""
    fields = read_fields(config)
    _check_architectures(fields)
    theta, scaling = read_rope(fields)
    stored = fields.dtype or fields.torch_dtype or "float32"
    if stored not in DTYPES:
        raise CheckpointError(f"dtype={quoted(stored)} in {CONFIG} is not supported; use one of {', '.join(DTYPES)}.")
    by_type = _by_type(fields)
    try:
        shared = {name: getattr(fields, key) for name, key in SHARED.items()}
        rope = {"rope_theta": theta, "rope_scaling": scaling}
        return ModelConfig(**{**shared, **rope, "dtype": stored, "param_dtype": stored, **by_type})
    except ValueError as error:
        raise CheckpointError(f"{CONFIG}: {error}") from error


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The fields of a ``config.json``, with RoPE in the spelling that transformers 4 and 5 both read."""
    if set(config.attention_types) <= {"global", "sliding"}:
        for model_type, family in FAMILIES.items():
            if family.is_stored_alike:
                fields = _fields(config, model_type, _of_family(config, family))
                if _means(fields, config):
                    return fields
    settings = {name: getattr(config, name) for name in SuiteFields.__struct_fields__}
    return _fields(config, SUITE_TYPE, {SUITE_TYPE: settings | {"attention": list(config.layer_types)}})


def _fields(config: ModelConfig, model_type: str, of_type: dict[str, Any]) -> dict[str, Any]:
    architecture = FAMILIES[model_type].architecture
    return {
        "architectures": [architecture] if architecture else [],
        "model_type": model_type,
        **{key: getattr(config, name) for name, key in SHARED.items()},
        "hidden_act": _ACTIVATIONS[config.activation],
        "attention_bias": config.qkv_bias,
        "mlp_bias": False,
        **write_rope(config),
        "torch_dtype": config.param_dtype,
        "bos_token_id": None,
        "eos_token_id": None,
        **of_type,
    }


def _of_family(config: ModelConfig, family: Family) -> dict[str, Any]:
    """The keys that only this family has, in its own terms. Whether they mean the same there is checked elsewhere."""
    names = {ours: theirs for theirs, ours in _LAYER_TYPES.items()}
    scale = config.attention_scale
    values = {
        "sliding_window": config.window_size,
        "layer_types": [names[kind] for kind in config.layer_types],
        "use_sliding_window": "sliding" in config.attention_types,
        "query_pre_attn_scalar": None if scale is None else round(scale**-2),
        "attn_logit_softcapping": config.logits_soft_cap,
        "final_logit_softcapping": config.final_soft_cap,
        "rope_local_base_freq": config.sliding_rope_theta,
    }
    windows = family.windows if "sliding_window" in family.windows else ()
    specific = {key: value for key, value in values.items() if key in (*windows, *family.keys)}
    return specific | {key: values[0] for key, values in family.only.items() if key == "hidden_activation"}


def _means(fields: dict[str, Any], config: ModelConfig) -> bool:
    """Whether ``fields`` are read as this configuration, but for what they never say, or say of RoPE."""
    try:
        read = from_hf(fields)
    except CheckpointError:
        return False
    if fields.get("rope_local_base_freq", 1.0) is None:
        return False  # null is a base of its own in transformers
    window = config.window_size if "sliding" in config.attention_types else None
    return read == config.replace(dtype=config.param_dtype, max_length=read.max_length, window_size=window)


def _check_architectures(fields: Fields) -> None:
    """Refuse other class names: another class may compute something else from the same weights."""
    causal = FAMILIES[fields.model_type].architecture
    for name in fields.architectures or ():
        if name not in (causal, causal.replace("ForCausalLM", "Model")):
            raise CheckpointError(
                f"architectures in {CONFIG} names {quoted(name)}; of model_type={fields.model_type!r} only "
                f"{causal or 'an empty list'} is supported."
            )


def _by_type(fields: Fields) -> dict[str, Any]:
    """The fields in which the model types differ: biases, norms, windows, caps, experts."""
    model_type, bias, family = fields.model_type, fields.attention_bias, FAMILIES[fields.model_type]
    if model_type == SUITE_TYPE:
        return _suite_fields(fields)
    if fields.attention_suite is not None:
        raise CheckpointError(f"{SUITE_TYPE} in {CONFIG} is for model_type={SUITE_TYPE!r}, not {model_type!r}.")
    if bias not in (None, family.fixed.get("qkv_bias", bias)):
        raise CheckpointError(
            f"attention_bias={quoted(bias)} in {CONFIG} is not what model_type={model_type!r} means; leave it out."
        )
    made = {**_windows(fields), "qkv_bias": bool(bias), "output_bias": bool(bias), **family.fixed}
    if "query_pre_attn_scalar" in family.keys:
        made |= _gemma(fields)
    return made | _with_experts(fields) if "num_experts" in family.keys else made


def _suite_fields(fields: Fields) -> dict[str, Any]:
    settings, entries = msgspec.structs.asdict(fields.attention_suite or SuiteFields()), fields.attention_bias
    for name in ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"):
        if getattr(fields, name):
            raise CheckpointError(f"{name} in {CONFIG} has no place beside {SUITE_TYPE}; leave it out.")
    if entries not in (None, settings["qkv_bias"]):
        raise CheckpointError(
            f"attention_bias={quoted(entries)} in {CONFIG} is not "
            f"qkv_bias={quoted(settings['qkv_bias'])} in {SUITE_TYPE}."
        )
    return settings


def _gemma(fields: Fields) -> dict[str, Any]:
    scalar = fields.query_pre_attn_scalar
    if scalar is None or scalar <= 0:
        raise CheckpointError(f"query_pre_attn_scalar={quoted(scalar)} in {CONFIG} must be a number above 0.")
    return {
        "attention_scale": scalar**-0.5,
        "logits_soft_cap": fields.attn_logit_softcapping,
        "final_soft_cap": fields.final_logit_softcapping,
        "sliding_rope_theta": sliding_theta(fields),
    }


def _with_experts(fields: Fields) -> dict[str, Any]:
    counts = {fields.num_experts, fields.num_local_experts} - {None}  # two names of one number in transformers
    if len(counts) != 1:
        raise CheckpointError(
            f"num_experts={quoted(fields.num_experts)} and num_local_experts={quoted(fields.num_local_experts)} in "
            f"{CONFIG} have to be one number; give one of them."
        )
    made: dict[str, Any] = {"experts_per_token": fields.num_experts_per_tok, "num_experts": counts.pop()}
    if fields.model_type == "qwen3_moe":
        made |= {"normalise_experts": fields.norm_topk_prob, "intermediate_size": fields.moe_intermediate_size}
    return made


def _window_of(fields: Fields) -> int | None:
    """``sliding_window`` where the type uses it. Raises CheckpointError for keys about windows that it does not use."""
    model_type, windows = fields.model_type, FAMILIES[fields.model_type].windows
    for name in ("sliding_window", "use_sliding_window", "layer_types", "max_window_layers"):
        value = getattr(fields, name)
        if name not in windows and value is not None and value is not False:
            reason = WINDOW_REASONS.get(windows, "leave it out")
            raise CheckpointError(f"{name}={quoted(value)} in {CONFIG} is not supported in a {model_type}; {reason}.")
    return None if model_type.startswith("qwen") and not fields.use_sliding_window else fields.sliding_window


def _windows(fields: Fields) -> dict[str, Any]:
    """The layers that see only the last ``sliding_window`` tokens, itself included; nothing if none does."""
    window, named = _window_of(fields), fields.layer_types
    if named is None:
        layers = range(fields.num_hidden_layers)
        slides = [window is not None and _slides(fields, i) for i in layers]
        named = ["sliding_attention" if here else "full_attention" for here in slides]
    unknown = [kind for kind in named if kind not in _LAYER_TYPES]
    if unknown:
        raise CheckpointError(
            f"layer_types={quoted(unknown[0])} in {CONFIG} is not supported; use {' or '.join(_LAYER_TYPES)}."
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


def _slides(fields: Fields, layer: int) -> bool:
    """Whether a layer sees a window where ``layer_types`` does not say so."""
    match fields.model_type:
        case "gemma2" | "gpt_oss":
            return layer % 2 == 0
        case "gemma3_text":
            return bool((layer + 1) % (fields.sliding_window_pattern or 6))
    return layer >= (fields.max_window_layers or 0)
