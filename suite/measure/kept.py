"""What approximate backends keep of a model's attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attnsuite.backends.contract import Kept, SelectsKeys
from attnsuite.models import ModelConfig
from attnsuite.models.planning import Resolutions


def kept_of(resolutions: Resolutions, options: Mapping[str, Any], config: ModelConfig) -> tuple[Kept, ...]:
    """What is kept of each attention type by a backend that selects keys; empty where exact backends compute all."""
    return tuple(
        found.backend.keeps(found.spec, options, _layers(config, kind), config.num_layers)
        for kind, found in resolutions
        if isinstance(found.backend, SelectsKeys) and found.mode != "fallback"
    )


def _layers(config: ModelConfig, kind: str) -> tuple[int, ...]:
    return tuple(i for i, other in enumerate(config.layer_types) if other == kind)
