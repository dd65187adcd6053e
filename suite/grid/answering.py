"""The main loop of a worker process, the counterpart of ``process.py``: JSON lines in and out.

Only the protocol writes to the process's real stdout; output of libraries goes to stderr. When stdin ends, the parent
is gone. The process then exits at once, even in the middle of a computation, so that a killed run leaves no orphans.
A copy of the process that a plug-in forked does not answer: its answer would be taken for that of the next request.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn, TextIO

from ..errors import CellFailure, InputError

_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory")
_LONGEST = 1000  # characters of a message


def answer_requests(answer: Callable[[dict[str, Any]], Any]) -> NoReturn:
    """Reply ``{"ok": answer(request)}``, or ``{"failed": status, "message": ...}``, until stdin ends.

    A reply carries its request's ``token``. Two threads keep it and the pipe from the one that answers, which may run
    code of the user.
    """
    sys.stdout.flush()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    tokens: queue.SimpleQueue[str] = queue.SimpleQueue()
    answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, tokens), daemon=True).start()
    threading.Thread(target=_write, args=(replies, tokens, answers), daemon=True).start()
    asked = os.getpid()
    while True:
        try:
            reply = {"ok": answer(requests.get())}
            json.dumps(reply, allow_nan=False)
        except Exception as error:  # noqa: BLE001 (whatever a backend raises becomes this cell's record)
            reply = _failure(error)
        if os.getpid() != asked:
            os._exit(0)
        answers.put(reply)


def _failure(error: Exception) -> dict[str, Any]:
    message = " ".join(str(error).split())[:_LONGEST]
    if isinstance(error, InputError):
        return {"failed": "input", "message": message}
    if isinstance(error, CellFailure):
        return {"failed": error.status, "message": message}
    status = "oom" if isinstance(error, MemoryError) or any(t in message for t in _OUT_OF_MEMORY) else "crashed"
    return {"failed": status, "message": f"{type(error).__name__}: {message}"}


def _write(replies: TextIO, tokens: queue.SimpleQueue[str], answers: queue.SimpleQueue[dict[str, Any]]) -> None:
    while True:
        reply = answers.get()
        replies.write(json.dumps({"token": tokens.get(), **reply}) + "\n")
        replies.flush()


def _read(requests: queue.SimpleQueue[dict[str, Any]], tokens: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        request = json.loads(line)
        tokens.put(request.pop("token"))
        requests.put(request)
    if os.getpgrp() == os.getpid():  # what a plug-in forked ends too
        os.killpg(0, signal.SIGKILL)
    os._exit(0)
