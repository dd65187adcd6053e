"""The kind of :class:`.selection_case.SelectionCase`: its rows, and how a cell is made ready."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from attnsuite.backends import Target
from attnsuite.backends.kascade import GREEDY_RULES
from attnsuite.models import TextFile

from ...cell import Cell, Means, Prepared, Request
from ...errors import CellFailure
from ...measure.program import Draw
from ..kind import LOSS, Kind, cell, refused
from .methods import FINE_TUNED, METHODS, rows_of
from .selection_case import SelectionCase


class Selections(Kind):
    """The kind of :class:`SelectionCase`. What imports flax is imported where it is used."""

    titles: ClassVar = {
        "kascade_text": "kascade, text",
        "kascade_retrieval": "kascade, retrieval",
        "kascade_gate": "kascade, gate",
    }
    case: ClassVar = SelectionCase
    needs_ceilings: ClassVar = False
    shares_process: ClassVar = True
    controlled: ClassVar = {"kascade_text": "kascade"}
    results: ClassVar = {"recall": "recall {:.3f}", **LOSS}

    def rows(self, case: SelectionCase) -> tuple[str, ...]:
        """The ways to choose that the case compares."""
        return FINE_TUNED if case.training_steps else rows_of(case.kind)

    def cells(self, case: SelectionCase, request: Request) -> Iterable[Cell]:
        """A cell per row; a row that would repeat another is refused. Raises InputError for an invalid case."""
        from . import dense, row_quality  # noqa: PLC0415

        config, target = dense.checked_config(case, request.text), Target.here()
        for row in self.rows(case):
            if row in request.rows:
                reasons = _repeats(row, case) or row_quality.refusals(case, row, config, target)
                resolved = "standard" if row == "dense" else row
                yield (
                    refused(case, row, reasons)
                    if reasons
                    else cell(case, row, resolved=resolved, mode="native", exact=METHODS[row].exact)
                )

    def judged_by(self, case: SelectionCase, mode: str | None) -> tuple[SelectionCase, ...]:
        """One case for all phases and schedules: they share its dense logits and its calibration."""
        same = {
            "phase": "prefill",
            "schedule": "greedy",
            "anchors": "",
            "threshold": 0.65,
            "max_reuse_dist": 4,
            "kernel": "",
        }
        return (dataclasses.replace(case, **same),)

    def write_reference(self, case: SelectionCase, path: Path, text: TextFile | None, draw: Draw | None) -> None:
        """Dense logits, and the calibration."""
        from . import dense  # noqa: PLC0415

        dense.write_dense(case, path, text)

    def prepare(self, cell: Cell, case: SelectionCase, means: Means) -> Prepared:
        """Measure everything at once; nothing is timed."""
        from . import row_quality  # noqa: PLC0415

        if means.reference is None:
            raise CellFailure("crashed", f"{case.name} has no dense logits to compare with.")
        return Prepared(row_quality.measure(case, cell.row, means.reference, means.text))


def _repeats(row: str, case: SelectionCase) -> tuple[str, ...]:
    """Why the row would repeat another one."""
    if row == "kascade_both_phases" and case.phase == "prefill":
        return ("kascade_both_phases: a prefill case has no decode steps, so this row would repeat kascade.",)
    if row == "kascade_greedy" and case.schedule in GREEDY_RULES:
        return ("kascade_greedy: the case's own schedule is greedy, so this row would repeat kascade.",)
    if row == "kascade_token" and case.granularity == "token":
        return ("kascade_token: the case selects single keys already, so this row would repeat kascade.",)
    return ()


SELECTION = Selections()
