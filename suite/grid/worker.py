"""The process of one cell: ``python -m attnsuite.suite.grid.worker``, one JSON object per line in and out.

The executor first asks it to prepare a cell (``{"do": "prepare", ...}``), then to take samples. ``answering.py``
describes the answers.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnsuite.backends import BackendFallbackWarning

from .. import typed
from ..cell import Asked, Cell, Means, Prepared
from ..errors import CellFailure, InputError
from ..kinds import kind_of, make_case
from ..kinds.attention import OpCase
from ..measure import machine
from ..measure.profile import profile
from . import probe
from .answering import answer_requests

if TYPE_CHECKING:
    from attnsuite.models import TextFile


def main() -> None:
    """Answer requests until stdin ends."""
    warnings.simplefilter("ignore", BackendFallbackWarning)  # the record carries the reasons
    sample: Callable[[], float] = _unprepared

    def answer(request: dict[str, Any]) -> Any:
        nonlocal sample
        if request["do"] == "sample":
            return sample()
        if request["do"] == "profile":
            return profile(sample, Path(request["folder"]), request["name"])
        if request["do"] == "prepare":
            prepared = _prepare(request)
            sample = prepared.take_sample or _unprepared
            return dataclasses.asdict(prepared.facts)
        return _answer(request)

    answer_requests(answer)


def _unprepared() -> float:
    raise CellFailure("crashed", "this cell has nothing that can be sampled.")


def _answer(request: dict[str, Any]) -> Any:
    """Answer a request that keeps no state."""
    match request["do"]:
        case "probe":
            cases = tuple(make_case(problem) for problem in request["cases"])
            rows, text, all_cores = tuple(request["backends"]), _text(request), request["all_cores"]
            return probe.probe(Asked(rows=rows, cases=cases, text=text, all_cores=all_cores))
        case "machine":
            return machine.measure_machine()
        case "doctor":
            return probe.examine()
        case "tune":
            from .. import tuning  # noqa: PLC0415 (it compiles for absent devices: flax, a second per process)

            case, reference = _op_case(request["case"]), Path(request["reference"])
            return tuning.try_candidates(case, request["backend"], reference, request["given"])
        case "reference":
            case = make_case(request["case"])
            return kind_of(case.kind).write_reference(case, Path(request["path"]), _text(request))
    raise CellFailure("crashed", f"the worker does not know the request {request['do']!r}.")


def _text(request: dict[str, Any]) -> TextFile | None:
    if request["text"] is None:
        return None
    from attnsuite.models import TextFile  # noqa: PLC0415 (flax)

    return TextFile(**request["text"])


def _op_case(problem: dict[str, Any]) -> OpCase:
    case = make_case(problem)
    if not isinstance(case, OpCase):
        raise InputError(f"case {case.name} is no attention call; only those are tuned.")
    return case


def _prepare(request: dict[str, Any]) -> Prepared:
    asked: Cell = typed.convert(request["cell"], Cell)
    reference = request["reference"]
    means = Means(
        reference=None if reference is None else Path(reference),
        memory_limit=request["memory_limit"],
        text=_text(request),
    )
    return kind_of(asked.kind).prepare(asked, make_case(asked.problem), means)


if __name__ == "__main__":
    main()
