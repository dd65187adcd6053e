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

import jax

from attnsuite.backends import BackendFallbackWarning, Target

from .. import typed
from ..cell import Asked, Cell, Means, Outcome, Prepared
from ..errors import CellFailure
from ..kinds import kind_of, make_case
from ..measure import machine, placement
from ..measure.profile import profile
from ..user_function import register_functions
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
            return dataclasses.asdict(prepared.outcome)
        if request["do"] not in _ANSWERS:
            raise CellFailure("crashed", f"the worker does not know the request {request['do']!r}.")
        return _ANSWERS[request["do"]](request)

    answer_requests(answer)


def _unprepared() -> float:
    raise CellFailure("crashed", "this cell has nothing that can be sampled.")


def _probed(asked: dict[str, Any]) -> Any:
    register_functions(asked["backends"])
    cases, rows = tuple(map(make_case, asked["cases"])), tuple(asked["backends"])
    return probe.probe(Asked(rows=rows, cases=cases, text=_text(asked), all_cores=asked["all_cores"]))


def _machine(asked: dict[str, Any]) -> Any:
    del asked
    jax.devices()  # makes the pool
    placement.pin_pool()
    return machine.measure_machine()


def _tuned(asked: dict[str, Any]) -> list[dict[str, Any]]:
    from .. import tuning  # noqa: PLC0415 (a cell's process starts without flax, which the tuner imports)

    jax.devices()
    placement.pin_pool()
    return tuning.try_candidates(_case(asked), asked["backend"], Path(asked["reference"]), asked["given"])


def _candidates(asked: dict[str, Any]) -> list[int | str]:
    from .. import tuning  # noqa: PLC0415 (as above)
    from ..kinds.attention import OpCase  # noqa: PLC0415

    here, given, cells = Target.here(), asked["given"], asked["cells"]
    return [tuning.count_candidates(name, typed.convert(problem, OpCase), here, given) for name, problem in cells]


def _compiled(asked: dict[str, Any]) -> dict[str, Any]:
    """What the compiler for an absent device says of a cell, or of options on trial. A process has one compiler."""
    from ..absent import candidates, compilation, schedules  # noqa: PLC0415 (as above)

    target, dump = Target.named(asked["target"]), Path(asked["dump"]) if asked["dump"] else None
    if "options" in asked:
        given = (asked["options"], asked["given"])
        return candidates.compile_candidate(_case(asked), asked["backend"], target, *given, dump)
    register_functions([asked["backend"]])

    def work() -> Outcome:
        return compilation.compile_cell(_case(asked), asked["backend"], target)

    return dataclasses.asdict(work() if dump is None else schedules.scheduled(dump, work))


def _case(asked: dict[str, Any]) -> Any:
    return make_case(asked["case"])


def _text(request: dict[str, Any]) -> TextFile | None:
    if request["text"] is None:
        return None
    from attnsuite.models import TextFile  # noqa: PLC0415 (flax)

    return TextFile(**request["text"])


def _prepare(request: dict[str, Any]) -> Prepared:
    asked: Cell = typed.convert(request["cell"], Cell)
    here = str(Target.here())
    if here.partition(":")[0] != asked.target.partition(":")[0]:  # JAX computes on the CPU where it finds no device
        raise CellFailure("crashed", f"the cell is for {asked.target}, and JAX now finds {here}: the device is gone.")
    register_functions([asked.row])
    reference = request["reference"]
    means = Means(
        reference=None if reference is None else Path(reference),
        memory_limit=request["memory_limit"],
        text=_text(request),
    )
    prepared = kind_of(asked.kind).prepare(asked, make_case(asked.problem), means)
    if prepared.take_sample is None:
        return prepared
    outcome = dataclasses.replace(prepared.outcome, pinned_threads=placement.pin_pool())
    return dataclasses.replace(prepared, outcome=outcome)


# The requests that keep no state.
_ANSWERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "probe": _probed,
    "machine": _machine,
    "doctor": lambda _: probe.examine(),
    "reference": lambda asked: kind_of(asked["case"]["kind"]).write_reference(
        _case(asked), Path(asked["path"]), _text(asked)
    ),
    "candidates": _candidates,
    "tune": _tuned,
    "compile": _compiled,
    # Returns when all processes are there.
    "join": lambda asked: jax.distributed.initialize(
        asked["coordinator"], num_processes=asked["processes"], process_id=asked["process"]
    ),
}

if __name__ == "__main__":
    main()
