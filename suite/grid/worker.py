"""A process that computes cells: ``python -m attnsuite.suite.grid.worker``, the counterpart of ``process.py``.

A request is a line of JSON that holds a call (``call.py``), and the answer is a line of JSON. Only the protocol writes
to the process's real stdout; output of libraries goes to stderr. When stdin ends, the parent is gone. The process then
exits at once, even in the middle of a computation, so that a killed run leaves no orphans. A forked copy of the process
does not reply: the parent would read its reply as the answer to the next request.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any, NoReturn, TextIO

from attnsuite.backends import BackendFallbackWarning

from ..errors import CellFailure, InputError
from . import call, work
from .confine import END_OF_WRITABLE, confine, readable_beside

_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory")
_LONGEST = 1000  # characters of a message


def main() -> None:
    """Answer requests until stdin ends; confined, if there are folders and files: ``FOLDER... -- FILE...``."""
    warnings.simplefilter("ignore", BackendFallbackWarning)  # the record carries the reasons
    if sys.argv[1:]:
        end = sys.argv.index(END_OF_WRITABLE)
        work.is_confined = confine(map(Path, sys.argv[1:end]), readable_beside(map(Path, sys.argv[end + 1 :])))
    answer_requests()


def answer_requests() -> NoReturn:
    """Reply ``{"ok": answer}``, or ``{"failed": status, "message": ...}``, until stdin ends.

    A reply carries its request's ``token``. Two threads keep it and the pipes from the one that answers, which may run
    code of the user; for that code stdin is empty.
    """
    lines = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout.flush()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    tokens: queue.SimpleQueue[str] = queue.SimpleQueue()
    answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines, requests, tokens), daemon=True).start()
    threading.Thread(target=_write, args=(replies, tokens, answers), daemon=True).start()
    pid = os.getpid()
    while True:
        try:
            reply = {"ok": call.made(requests.get())()}
            json.dumps(reply, allow_nan=False, default=dataclasses.asdict)
        except BaseException as error:  # noqa: BLE001 (whatever a backend raises becomes this cell's record)
            reply = _failure(error)
        if os.getpid() != pid:
            os._exit(0)
        answers.put(reply)


def _failure(error: BaseException) -> dict[str, Any]:
    message = " ".join(str(error).split())[:_LONGEST]
    if isinstance(error, InputError):
        return {"failed": "input", "message": message}
    if isinstance(error, CellFailure):
        return {"failed": error.status, "message": message}
    status = "oom" if isinstance(error, MemoryError) or any(t in message for t in _OUT_OF_MEMORY) else "crashed"
    return {"failed": status, "message": f"{type(error).__name__}: {message}".removesuffix(": ")}


def _write(replies: TextIO, tokens: queue.SimpleQueue[str], answers: queue.SimpleQueue[dict[str, Any]]) -> None:
    while True:
        reply = answers.get()
        replies.write(json.dumps({"token": tokens.get(), **reply}, default=dataclasses.asdict) + "\n")
        replies.flush()


def _read(lines: TextIO, requests: queue.SimpleQueue[dict[str, Any]], tokens: queue.SimpleQueue[str]) -> None:
    for line in lines:
        request = json.loads(line)
        tokens.put(request.pop("token"))
        requests.put(request)
    if os.getpgrp() == os.getpid():  # what a plug-in forked ends too
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
