"""Is a backend ready to train with? Its loss curve against the standard backend's, within that one's own noise.

Every run trains the same model on the same batches. The noise is what the standard backend does to itself when only
the order of its float sums changes: runs that store the hidden coordinates of the model in another order, which is
the same mathematics to the last symbol. A backend is ready where, at every step, its loss is no further from the
standard's than twice the sum of what the furthest of those runs was so far and one rounding of the loss. Beside it
stand controls that have to fail: the standard backend with a gradient slightly wrong. Runs on other batches are kept
for scale: held to that spread, the wrong gradients would pass.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

CURVES, MANIFEST = "curves.jsonl", "curves.json"
FACTOR = 2.0
Role = Literal["standard", "noise", "batches", "backend", "control", "refused"]


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """How a group of runs trains: updates, rows per update, tokens per row."""

    name: str
    steps: int
    batch: int
    length: int


@dataclasses.dataclass(frozen=True, slots=True)
class Curve:
    """The losses of one run, nats before each update; ``reasons`` where it was refused and there are none."""

    setting: str
    role: Role
    name: str
    mode: str
    losses: tuple[float, ...]
    reasons: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """The largest distance from the standard's curve in units of its noise, and the step where it is."""

    ratio: float
    step: int

    @property
    def is_ready(self) -> bool:
        """Whether the rule of this module holds."""
        return self.ratio <= FACTOR


def judge(losses: Sequence[float], standard: Sequence[float], noise: Sequence[Sequence[float]]) -> Verdict:
    """Hold a curve to the noise of the standard's; a loss that is not finite is infinitely far away.

    >>> judge([2.0, 1.5], [2.0, 1.0], [[2.0, 1.25]])
    Verdict(ratio=1.9999990463261383, step=2)
    """
    reference, ours = np.asarray(standard, np.float64), np.asarray(losses, np.float64)
    spread = np.abs(np.asarray(noise, np.float64) - reference).max(axis=0)
    allowed = np.maximum.accumulate(spread) + np.finfo(np.float32).eps * reference
    ratios = np.abs(ours - reference) / allowed
    ratios = np.where(np.isfinite(ratios), ratios, np.inf)
    step = int(ratios.argmax())
    return Verdict(float(ratios[step]), step + 1)


def parse_curves(path: Path) -> list[Curve]:
    """The curves in a file. Raises OSError, and ValueError for lines that are none."""
    curves = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            fields = json.loads(line)
            curves.append(Curve(**{**fields, "losses": tuple(fields["losses"]), "reasons": tuple(fields["reasons"])}))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{str(path)!r} holds a line that is no loss curve: {error}.") from error
    return curves
