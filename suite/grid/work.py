"""What a worker process does when it is asked: functions that other modules name in a request (``process.py``).

A cell is first prepared, then sampled. The process holds what was prepared, by the cell's key: of one cell, or of all
cells of a case that share the process.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import psutil

from attnsuite.backends import Target, registry
from attnsuite.models import TextFile

from ..cell import Case, Cell, Means, Prepared, Process, Request
from ..errors import CellFailure, InputError
from ..kinds import kind_of
from ..measure import accelerator, arrays, environment, machine, memory, placement, profile, speed
from ..measure.program import Draw
from ..record import Machine, TensorError
from ..subprocess_function import register_in_subprocess, subprocess_function_of
from ..user_function import files_of, is_reference, load, register_functions
from .process import Worker

UNCONFINED = "this system cannot confine a process: the function could read and write what its user can."
_APART_SECONDS = 600.0  # the cell's own limit is shorter
is_confined = False  # set when the process starts
_PREPARED: dict[str, Prepared] = {}


def find_cells(
    rows: tuple[str, ...], cases: tuple[Case, ...], text: TextFile | None = None, all_cores: bool = False
) -> dict[str, Any]:
    """In a process of its own: the environment, and every cell of the rows. Raises InputError for what cannot run."""
    request = Request(rows=rows, cases=cases, text=text, all_cores=all_cores)
    register_functions(request.rows)
    cells = [cell for case in request.cases for cell in kind_of(case.kind).cells(case, request)]
    for reference in filter(is_reference, request.rows):
        _check_runnable(reference, [cell for cell in cells if cell.row == reference])
    return {"environment": environment.describe(), "cells": cells}


def _check_runnable(reference: str, cells: Sequence[Cell]) -> None:
    """Raise InputError, before anything is measured, if a user's function can run in none of the cases."""
    if any(cell.is_measured for cell in cells):
        return
    reasons = [reason for cell in cells for reason in cell.reasons if reason.startswith(reference)]
    found = load(reference)[1]
    why = found if found.startswith("It raised") else f"{' '.join(reasons[:1]) or 'they are not about it.'} {found}"
    raise InputError(
        f"{reference} can run in none of the {len(cells)} cases: {why} Say more with backends.from_function(f, "
        "takes=...), or take cases that it can run: attnsuite run --cases, or a suite of your own "
        "(docs/reference/suite-files.md)."
    )


def prepare(
    cell: Cell, reference: Path | None, memory_limit: int, text: TextFile | None, shared: bool
) -> dict[str, Any]:
    """The outcome of the cell's first call, and whether outputs of a timed call can be named.

    ``shared``: other cells of the case are in this process. Raises CellFailure where the cell's device is gone.
    """
    here = str(Target.here())
    if here.partition(":")[0] != cell.target.partition(":")[0]:  # JAX computes on the CPU where it finds no device
        raise CellFailure("crashed", f"the cell is for {cell.target}, and JAX now finds {here}: the device is gone.")
    if not shared:
        _PREPARED.clear()
    is_user_function = is_reference(cell.row)
    resident = psutil.Process().memory_info().rss if is_user_function else None
    before = memory.device_statistics() if shared else None
    kind, start = kind_of(cell.kind), functools.partial(subprocess, cell.row)
    if is_user_function and kind.calls_in_subprocess and not here.startswith("tpu"):  # a TPU admits one process
        register_in_subprocess(cell.row, start)
    else:
        register_functions([cell.row])
    means = Means(reference=reference, memory_limit=memory_limit, text=text, resident=resident, start=start)
    prepared = _PREPARED[cell.key] = kind.prepare(cell, cell.case, means)
    outcome = prepared.outcome
    function = subprocess_function_of(registry.get(cell.row)) if is_user_function else None
    if is_user_function and not (is_confined if function is None else function.process.is_confined):
        outcome = dataclasses.replace(outcome, notes=(*outcome.notes, UNCONFINED))
    if before is not None:
        outcome = dataclasses.replace(outcome, memory=memory.by_difference(outcome.memory, before))
    if prepared.timed is not None:
        outcome = dataclasses.replace(outcome, pinned_threads=placement.pin_pool())
    return {"outcome": outcome, "named": prepared.named is not None}


