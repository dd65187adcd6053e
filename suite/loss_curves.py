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
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Float

from . import typed
from .record import Environment
from .typed import Count, Real, Seed

CURVES, MANIFEST = "curves.jsonl", "curves.json"
FACTOR = 2.0
Losses = Sequence[float] | Float[np.ndarray, " steps"]
Role = Literal["standard", "noise", "batches", "backend", "control", "refused"]


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """How a group of runs trains: updates, rows per update, tokens per row."""

    name: str
    steps: Count
    batch: Count
    length: Count


@dataclasses.dataclass(frozen=True, slots=True)
class Curve:
    """The losses of one run, nats before each update; ``reasons`` where it was refused and there are none.

    A loss that is not finite is None.
    """

    setting: str
    role: Role
    name: str
    mode: str
    losses: tuple[Real | None, ...]
    reasons: tuple[str, ...] = ()

    @property
    def values(self) -> Float[np.ndarray, " steps"]:
        """The losses, NaN where one was not finite."""
        return np.asarray(self.losses, np.float64)

    def to_json(self) -> str:
        """One line of JSON."""
        return typed.to_json(dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What all curves of a directory have in common: its manifest."""

    date: str
    preset: str
    seed: Seed
    learning_rate: Real
    optimizer: str
    settings: tuple[Setting, ...]
    environment: Environment


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """The largest distance from the standard's curve in units of its noise, and the step where it is."""

    ratio: float
    step: int

    @property
    def is_ready(self) -> bool:
        """Whether the rule of this module holds."""
        return self.ratio <= FACTOR


def judge(losses: Losses, standard: Losses, noise: Sequence[Losses]) -> Verdict:
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


def read_training(directory: Path) -> tuple[Training, list[Curve]]:
    """What ``attnsuite curves`` wrote. Raises ValueError with a sentence for what can be no page."""
    try:
        training = typed.convert(typed.read_json(directory / MANIFEST), Training)
    except ValueError as error:
        raise ValueError(f"{directory / MANIFEST}: {error}.") from error
    curves = parse_curves(directory / CURVES)
    if not training.settings:
        raise ValueError(f"{directory / MANIFEST}: settings is empty; it must name one or more.")
    for setting in training.settings:
        members = [curve for curve in curves if curve.setting == setting.name]
        if sum(curve.role == "standard" for curve in members) != 1 or sum(c.role == "noise" for c in members) < 2:
            raise ValueError(
                f"{directory} lacks the standard backend's curve, or the two of its noise, that all others in setting "
                f"{setting.name!r} are held to; train again."
            )
        short = [c.name for c in members if c.role != "refused" and len(c.losses) != setting.steps]
        if short:
            raise ValueError(f"{directory}: {short[0]!r} has not the {setting.steps} losses of its setting.")
    known = {setting.name for setting in training.settings}
    return training, [curve for curve in curves if curve.setting in known]


def parse_curves(path: Path) -> list[Curve]:
    """The curves in a file. Raises ValueError with a sentence for a file that cannot be read and for other lines."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from error
    curves = []
    for number, line in enumerate(lines, start=1):
        try:
            curves.append(typed.convert(typed.parse_json(line), Curve))
        except ValueError as error:
            raise ValueError(f"line {number} of {path} is no loss curve: {error}.") from error
    return curves
