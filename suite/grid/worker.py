"""The process of one cell, or of a case's cells: ``python -m attnsuite.suite.grid.worker``, lines of JSON in and out.

The executor first asks it to prepare a cell (``{"do": "prepare", ...}``), then to take samples. Requests of cells that
share the process say which one is meant (``as``). ``answering.py`` describes the answers.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import psutil

from attnsuite.backends import BackendFallbackWarning, Target

from .. import typed
from ..cell import Asked, Cell, Means, Outcome, Prepared
from ..errors import CellFailure
from ..kinds import kind_of, make_case
from ..measure import arrays, machine, memory, placement, speed
from ..measure.fresh import Draw
from ..measure.profile import profile
from ..record import TensorError
from ..user_function import is_reference, register_functions
from . import probe
from .answering import answer_requests
from .confine import confine, readable_beside

if TYPE_CHECKING:
    from attnsuite.models import TextFile


def main() -> None:
    """Answer requests until stdin ends."""
    warnings.simplefilter("ignore", BackendFallbackWarning)  # the record carries the reasons
    is_confined = _confined(sys.argv[1:])
    cells: dict[str, Prepared] = {}

    def answer(request: dict[str, Any]) -> Any:
        name = request.get("as", "")
        if request["do"] == "forget":
            return cells.pop(name, None) and None
        if request["do"] == "prepare":
            prepared = cells[name] = _prepare(request, is_confined=is_confined)
            return {
                "outcome": dataclasses.asdict(prepared.outcome),
                "named": prepared.named is not None,
            }
        if request["do"] in _OF_PREPARED:
            return _OF_PREPARED[request["do"]](cells.get(name, Prepared(Outcome())), request)
        if request["do"] not in _ANSWERS:
            raise CellFailure("crashed", f"the worker does not know the request {request['do']!r}.")
        return _ANSWERS[request["do"]](request)

    answer_requests(answer)


def _confined(arguments: list[str]) -> bool:
    """Confine this process, if it has a directory of its own and files of the user: ``OWN FILE...``."""
    return bool(arguments) and confine(Path(arguments[0]), readable_beside(map(Path, arguments[1:])))


def _sampled(prepared: Prepared, asked: dict[str, Any]) -> dict[str, Any]:
    if prepared.timed is None:
        raise CellFailure("crashed", "this cell has nothing that can be sampled.")
    start = speed.clock()
    seconds = prepared.timed.sample(asked["seed"], asked["choice"])
    return {"seconds": seconds, "spent": speed.clock() - start}


def _answered(prepared: Prepared, asked: dict[str, Any]) -> None:
    if prepared.answers is None:
        raise CellFailure("crashed", "this cell has no answers.")
    arrays.save(Path(asked["path"]), prepared.answers(asked["seed"]))


def _kept(prepared: Prepared, asked: dict[str, Any]) -> int:
    if prepared.timed is None or prepared.named is None:
        raise CellFailure("crashed", "this cell has kept nothing.")
    arrays.save(Path(asked["path"]), prepared.named(prepared.timed.kept))
    return prepared.timed.call


def _profiled(prepared: Prepared, asked: dict[str, Any]) -> tuple[str, ...]:
    return profile(
        lambda: _sampled(prepared, {"seed": 0, "choice": 0})["seconds"], Path(asked["folder"]), asked["name"]
    )


def _judged(asked: dict[str, Any]) -> dict[str, Any]:
    case, outputs = _case(asked), _load(asked)
    kind, reference = kind_of(case.kind), Path(asked["reference"])
    return _as_json(kind.judge(case, outputs, reference, Draw(asked["seed"]), exact=asked["exact"]))


def _rechecked(asked: dict[str, Any]) -> dict[str, Any] | None:
    case, outputs = _case(asked), _load(asked)
    found = kind_of(case.kind).recheck(case, outputs, Draw(asked["seed"], asked["call"]), asked["choice"])
    speed.come_to_rest()
    return None if found is None else _as_json(found)


def _as_json(errors: Mapping[str, TensorError]) -> dict[str, Any]:
    return {name: dataclasses.asdict(error) for name, error in errors.items()}


def _load(asked: dict[str, Any]) -> dict[str, Any]:
    try:
        return arrays.load(Path(asked["outputs"]))
    except (OSError, ValueError) as error:
        raise CellFailure("wrong", f"its outputs cannot be read: {error}.") from error


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


def _prepare(request: dict[str, Any], *, is_confined: bool) -> Prepared:
    asked: Cell = typed.convert(request["cell"], Cell)
    here = str(Target.here())
    if here.partition(":")[0] != asked.target.partition(":")[0]:  # JAX computes on the CPU where it finds no device
        raise CellFailure("crashed", f"the cell is for {asked.target}, and JAX now finds {here}: the device is gone.")
    is_own = is_reference(asked.row)
    resident = psutil.Process().memory_info().rss if is_own else None
    before = memory.device_statistics() if "as" in request else None
    register_functions([asked.row])
    reference = request["reference"]
    means = Means(
        reference=None if reference is None else Path(reference),
        memory_limit=request["memory_limit"],
        text=_text(request),
        resident=resident,
    )
    prepared = kind_of(asked.kind).prepare(asked, make_case(asked.problem), means)
    outcome = prepared.outcome
    if is_own and not is_confined:
        outcome = dataclasses.replace(outcome, notes=(*outcome.notes, _UNCONFINED))
    if before is not None:
        outcome = dataclasses.replace(outcome, memory=memory.by_difference(outcome.memory, before))
    if prepared.timed is not None:
        outcome = dataclasses.replace(outcome, pinned_threads=placement.pin_pool())
    return dataclasses.replace(prepared, outcome=outcome)


_UNCONFINED = "this system cannot confine a process: the function could read and write what its user can."

# The requests about the cell that is prepared.
_OF_PREPARED: dict[str, Callable[[Prepared, dict[str, Any]], Any]] = {
    "answer": _answered,
    "sample": _sampled,
    "kept": _kept,
    "profile": _profiled,
}

# The requests that keep no state.
_ANSWERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "probe": _probed,
    "machine": _machine,
    "doctor": lambda _: probe.examine(),
    "reference": lambda asked: kind_of(asked["case"]["kind"]).write_reference(
        _case(asked), Path(asked["path"]), _text(asked), None if asked["seed"] is None else Draw(asked["seed"])
    ),
    "judge": _judged,
    "recheck": _rechecked,
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
