"""The kind of :class:`.stack_case.StackCase`: its rows, and how a cell is made ready."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import ClassVar

from attnsuite.backends import Target, resolve
from attnsuite.backends.devices import usable_cores
from attnsuite.backends.features import Mode
from attnsuite.backends.kascade import default_kernel
from attnsuite.backends.kascade.cost import not_profitable

from ...cell import Cell, Means, Outcome, Prepared, Request
from ...measure import execution, tensor_errors
from ..kind import Kind, cell, refused
from . import stack_program
from .methods import KERNELS, METHODS, rows_of, settings_of
from .stack_case import PARTS, StackCase, schedule_of, stack_spec


class Stacks(Kind):
    """The kind of :class:`StackCase`."""

    titles: ClassVar = {
        "kascade_prefill": "kascade, prefill of a stack",
        "kascade_decode": "kascade, decode step of a stack",
    }
    case: ClassVar = StackCase

    def rows(self, case: StackCase) -> tuple[str, ...]:
        """Dense and Kascade's rows; for a single layer its parts."""
        names = rows_of(case.kind)
        whole = ("dense", *PARTS) if case.layers == 1 else tuple(name for name in names if name not in PARTS)
        return tuple(name for name in names if name in whole and (case.by_token or name != "kascade_token"))

    def cells(self, case: StackCase, request: Request) -> Iterable[Cell]:
        """A cell per row. On a CPU all rows share all cores, and dense attention is also timed on one device.

        Kernels other than XLA's code have their own ways to use all cores of one device.
        """
        target = Target.here()
        dense = resolve("auto", stack_spec(case), target).backend.name
        found = [_cell(case, row, dense, target) for row in self.rows(case) if row in request.rows]
        cores = usable_cores()
        if not request.all_cores or target.platform != "cpu" or cores == 1 or case.kv_heads % cores:
            return found
        # So the fastest dense attention is measured, not assumed.
        shared = [
            dataclasses.replace(each, devices=cores)
            if each.mode and (each.row == "dense" or kernel_of(case, each.row, target) == "xla")
            else each
            for each in found
        ]
        return [each for each in found if each.row == "dense"] + shared

    def prepare(self, cell: Cell, case: StackCase, means: Means) -> Prepared:
        """Judge the row against dense attention with everything selected, then make it ready to be timed."""
        mode: Mode = "interpret" if cell.mode == "interpret" else "native"
        outcome = Outcome(
            quality=stack_program.figures(case, cell.row),
            tokens=stack_spec(case).query_length,
            accuracy=stack_program.judge(case, cell.row, cell.devices, mode),
            notes=(
                *stack_program.plan_notes(case, cell.row),
                *stack_program.block_notes(case, cell.row, Target.here()),
                stack_program.JUDGED if mode == "native" else stack_program.INTERPRETED,
            ),
        )
        # With everything selected an approximate row must be exact: its numbers are judged by the same rule.
        if (judged := tensor_errors.judged(outcome, exact=True)).error is not None or mode == "interpret":
            return Prepared(judged)
        _, timed, measured = execution.execute(
            stack_program.stack_program(case, cell.row, cell.devices), means, cell.devices
        )
        same = {name: getattr(judged, name) for name in ("quality", "tokens", "accuracy", "notes")}
        return Prepared(dataclasses.replace(measured, **same), timed)


def _cell(case: StackCase, row: str, dense: str, target: Target) -> Cell:
    if row == "kascade_profitable":
        settings = settings_of(case, schedule=schedule_of(case))
        if not_profitable(stack_spec(case), settings) is None:
            reason = "kascade_profitable: it runs sparse here, so this row would repeat kascade."
            return refused(case, row, (reason,))
    if row in KERNELS and kernel_of(case, "kascade", target) == KERNELS[row]:
        return refused(case, row, (f"{row}: that kernel computes kascade here, so this row would repeat it.",))
    mode, reasons = "native", stack_program.refusals(case, row, target)
    if reasons and row in KERNELS and not stack_program.refusals(case, row, target, "interpret"):
        mode, reasons = "interpret", ()  # for its numbers alone
    if reasons:
        return refused(case, row, reasons)
    return cell(case, row, resolved=dense if row == "dense" else row, mode=mode, exact=METHODS[row].exact)


def kernel_of(case: StackCase, row: str, target: Target) -> str:
    """The kernel that computes a row of Kascade."""
    return KERNELS.get(row) or case.kernel or default_kernel(target)


STACK = Stacks()
