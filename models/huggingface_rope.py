"""RoPE in a ``config.json``: ``rope_parameters`` (transformers 5), or ``rope_theta`` with ``rope_scaling`` (4).

Each scaling has an allow-list of keys. A key that a scaling needs and does not have is asked for, and one that it makes
no use of is refused.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from attnsuite.sentences import quoted

from .checked_json import CheckpointError
from .config import ModelConfig
from .huggingface_keys import CONFIG, Fields, RopeFields
from .rope_scaling import AnyScaling, DynamicScaling, LinearScaling, RopeScaling, YarnScaling

_LENGTH = "original_max_position_embeddings"  # our original_max_length; the other fields have the same names
# rope_type -> what it is, and the keys that it needs; it may have the others of its fields.
_SCALINGS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "default": (None, ()),
    "linear": (LinearScaling, ("factor",)),
    "dynamic": (DynamicScaling, ("factor",)),
    "llama3": (RopeScaling, ("factor", "low_freq_factor", "high_freq_factor", _LENGTH)),
    "yarn": (YarnScaling, ("factor", _LENGTH)),
}


def _keys(scaling: Any) -> dict[str, str]:
    """The keys of a scaling and the names of its fields."""
    names = [] if scaling is None else [field.name for field in dataclasses.fields(scaling)]
    return {_LENGTH if name == "original_max_length" else name: name for name in names}


_ALL = tuple(dict.fromkeys(key for scaling, _ in _SCALINGS.values() for key in _keys(scaling)))


def read_rope(fields: Fields) -> tuple[float, AnyScaling | None]:
    """Base and scaling from either spelling. A base inside the RoPE fields takes precedence over one beside them."""
    if fields.rope_parameters and fields.rope_scaling and fields.rope_parameters != fields.rope_scaling:
        raise CheckpointError(f"rope_parameters and rope_scaling in {CONFIG} differ; leave one of them out.")
    rope = fields.rope_parameters or fields.rope_scaling
    if rope is None and fields.model_type == "gpt_oss":
        raise CheckpointError(f"{CONFIG} lacks rope_scaling; gpt_oss has YaRN, and its keys have to be said.")
    rope = rope or RopeFields()
    theta = fields.rope_theta if rope.rope_theta is None else rope.rope_theta
    rope_type = _rope_type(rope)
    if rope_type != "default" and fields.model_type == "phi3":
        raise CheckpointError(
            f"rope_type={quoted(rope_type)} in {CONFIG} is not supported in a phi3; only 'default' is."
        )
    entries = {name: getattr(rope, name) for name in _ALL if getattr(rope, name) is not None}
    scaling, needed = _SCALINGS[rope_type]
    unused = [name for name in entries if name not in _keys(scaling)]
    if unused:
        raise CheckpointError(
            f"rope_type={rope_type!r} in {CONFIG} makes no use of {', '.join(unused)}; leave them out."
        )
    missing = [name for name in needed if name not in entries]
    if missing:
        raise CheckpointError(f"rope scaling {rope_type!r} in {CONFIG} lacks {', '.join(missing)}.")
    if rope_type == "dynamic":
        length = fields.max_position_embeddings
        if entries.setdefault(_LENGTH, length) != length:
            raise CheckpointError(
                f"{CONFIG}: {_LENGTH}={entries[_LENGTH]} is not max_position_embeddings={length}; 'dynamic' takes the "
                "latter."
            )
    named = {ours: entries[key] for key, ours in _keys(scaling).items() if key in entries}
    try:
        return theta, None if scaling is None else scaling(**named)
    except ValueError as error:
        raise CheckpointError(f"{CONFIG}: {error}") from error


def sliding_theta(fields: Fields) -> float | None:
    """The base of RoPE in Gemma 3's sliding layers, which are not scaled."""
    rope = fields.sliding_rope or RopeFields()
    if _rope_type(rope) != "default" or any(getattr(rope, name) is not None for name in _ALL):
        raise CheckpointError(f"rope_parameters.sliding_attention in {CONFIG} is scaled; only 'default' is supported.")
    return fields.rope_local_base_freq if rope.rope_theta is None else rope.rope_theta


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """The keys of RoPE, in the spelling that transformers 4 and 5 both read."""
    length, scaling = config.max_length, config.rope_scaling
    rope_type = next((name for name, (made, _) in _SCALINGS.items() if made and isinstance(scaling, made)), None)
    values = {key: getattr(scaling, name) for key, name in _keys(scaling).items()}
    if rope_type == "dynamic":  # transformers takes the original length from max_position_embeddings
        length = values.pop(_LENGTH)
    written = {"rope_type": rope_type} | {key: value for key, value in values.items() if value is not None}
    return {
        "max_position_embeddings": length,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else written,
    }


def _rope_type(rope: RopeFields) -> str:
    if rope.partial_rotary_factor not in (None, 1.0):
        raise CheckpointError(
            f"partial_rotary_factor={rope.partial_rotary_factor} in {CONFIG} is not supported; only 1.0 is."
        )
    rope_type = rope.rope_type or rope.kind or "default"
    if rope_type not in _SCALINGS or rope.kind not in (None, rope_type):
        raise CheckpointError(
            f"rope_type={quoted(rope_type)} in {CONFIG} is not supported; use one of {', '.join(map(repr, _SCALINGS))} "
            "(type, where it stands too, has to be the same)."
        )
    return rope_type
