"""The process of one cell: ``python -m attnsuite.suite.grid.worker``, one JSON object per line in and out.

The runner asks (``{"do": "prepare", ...}``), the worker answers with ``{"ok": ...}`` or ``{"failed":
status, "message": ...}``. The protocol has the process's real stdout to itself: whatever a library prints
goes to stderr. When stdin ends (the runner is gone, however it went) the process exits at once, even in the
middle of a computation, so that a killed run leaves no orphans.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from attnsuite.backends import BackendFallbackWarning

from .. import tuning, typed
from ..cell import Asked, Cell, Means, Prepared
from ..errors import CellFailure, InputError
from ..kinds import kind_of, make_case
from ..kinds.attention import OpCase
from ..measure import machine
from . import probe

_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory")


def main() -> None:
    """Answer requests until stdin ends."""
    replies = _take_stdout()
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    warnings.simplefilter("ignore", BackendFallbackWarning)  # the record carries the reasons
    sample: Callable[[], float] = _unprepared
    while True:
        request = requests.get()
        try:
            reply: Any
            if request["do"] == "sample":
                reply = sample()
            elif request["do"] == "prepare":
                prepared = _prepare(request)
                sample, reply = prepared.take_sample or _unprepared, dataclasses.asdict(prepared.facts)
            else:
                reply = _answer(request)
            _send(replies, {"ok": reply})
        except Exception as error:  # noqa: BLE001 (whatever a backend raises becomes this cell's record)
            _send(replies, _failure(error))


def _unprepared() -> float:
    raise CellFailure("crashed", "this cell has nothing that can be sampled.")


def _answer(request: dict[str, Any]) -> Any:
    """The requests that keep no state."""
    match request["do"]:
        case "probe":
            cases = tuple(make_case(problem) for problem in request["cases"])
            rows, text, all_cores = tuple(request["backends"]), request["text"], request["all_cores"]
            return probe.probe(Asked(rows=rows, cases=cases, text=text, all_cores=all_cores))
        case "machine":
            return machine.measure_machine()
        case "doctor":
            return probe.examine()
        case "tune":
            return tuning.try_candidates(_op_case(request["case"]), request["backend"], Path(request["reference"]))
        case "reference":
            case = make_case(request["case"])
            return kind_of(case.kind).write_reference(case, Path(request["path"]), request["text"])
    raise CellFailure("crashed", f"the worker does not know the request {request['do']!r}.")


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
        text=request["text"],
    )
    return kind_of(asked.kind).prepare(asked, make_case(asked.problem), means)


def _failure(error: Exception) -> dict[str, Any]:
    message = " ".join(str(error).split())[:1000]
    if isinstance(error, InputError):
        return {"failed": "input", "message": message}
    if isinstance(error, CellFailure):
        return {"failed": error.status, "message": message}
    status = "oom" if isinstance(error, MemoryError) or any(t in message for t in _OUT_OF_MEMORY) else "crashed"
    return {"failed": status, "message": f"{type(error).__name__}: {message}"}


def _take_stdout() -> TextIO:
    """The real stdout, for replies; file descriptor 1 becomes stderr."""
    sys.stdout.flush()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _read(requests: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        requests.put(json.loads(line))
    os._exit(0)


def _send(replies: TextIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply, allow_nan=False) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
