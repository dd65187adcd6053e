"""``config.json`` as Hugging Face writes it, to and from a :class:`~attnsuite.models.config.ModelConfig`.

The model types are one transformer under many names. Llama, Mistral, Qwen2, Qwen3 and Phi-3 differ in the projections
that have a bias, in the norms of queries and keys, and in the layers that see a window. OLMo 2 and Gemma have other
norms, Gemma also soft caps and scales; Mixtral, Qwen3-MoE and gpt-oss have experts, gpt-oss also sinks. Both spellings
of RoPE are read (``huggingface_rope.py``). A key for something that this transformer does not compute is refused with a
sentence; ``huggingface_keys.py`` lists the known keys.

A configuration is written under the first type of ``_written_types`` that means exactly it. One that none of them can
express (an ablation switch, other attention, experts) is written under ``model_type: attention_suite``, so that no
other program opens it and computes something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from attnsuite.sentences import given

from .config import DTYPES, Activation, AttentionType, ModelConfig
from .huggingface_keys import ARCHITECTURES, CONFIG, OWN_TYPE, SHARED, FamilyFields, Fields, OwnFields, read_fields
from .huggingface_rope import read_rope, sliding_theta, write_rope
from .reading import CheckpointError

_LAYER_TYPES: dict[str, AttentionType] = {"full_attention": "global", "sliding_attention": "sliding"}
_ACTIVATIONS: dict[Activation, str] = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh", "clipped_silu": "silu"}
_GEMMA: dict[str, Any] = {
    "norms": "both",
    "norm_plus_one": True,
    "scale_embeddings": True,
    "activation": "gelu_tanh",
}
_WITHOUT_CHOICE = ("mistral", "qwen2", "phi3", "mixtral")  # of a bias
_WITHOUT_WINDOW = ("llama", "olmo2")
_ALIKE = ("mistral", "phi3", "mixtral")
_PLAIN = msgspec.structs.asdict(OwnFields())
_OLMO_2: dict[str, Any] = {"norms": "after", "qk_norm": True, "qk_norm_over": "projection"}


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The configuration in the keys of a ``config.json``. Raises CheckpointError for an unknown key or value."""
    fields, family = read_fields(config)
    _check_architectures(fields)
    theta, scaling = read_rope(fields)
    stored = fields.dtype or fields.torch_dtype or "float32"
    if stored not in DTYPES:
        raise CheckpointError(f"dtype={given(stored)} in {CONFIG} is not supported; use one of {', '.join(DTYPES)}.")
    by_type = _by_type(fields, family)
    try:
        shared = {name: getattr(fields, key) for name, key in SHARED.items()}
        rope = {"rope_theta": theta, "rope_scaling": scaling}
        return ModelConfig(**{**shared, **rope, "dtype": stored, "param_dtype": stored, **by_type})
    except ValueError as error:
        raise CheckpointError(f"{CONFIG}: {error}") from error


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The fields of a ``config.json``, with RoPE in the spelling that transformers 4 and 5 both read."""
    model_type, fields_of_type = _type_of(config)
    fields: dict[str, Any] = {
        "architectures": [ARCHITECTURES[model_type]] if model_type in ARCHITECTURES else [],
        "model_type": model_type,
        **{key: getattr(config, name) for name, key in SHARED.items()},
        "hidden_act": _ACTIVATIONS[config.activation],
        "attention_bias": config.qkv_bias,
        "mlp_bias": False,
        **write_rope(config),
        "torch_dtype": config.param_dtype,
        "bos_token_id": None,
        "eos_token_id": None,
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


def _by_type(fields: Fields, family: FamilyFields) -> dict[str, Any]:
    """The fields in which the model types differ: biases, norms, windows, caps, experts."""
    model_type, entries = fields.model_type, fields.attention_bias
    if model_type == OWN_TYPE:
        return _own(fields)
    if fields.attention_suite is not None:
        raise CheckpointError(f"{OWN_TYPE} in {CONFIG} is for model_type={OWN_TYPE!r}, not {model_type!r}.")
    if model_type in _WITHOUT_CHOICE and entries not in (None, model_type == "qwen2"):
        raise CheckpointError(
            f"attention_bias={given(entries)} in {CONFIG} is not what model_type={model_type!r} means; leave it out."
        )
    bias = bool(entries)
    made = _windows(fields, family) | {
        "qkv_bias": bias or model_type == "qwen2",
        "output_bias": bias and model_type != "qwen2",
    }
    match model_type:
        case "qwen3":
            made |= {"qk_norm": True}
        case "olmo2":
            made |= _OLMO_2
        case "gemma2" | "gemma3_text":
            made |= _gemma(fields, family)
        case "mixtral" | "qwen3_moe" | "gpt_oss":
            made |= _with_experts(fields, family)
    return made


def _own(fields: Fields) -> dict[str, Any]:
    own, entries = msgspec.structs.asdict(fields.attention_suite or OwnFields()), fields.attention_bias
    for name in ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"):
        if getattr(fields, name):
            raise CheckpointError(f"{name} in {CONFIG} has no place beside {OWN_TYPE}; leave it out.")
    if entries not in (None, own["qkv_bias"]):
        raise CheckpointError(
            f"attention_bias={given(entries)} in {CONFIG} is not qkv_bias={given(own['qkv_bias'])} in {OWN_TYPE}."
        )
    return own


def _gemma(fields: Fields, family: FamilyFields) -> dict[str, Any]:
    scalar = family.query_pre_attn_scalar
    if scalar is None or scalar <= 0:
        raise CheckpointError(f"query_pre_attn_scalar={given(scalar)} in {CONFIG} must be a number above 0.")
    made = _GEMMA | {
        "attention_scale": scalar**-0.5,
        "logits_soft_cap": family.attn_logit_softcapping,
        "final_soft_cap": family.final_logit_softcapping,
    }
    if fields.model_type == "gemma2":
        return made
    return made | {"qk_norm": True, "sliding_rope_theta": sliding_theta(family)}


def _with_experts(fields: Fields, family: FamilyFields) -> dict[str, Any]:
    counts = {family.num_experts, family.num_local_experts} - {None}  # two names of one number in transformers
    if len(counts) != 1:
        raise CheckpointError(
            f"num_experts={given(family.num_experts)} and num_local_experts={given(family.num_local_experts)} in "
            f"{CONFIG} have to be one number; give one of them."
        )
    made: dict[str, Any] = {"experts_per_token": family.num_experts_per_tok, "num_experts": counts.pop()}
    match fields.model_type:
        case "qwen3_moe":
            made |= {"qk_norm": True, "normalise_experts": family.norm_topk_prob}
            made["intermediate_size"] = family.moe_intermediate_size
        case "gpt_oss":
            made |= {"attention_sinks": True, "activation": "clipped_silu", "expert_bias": True}
    return made


def _window_of(fields: Fields) -> int | None:
    """``sliding_window`` where the type uses it. Raises CheckpointError for keys about windows that it does not use."""
    window, model_type, refused = fields.sliding_window, fields.model_type, ()
    if model_type in _WITHOUT_WINDOW:
        refused = ("sliding_window", "use_sliding_window")
        reason = "leave it out"
    elif model_type in _ALIKE:
        refused = ("layer_types", "use_sliding_window", "max_window_layers")
        reason = "all of its layers are alike"
    elif model_type.startswith("qwen"):
        refused = ("use_sliding_window",) if model_type == "qwen3_moe" else ()
        reason = "leave it out"
        window = window if fields.use_sliding_window else None
    else:
        refused = ("use_sliding_window", "max_window_layers")
        reason = "its layer_types say which layers have a window"
    for name in refused:
        value = getattr(fields, name)
        if value is not None and value is not False:
            raise CheckpointError(f"{name}={given(value)} in {CONFIG} is not supported in a {model_type}; {reason}.")
    return window


def _windows(fields: Fields, family: FamilyFields) -> dict[str, Any]:
    """The layers that see only the last ``sliding_window`` tokens, itself included; nothing if none does."""
    window, named = _window_of(fields), fields.layer_types
    if named is None:
        layers = range(fields.num_hidden_layers)
        slides = [window is not None and _slides(fields, family, i) for i in layers]
        named = ["sliding_attention" if here else "full_attention" for here in slides]
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


def _slides(fields: Fields, family: FamilyFields, layer: int) -> bool:
    """Whether a layer sees a window where ``layer_types`` does not say so."""
    match fields.model_type:
        case "gemma2" | "gpt_oss":
            return layer % 2 == 0
        case "gemma3_text":
            return bool((layer + 1) % (family.sliding_window_pattern or 6))
    return layer >= (fields.max_window_layers or 0)


def _type_of(config: ModelConfig) -> tuple[str, dict[str, Any]]:
    """The model type under which this configuration is written, and the keys that only this type has."""
    plain = dict.fromkeys(("attention", "window_size", "qkv_bias", "output_bias"))  # what types choose freely
    for model_type, fixed, keys in _written_types(config):
        wanted = {**_PLAIN, **fixed}
        if all(getattr(config, name) == wanted[name] for name in OwnFields.__struct_fields__ if name not in plain):
            return model_type, keys
    own = {name: getattr(config, name) for name in OwnFields.__struct_fields__} | {
        "attention": list(config.layer_types)
    }
    return OWN_TYPE, {OWN_TYPE: own}


def _written_types(config: ModelConfig) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Model types with these windows and biases: the other fields that one fixes, and the keys that only it has."""
    types, biases = config.attention_types, (config.qkv_bias, config.output_bias)
    if not set(types) <= {"global", "sliding"}:
        return
    names = {ours: theirs for theirs, ours in _LAYER_TYPES.items()}
    window: dict[str, Any] = {"sliding_window": config.window_size}
    layers = {**window, "layer_types": [names[kind] for kind in config.layer_types]}
    chosen = {**layers, "use_sliding_window": "sliding" in types}
    is_global, is_same_bias = types == ("global",), biases in ((False, False), (True, True))
    if is_global and is_same_bias:
        yield "llama", {}, {}
        yield "olmo2", _OLMO_2, {}
    if types == ("sliding",) and biases == (False, False):
        yield "mistral", {}, window
    if biases == (True, False):
        yield "qwen2", {}, chosen
    if not is_same_bias:
        return
    yield "qwen3", {"qk_norm": True}, chosen
    if not config.attention_scale or config.attention_scale > 1:
        return
    gemma = _GEMMA | {"attention_scale": config.attention_scale, "final_soft_cap": config.final_soft_cap}
    scalar = round(config.attention_scale**-2)
    if scalar**-0.5 != config.attention_scale:
        return
    keys: dict[str, Any] = {
        **layers,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "final_logit_softcapping": config.final_soft_cap,
    }
    yield (
        "gemma2",
        gemma | {"logits_soft_cap": config.logits_soft_cap},
        keys | {"attn_logit_softcapping": config.logits_soft_cap},
    )
    if config.sliding_rope_theta is not None:
        local = config.sliding_rope_theta
        fixed = gemma | {"qk_norm": True, "sliding_rope_theta": local}
        yield "gemma3_text", fixed, keys | {"rope_local_base_freq": local}
