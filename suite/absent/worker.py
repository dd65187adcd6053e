"""Compiles for one kind of device: ``python -m attnsuite.suite.absent.worker``, JSON lines in and out.

As ``worker.py`` it keeps the real stdout for its answers and ends at once when stdin does. It holds one topology for
its whole life, because a second one in the same process is not allowed.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from typing import Any

from attnsuite.backends import Target

from ..cases import make_case
from .compilation import compile_cell, one_line


def main() -> None:
    """Answer requests (``{"case", "backend", "target"}``) until stdin ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a compiler prints goes to stderr
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    while True:
        request = requests.get()
        try:
            case: Any = make_case(request["case"])
            answer = {"ok": compile_cell(case, request["backend"], Target.named(request["target"]))}
        except Exception as error:  # noqa: BLE001 (the process answers whatever happens)
            answer = {"failed": "crashed", "message": one_line(error)}
        replies.write(json.dumps(answer, allow_nan=False) + "\n")
        replies.flush()


def _read(requests: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        requests.put(json.loads(line))
    os._exit(0)


if __name__ == "__main__":
    main()
