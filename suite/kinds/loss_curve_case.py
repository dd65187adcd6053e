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

from .. import typed
from ..host_devices import parse_mesh
from ..record import Record
from ..typed import Count, Real, Seed
from .kind import check_fields

FACTOR = 2.0
NOISE_RUNS = 5
SEED_RUNS = 2
# Factors on the gradients of query, key and value: an error of 5%, a missing gradient, an error of 1%.
CONTROLS = {"dk 5% small": (1.0, 0.95, 1.0), "dk dropped": (1.0, 0.0, 1.0), "dv 1% large": (1.0, 1.0, 1.01)}
Role = Literal["standard", "noise", "batches", "backend", "control"]
Losses = Sequence[float] | Float[np.ndarray, " steps"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCase:
    """How a group of runs trains: updates, rows per update, tokens per row.

    ``setting`` is its name on a page. In the setting ``native`` a backend that does not run natively is refused; in any
    other setting it may run in an interpreter. With a ``mesh``, such as ``fsdp=2,heads=2``, standard and the backends
    that run natively train on its devices too.
    """

    kind: Literal["loss_curve"] = "loss_curve"
    name: str = ""
    preset: str
    setting: str
    steps: Count
    batch: Count
    length: Count
    seed: Seed = 0
    learning_rate: Real = 2e-3
    optimizer: Literal["adamw", "muon"] = "adamw"  # models.optimizer.OptimizerName, which imports flax
    mesh: str = ""

    def __post_init__(self) -> None:
        sizes = f"b{self.batch}-s{self.length}-n{self.steps}"
        object.__setattr__(self, "name", self.name or f"train-{self.preset}-{self.setting}-{sizes}")
        check_fields(self)
        if self.mesh:
            parse_mesh(self.mesh)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LossCurve:
    """Nats before each update, None where a loss was not finite."""

    role: Role
    losses: tuple[Real | None, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a row trains with, and how the run differs from the others.

    ``order`` numbers an order of the hidden coordinates, ``batches`` a set of batches; 0 is the usual one of each.
    ``factors`` multiply the gradients of query, key and value. ``mesh`` names several devices, as ``data=2,heads=2``.
    """

    name: str
    role: Role
    backend: str = "standard"
    order: int = 0
    batches: int = 0
    factors: tuple[float, float, float] | None = None
    mesh: str = ""


def standard_runs() -> dict[str, Run]:
    """The runs of the standard backend by name: as it is, in other orders, on other batches, with wrong gradients."""
    runs = [Run(name="standard", role="standard")]
    runs += [Run(name=f"standard, order {i}", role="noise", order=i) for i in range(1, NOISE_RUNS + 1)]
    runs += [Run(name=f"standard, batches {i}", role="batches", batches=i) for i in range(1, SEED_RUNS + 1)]
    runs += [Run(name=name, role="control", factors=factors) for name, factors in CONTROLS.items()]
    return {run.name: run for run in runs}


def run_of(row: str) -> Run:
    """The run of a row: one of the standard backend's own, or that of another backend, or ``backend@mesh``."""
    backend, _, mesh = row.partition("@")
    return standard_runs().get(row) or Run(name=row, role="backend", backend=backend, mesh=mesh)


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
    """The role of a curve, see :class:`LossCurve`; None where there is no curve."""
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
