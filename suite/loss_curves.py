"""Judge whether a backend is ready for training: its loss curve must stay within the standard backend's noise.

Every run trains the same model on the same batches. The noise comes from runs of the standard backend that store the
hidden coordinates of the model in another order: the mathematics is the same, only the order of float sums changes. At
every step, a backend's loss may differ from the standard's by at most twice the sum of two numbers: the largest
difference of a noise run up to that step, and one rounding of the loss. Controls stand beside it that have to fail: the
standard backend with slightly wrong gradients. Runs on other batches are recorded for scale; their spread is so wide
that the wrong gradients would pass.
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
    """How a group of runs trains: updates, rows per update, tokens per row. ``setting`` is its name on a page."""

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
    """The largest distance from the standard's curve, in units of its noise, and the step of this distance."""

    ratio: float
    step: int

    @property
    def is_ready(self) -> bool:
        """Whether the backend passes the rule of this module."""
        return self.ratio <= FACTOR


def judge(losses: Losses, standard: Losses, noise: Sequence[Losses]) -> Verdict:
    """Compare a curve with the noise of the standard's; a loss that is not finite is infinitely far away.

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
    """The role of a curve, see ``record.LossCurve``; None where there is no curve."""
    return None if record.facts is None else record.facts.role


def settings_of(records: Iterable[Record]) -> list[tuple[TrainingCase, list[Record]]]:
    """The cases that were trained, each with its records. Raises ValueError with a sentence if they make no page."""
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
