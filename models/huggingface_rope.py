"""RoPE in a ``config.json``: ``rope_parameters`` (transformers 5), or ``rope_theta`` with ``rope_scaling`` (4).

Each scaling has an allow-list of keys. A key that a scaling needs and does not have is asked for, and one that it makes
no use of is refused.
"""

from __future__ import annotations

from typing import Any

from attnsuite.sentences import given

from .config import ModelConfig
from .huggingface_keys import CONFIG, Fields, RopeFields
from .reading import CheckpointError
from .rope_scaling import AnyScaling, DynamicScaling, LinearScaling, RopeScaling, YarnScaling

_LENGTH = "original_max_position_embeddings"
_LLAMA_3 = ("factor", "low_freq_factor", "high_freq_factor", _LENGTH)
_YARN = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
_ALL = tuple(dict.fromkeys((*_LLAMA_3, *_YARN)))
# rope_type -> the keys that it needs, and those that it may have.
_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), (_LENGTH,)),
    "llama3": (_LLAMA_3, ()),
    "yarn": (("factor", _LENGTH), _YARN),
}


def read_rope(fields: Fields) -> tuple[float, AnyScaling | None]:
    """Base and scaling from either spelling. A base inside the RoPE fields takes precedence over one beside them."""
    if fields.rope_parameters and fields.rope_scaling and fields.rope_parameters != fields.rope_scaling:
        raise CheckpointError(f"rope_parameters and rope_scaling in {CONFIG} differ; leave one of them out.")
    rope = fields.rope_parameters or fields.rope_scaling
    if rope is None and fields.model_type == "gpt_oss":
        raise CheckpointError(f"{CONFIG} lacks rope_scaling; gpt_oss has YaRN, and its keys have to be said.")
    rope = rope or RopeFields()
    theta = fields.rope_theta if rope.rope_theta is None else rope.rope_theta
    kind = _kind(rope)
    if kind != "default" and fields.model_type == "phi3":
        raise CheckpointError(f"rope_type={given(kind)} in {CONFIG} is not supported in a phi3; only 'default' is.")
    entries = {name: getattr(rope, name) for name in _ALL if getattr(rope, name) is not None}
    needed, allowed = _KEYS[kind]
    unused = [name for name in entries if name not in (*needed, *allowed)]
    if unused:
        raise CheckpointError(f"rope_type={kind!r} in {CONFIG} makes no use of {', '.join(unused)}; leave them out.")
    missing = [name for name in needed if name not in entries]
    if missing:
        raise CheckpointError(f"rope scaling {kind!r} in {CONFIG} lacks {', '.join(missing)}.")
    try:
        return theta, _scaling(kind, entries, fields.max_position_embeddings)
    except ValueError as error:
        raise CheckpointError(f"{CONFIG}: {error}") from error


def sliding_theta(fields: Fields) -> float | None:
    """The base of RoPE in Gemma 3's sliding layers, which are not scaled."""
    rope = fields.sliding_rope or RopeFields()
    if _kind(rope) != "default" or any(getattr(rope, name) is not None for name in _ALL):
        raise CheckpointError(f"rope_parameters.sliding_attention in {CONFIG} is scaled; only 'default' is supported.")
    return fields.rope_local_base_freq if rope.rope_theta is None else rope.rope_theta


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """The keys of RoPE, in the spelling that transformers 4 and 5 both read."""
    length, scaling = config.max_length, config.rope_scaling
    match scaling:
        case None:
            entries = None
        case RopeScaling():
            entries = {name: getattr(scaling, name) for name in _LLAMA_3[:3]} | {_LENGTH: scaling.original_max_length}
            entries = {"rope_type": "llama3", **entries}
        case LinearScaling():
            entries = {"rope_type": "linear", "factor": scaling.factor}
        case DynamicScaling():  # transformers takes the original length from max_position_embeddings
            entries, length = {"rope_type": "dynamic", "factor": scaling.factor}, scaling.original_max_length
        case YarnScaling():
            entries = {name: getattr(scaling, name) for name in ("factor", *_YARN)}
            entries = {"rope_type": "yarn", **entries, _LENGTH: scaling.original_max_length}
            entries = {name: value for name, value in entries.items() if value is not None}
    return {"max_position_embeddings": length, "rope_theta": config.rope_theta, "rope_scaling": entries}


def _kind(rope: RopeFields) -> str:
    if rope.partial_rotary_factor not in (None, 1.0):
        raise CheckpointError(
            f"partial_rotary_factor={rope.partial_rotary_factor} in {CONFIG} is not supported; only 1.0 is."
        )
    kind = rope.rope_type or rope.kind or "default"
    if kind not in _KEYS or rope.kind not in (None, kind):
        raise CheckpointError(
            f"rope_type={given(kind)} in {CONFIG} is not supported; use one of {', '.join(map(repr, _KEYS))} (type, "
            "where it stands too, has to be the same)."
        )
    return kind


def _scaling(kind: str, entries: dict[str, Any], max_length: int) -> AnyScaling | None:
    length = entries.pop(_LENGTH, None)
    match kind:
        case "linear":
            return LinearScaling(**entries)
        case "dynamic":
            if length not in (None, max_length):
                raise ValueError(
                    f"{_LENGTH}={length} is not max_position_embeddings={max_length}; 'dynamic' takes the latter."
                )
            return DynamicScaling(original_max_length=max_length, **entries)
        case "llama3":
            return RopeScaling(original_max_length=length, **entries)
        case "yarn":
            return YarnScaling(original_max_length=length, **entries)
    return None
