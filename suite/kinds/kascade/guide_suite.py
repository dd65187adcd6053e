"""The suite ``kascade-guide``: what the guides of Kascade on Llama report, measured on one checkpoint.

The guides are read in docs/how-to/coming-from.md. Each has a schedule and a number of tiles; both are measured
beside the paper's schedule, on the same text, with the controls of every Kascade case.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...cell import Case
from ..kind import Kernel
from .selection_case import SelectionCase
from .stack_case import StackCase

if TYPE_CHECKING:
    from attnsuite.models import ModelConfig

NAME = "kascade-guide"
TILE_SIZE = 16  # the guides' own
# The guide of Llama-3.2-1B keeps 12 tiles and that of Llama-3.1-8B keeps 8, of the 32 tiles of 512 tokens.
GUIDES: dict[str, dict[str, Any]] = {
    "1b": {"top_k": 0.375, "schedule": "greedy-benchmark", "threshold": 0.65},
    "8b": {"top_k": 0.25, "schedule": "greedy-dynamic", "threshold": 0.1},
    "paper": {"top_k": 0.25, "schedule": "dp"},
}
LENGTHS = (128, 512)  # at which the guide of the TPU kernel compares it with a reference


def guide_cases(config: ModelConfig, shared: Mapping[str, Any]) -> tuple[Case, ...]:
    """Loss by guide and phase, one layer of each role, and whole stacks by kernel, in the shapes of the model."""
    anchors = max(2, config.num_layers // 4)
    text = [
        SelectionCase(
            kind="kascade_text", phase=phase, name=f"guide-{guide}-{phase}", tile_size=TILE_SIZE,
            anchors=str(anchors) if settings["schedule"] == "dp" else "", **settings, **shared,
        )
        for guide, settings in GUIDES.items()
        for phase in ("prefill", "decode")
    ]  # fmt: skip
    shape: dict[str, Any] = {
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "tile_size": TILE_SIZE,
        "top_k": GUIDES["1b"]["top_k"],
    }
    # The parts of one layer by each kernel that a CPU has; whole stacks have a row for each.
    timed: tuple[tuple[str, int, Kernel], ...] = (
        ("layer", 1, ""),
        ("layer-flash-cpu", 1, "flash_cpu"),
        ("stack", config.num_layers, ""),
    )
    stacks = [
        StackCase(kind="kascade_prefill", name=f"guide-{what}-{length}", sequence=length, layers=layers, by_token=False,
                  anchors=min(anchors, layers), kernel=kernel, **shape)
        for length in LENGTHS
        for what, layers, kernel in timed
    ]  # fmt: skip
    return (*text, *stacks)
