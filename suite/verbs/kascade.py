"""The flags that Kascade adds to verbs, where the command line names Kascade or one of these flags."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from .flags import flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Schedule:
    schedule: Annotated[str | None, flag("NAME", "dp; perplexity without --calibration: none")] = None
    """Kascade: dp, greedy (or -guide, -dynamic, -benchmark behind it), manual; none: every layer selects for itself."""
    anchors: Annotated[str | None, flag("N|LAYERS", "2; of a checkpoint a quarter of the layers")] = None
    """Kascade: how many layers select (dp), or which (manual), such as 0,2."""
    calibration: Annotated[Path | None, flag("FILE", "made from other text; perplexity: none")] = None
    """Kascade: what attnsuite calibrate wrote for the model; its settings hold where nothing else says otherwise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfRun(_Schedule):
    """The fields of its cases that replace those of the suite."""

    tile_size: Annotated[int | None, flag("KEYS", "the case's")] = None
    """Kascade: keys per tile."""
    top_k: Annotated[float | None, flag("SHARE", "the case's")] = None
    """Kascade: share of the earlier keys that are attended to, above 0 and at most 1."""
    threshold: Annotated[str | None, flag("SHARE,...", "0.65")] = None
    """Kascade, greedy schedule: least similarity to the anchor; several values are a sweep."""
    max_reuse_dist: Annotated[str | None, flag("LAYERS,...", "4")] = None
    """Kascade, greedy schedule: how far behind its anchor a layer may be; several values are a sweep."""
    granularity: Annotated[str | None, flag("NAME", "tile")] = None
    """Kascade: tile or token."""
    kernel: Annotated[str | None, flag("NAME", "the device's")] = None
    """Kascade: what computes its rows: xla, pallas or flash_cpu."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfPerplexity(_Schedule):
    """Which layers select, and which reuse."""

    threshold: Annotated[float | None, flag("SHARE", "0.65")] = None
    """Kascade, greedy schedule: least similarity to the anchor."""
    max_reuse_dist: Annotated[int | None, flag("LAYERS", "4")] = None
    """Kascade, greedy schedule: how far behind its anchor a layer may be."""


FLAGS = {"run": OfRun, "perplexity": OfPerplexity}
