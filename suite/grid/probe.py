"""Runs in a process of its own: finds the devices and backends of this machine, and the cells of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from attnsuite.backends import AttentionSpec, Target, registry, support
from attnsuite.models import TextFile

from .. import kinds, user_function
from ..cell import Case, Cell, Request
from ..errors import InputError
from ..measure import environment
from .executors import is_measured


def find_cells(
    rows: tuple[str, ...], cases: tuple[Case, ...], text: TextFile | None = None, all_cores: bool = False
) -> dict[str, Any]:
    """The environment, and every cell of a ``cell.Request``. Raises InputError for what cannot run."""
    request = Request(rows=rows, cases=cases, text=text, all_cores=all_cores)
    user_function.register_functions(request.rows)
    cells = [cell for case in request.cases for cell in kinds.kind_of(case.kind).cells(case, request)]
    for reference in filter(user_function.is_reference, request.rows):
        _check_runnable(reference, [cell for cell in cells if cell.row == reference])
    return {"environment": environment.describe(), "cells": cells}


def _check_runnable(reference: str, cells: Sequence[Cell]) -> None:
    """Raise InputError, before anything is measured, if a user's function can run in none of the cases."""
    if any(is_measured(cell) for cell in cells):
        return
    reasons = [reason for cell in cells for reason in cell.reasons if reason.startswith(reference)]
    found = user_function.load(reference)[1]
    why = found if found.startswith("It raised") else f"{' '.join(reasons[:1]) or 'they are not about it.'} {found}"
    raise InputError(
        f"{reference} can run in none of the {len(cells)} cases: {why} Say more with backends.from_function(f, "
        "takes=...), or take cases that it can run: attnsuite run --cases, or a suite of your own "
        "(docs/reference/suite-files.md)."
    )


# The problems of a transformer, for which doctor asks every backend.
_CALL = AttentionSpec(
    batch=1, query_length=1024, key_value_length=1024, num_heads=8, num_kv_heads=2, head_dim=64, dtype="bfloat16",
    is_causal=True, needs_grad=False,
)  # fmt: skip
_DOCTOR_PROBLEMS = {
    "forward": _CALL,
    "forward+backward": dataclasses.replace(_CALL, needs_grad=True),
    "packed documents": dataclasses.replace(_CALL, has_segment_ids=True),
    "decode step": dataclasses.replace(_CALL, query_length=1, head_dim=128, value_head_dim=128, has_positions=True),
}

# A device of each platform: doctor groups the backends by those that they are for.
_DOCTOR_DEVICES = {"CPU": Target("cpu"), "NVIDIA GPU": Target("cuda", "h100"), "TPU": Target("tpu", "v5e")}


def examine() -> dict[str, Any]:
    """The content of ``doctor``: the environment, each backend's mode or reasons in each problem, and broken kinds.

    A backend's ``devices`` are the platforms where it takes one of the problems natively, as it is installed here.
    """
    target = Target.here()
    found = []
    for name in registry.names():
        backend = registry.get(name)
        problems = {}
        for label, spec in _DOCTOR_PROBLEMS.items():
            answers = {mode: support(backend, spec, target, mode) for mode in ("native", "interpret")}
            mode = next((mode for mode, answer in answers.items() if answer), None)
            # What stands against the interpreter beside these: a package that is missing or broken.
            reasons = dict.fromkeys(answers["native"].reasons)
            if mode is None:
                reasons |= dict.fromkeys(x for x in answers["interpret"].reasons if not x.startswith("mode="))
            problems[label] = {"mode": mode, "reasons": list(reasons)}
        specs = _DOCTOR_PROBLEMS.values()
        devices = [
            label for label, device in _DOCTOR_DEVICES.items() if any(support(backend, spec, device) for spec in specs)
        ]
        found.append({"name": name, "exact": backend.exact, "devices": devices, "problems": problems})
    return {"environment": environment.describe(), "backends": found, "kinds": list(kinds.faults())}
