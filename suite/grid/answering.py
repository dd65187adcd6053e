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
from typing import Any, NoReturn

from ..errors import CellFailure, InputError

_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory")
_LONGEST = 1000  # characters of a message


def answer_requests(answer: Callable[[dict[str, Any]], Any]) -> NoReturn:
    """Reply ``{"ok": answer(request)}``, or ``{"failed": status, "message": ...}``, until stdin ends."""
    sys.stdout.flush()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    asked = os.getpid()
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    while True:
        try:
            reply = json.dumps({"ok": answer(requests.get())}, allow_nan=False)
        except Exception as error:  # noqa: BLE001 (whatever a backend raises becomes this cell's record)
            reply = json.dumps(_failure(error))
        if os.getpid() != asked:
            os._exit(0)
        replies.write(reply + "\n")
        replies.flush()


def _failure(error: Exception) -> dict[str, Any]:
    message = " ".join(str(error).split())[:_LONGEST]
    if isinstance(error, InputError):
        return {"failed": "input", "message": message}
    if isinstance(error, CellFailure):
        return {"failed": error.status, "message": message}
    status = "oom" if isinstance(error, MemoryError) or any(t in message for t in _OUT_OF_MEMORY) else "crashed"
    return {"failed": status, "message": f"{type(error).__name__}: {message}"}


def _read(requests: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        requests.put(json.loads(line))
    if os.getpgrp() == os.getpid():  # what a plug-in forked ends too
        os.killpg(0, signal.SIGKILL)
    os._exit(0)
