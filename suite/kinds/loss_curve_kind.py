"""The kind of :class:`.loss_curve_case.TrainingCase`: its rows, and how a cell is made ready."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from ..cell import Cell, Means, Prepared, Request
from ..record import Record
from .kind import Kind, backends_of
from .loss_curve_case import LossCurve, TrainingCase, losses_of, run_of, standard_runs


class LossCurves(Kind):
    """The kind of :class:`TrainingCase`. What imports flax is imported where it is used."""

    titles: ClassVar = {"loss_curve": "loss curve"}
    page: ClassVar = "curves"
    case: ClassVar = TrainingCase
    facts: ClassVar = LossCurve
    shares_process: ClassVar = True
    needs_ceilings: ClassVar = False

    def patience(self, case: TrainingCase) -> int:
        """The limit is one of each update."""
        return case.steps

    def result(self, record: Record) -> list[str]:
        """The first loss and the last."""
        if record.facts is None or not record.facts.losses:
            return []
        losses = losses_of(record)
        return [f"{losses[0]:.3f} -> {losses[-1]:.6f} nats"]

    def cells(self, case: TrainingCase, request: Request) -> Iterable[Cell]:
        """A cell per run of the standard backend, and per backend that is asked for.

        Raises InputError for a preset that does not exist or reads no bytes.
        """
        from . import curve_training  # noqa: PLC0415

        others = [name for name in backends_of(request) if name != "standard"]
        on_mesh = [f"{name}@{case.mesh}" for name in ("standard", *others)] if case.mesh else []
        return [curve_training.cell_of(case, run_of(row)) for row in (*standard_runs(), *others, *on_mesh)]

    def prepare(self, cell: Cell, case: TrainingCase, means: Means) -> Prepared:
        """Train; nothing is timed."""
        from . import curve_training  # noqa: PLC0415

        return Prepared(curve_training.trained(case, run_of(cell.row)))


LOSS_CURVE = LossCurves()