def subprocess(row: str, threads: int | None) -> Process:
    """A process for a backend, or for a function of the user, which ends with this one at the latest."""
    started: list[Worker] = []

    def worker() -> Worker:
        if not started or started[-1].closed:
            more = {} if threads is None else {"PJRT_NPROC": str(threads)}  # XLA's CPU client reads it
            started.append(Worker(memory.machine_bytes(), more, files_of([row])))
            if threads is not None:
                started[-1].ask(_APART_SECONDS, placement.bind, threads)
        return started[-1]

    def ask(*call: Any) -> Any:
        return worker().ask(_APART_SECONDS, *call)

    def close() -> None:
        started[-1].close()

    return Process(ask, lambda: worker().folder, close, ask(confined))


def confined() -> bool:
    """Whether this process is confined."""
    return is_confined


def sample(key: str, seed: int) -> dict[str, float]:
    """Seconds per call of one sample, and seconds for all of it by this process's clock."""
    start = speed.clock()
    seconds = _PREPARED[key].timed.sample(seed)
    return {"seconds": seconds, "spent": speed.clock() - start}


def on_device(key: str, seed: int) -> tuple[Any, ...]:
    """Seconds per call that the accelerator computed, those on inputs in its cache, and its state after them."""
    found, cached = _PREPARED[key].timed.on_device(seed)
    return found, cached, accelerator.nvidia_state()


def answer(key: str, seed: int, path: Path) -> None:
    """Write the cell's outputs for the inputs of ``seed``."""
    arrays.save(path, _PREPARED[key].answers(seed))  # pyright: ignore[reportOptionalCall]  (asked where it has some)


def saved_outputs(key: str, path: Path) -> int:
    """Write the outputs of one call of the last sample; returns which call."""
    prepared = _PREPARED[key]
    arrays.save(path, prepared.named(prepared.timed.saved_outputs))  # pyright: ignore[reportOptionalCall]  (as above)
    return prepared.timed.call


def profiled(key: str, raw: Path) -> None:
    """Profile one sample into this process's own folder: it may be confined to that."""
    profile.trace(lambda: sample(key, 0), raw)


def forget(key: str) -> None:
    """Drop what was prepared of a cell."""
    _PREPARED.pop(key, None)


def write_reference(case: Case, path: Path, text: TextFile | None, seed: int | None) -> None:
    """Write what judges the outputs of ``case``."""
    kind_of(case.kind).write_reference(case, path, text, None if seed is None else Draw(seed))


def judge(case: Case, outputs: Path, reference: Path, seed: int, exact: bool) -> dict[str, TensorError]:
    """The errors of outputs for the inputs of ``seed``. Raises CellFailure."""
    return kind_of(case.kind).judge(case, _load(outputs), reference, Draw(seed), exact=exact)


def recheck(case: Case, outputs: Path, draw: Draw, choice: int) -> dict[str, TensorError] | None:
    """The errors of a part of a timed call's outputs. Raises CellFailure."""
    found = kind_of(case.kind).recheck(case, _load(outputs), draw, choice)
    speed.come_to_rest()
    return found


def _load(outputs: Path) -> dict[str, Any]:
    try:
        return arrays.load(outputs)
    except (OSError, ValueError) as error:
        raise CellFailure("wrong", f"its outputs cannot be read: {error}.") from error


def measure_machine() -> Machine:
    """The machine's ceilings."""
    pin_pool()
    return machine.measure_machine()


def pin_pool() -> None:
    """Start JAX, and bind its threads to processors."""
    jax.devices()  # makes the pool
    placement.pin_pool()


def join(coordinator: str, processes: int, process: int) -> None:
    """Join the other processes; returns when all of them are there."""
    jax.distributed.initialize(coordinator, num_processes=processes, process_id=process)
