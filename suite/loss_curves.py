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
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float

from attnsuite.models.optimizer import OptimizerName

from . import typed
from .record import Record
from .typed import Count, Real, Seed

FACTOR = 2.0
Losses = Sequence[float] | Float[np.ndarray, " steps"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCase:
    """How a group of runs trains: updates, rows per update, tokens per row. ``setting`` is what a page calls it."""

    kind: Literal["loss_curve"] = "loss_curve"
    name: str = ""
    preset: str
    setting: str
    steps: Count
    batch: Count
    length: Count
    seed: Seed = 0
    learning_rate: Real = 2e-3
    optimizer: OptimizerName = "adamw"

    def __post_init__(self) -> None:
        sizes = f"b{self.batch}-s{self.length}-n{self.steps}"
        object.__setattr__(self, "name", self.name or f"train-{self.preset}-{self.setting}-{sizes}")


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


def losses_of(record: Record) -> Float[np.ndarray, " steps"]:
    """The losses of a record that has facts, NaN where one was not finite."""
    return np.asarray(record.facts.losses, np.float64)


def role_of(record: Record) -> str | None:
    """What a curve is for, see ``record.LossCurve``; None where there is no curve."""
    return None if record.facts is None else record.facts.role


def settings_of(records: Iterable[Record]) -> list[tuple[TrainingCase, list[Record]]]:
    """The cases that were trained, each with its records. Raises ValueError with a sentence where they make no page."""
    members: dict[str, list[Record]] = {}
    for record in records:
        members.setdefault(record.case, []).append(record)
    return [(_case(found), found) for found in members.values()]


def _case(records: Sequence[Record]) -> TrainingCase:
    first = records[0]
    try:
        case: TrainingCase = typed.convert(first.problem, TrainingCase)
    except ValueError as error:
        raise ValueError(f"the problem of {first.key!r} is no training: {error}.") from error
    other = next((record.key for record in records if record.problem != first.problem), None)
    if other is not None:
        raise ValueError(f"{other!r} trains otherwise than {first.key!r}; give a directory that was written at once.")
    roles = [role_of(record) for record in records]
    if roles.count("standard") != 1 or roles.count("noise") < 2:
        raise ValueError(
            "it lacks the standard backend's curve, or the two of its noise, that all others in setting "
            f"{case.setting!r} are held to; go on with --resume, or train again."
        )
    short = [r.requested for r in records if r.facts is not None and len(r.facts.losses) != case.steps]
    if short:
        raise ValueError(f"{short[0]!r} has not the {case.steps} losses of its setting.")
    return case
