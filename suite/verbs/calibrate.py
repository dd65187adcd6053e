"""The verb ``attnsuite calibrate``: its flags, and the function that runs it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from .flags import flag, text_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Calibrate:
    """Measure over some text how well one layer's selection serves another, and show the schedule."""

    model: Annotated[str, flag("NAME|DIR|PATH.py:NAME")] = "text"
    """text (the checkpoint that ships here), a checkpoint's directory (its tokenizer reads the text, else bytes), or a
    function of a prompt of bytes that returns each layer's queries [length, heads, dim] and keys [length,
    kv_heads, dim]."""
    text: Annotated[Path | None, flag("FILE", "training part of Python's prose")] = None
    """Text to calibrate on."""
    text_field: Annotated[str | None, flag("NAME", "plain text")] = None
    """Field of JSON lines that holds the text."""
    random_tokens: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Random tokens in place of text: for time and memory alone, of a checkpoint without a tokenizer."""
    out: Annotated[Path, flag("FILE")] = Path("calibration.safetensors")
    """File to write, a .json beside it; existing ones are replaced."""
    prompts: Annotated[int, flag("N")] = 8
    """Prompts, spread evenly over the text."""
    length: Annotated[int, flag("TOKENS")] = 512
    """Tokens of a prompt."""
    tile_size: Annotated[int, flag("KEYS")] = 16
    """Keys per tile, and queries that share a selection."""
    top_k: Annotated[float, flag("SHARE")] = 0.125
    """Share of the earlier keys that is selected."""
    min_keys: Annotated[int, flag("KEYS")] = 0
    """Least number of earlier keys."""
    granularity: Annotated[str, flag("NAME")] = "tile"
    """tile or token."""
    schedule: Annotated[str, flag("NAME")] = "dp"
    """dp, greedy (or -guide, -dynamic, -benchmark, -loss behind it), manual: the schedule that is shown."""
    anchors: Annotated[str, flag("N|LAYERS", "a quarter of the layers")] = ""
    """How many layers select (dp, greedy-loss), or which (manual), such as 0,2."""
    threshold: Annotated[float, flag("SHARE")] = 0.65
    """Greedy schedule: least similarity to the anchor."""
    max_reuse_dist: Annotated[int, flag("LAYERS")] = 4
    """Greedy schedule: how far behind its anchor a layer may be."""


def run(command: Calibrate) -> int:
    """Calibrate, and show the schedule and what each layer keeps."""
    from rich.console import Console

    from attnsuite.backends.kascade import LOSS_RULE

    from ..kinds.kascade import calibration_run

    text = text_of(command)
    with Console(stderr=True).status("starting") as status:
        path, calibration, schedule = calibration_run.run(command, text, status.update)
    least = calibration.mass.min(axis=(1, 2))
    print(f"schedule {schedule.method}, anchors {', '.join(map(str, schedule.anchors))}\n{schedule.table()}")
    if schedule.method == LOSS_RULE:
        print(f"to use it: --calibration {path} --schedule manual --anchors {','.join(map(str, schedule.anchors))}")
    print("mass kept by each layer's own selection, mean and least over heads and query tiles:")
    for layer, (mean, low) in enumerate(zip(calibration.mass.mean(axis=(1, 2)), least, strict=True)):
        print(f"  layer {layer}: {mean:.3f}, {low:.3f}; importance {calibration.importance[layer]:.4f}")
    print(f"calibration: {path}\n             {path.with_suffix('.json')}")
    return 0
