"""The compiling process for one kind of device: ``python -m attnsuite.suite.absent.worker``, JSON lines in and out.

The process keeps one topology until it ends, because a second one in the same process is not allowed.
"""

from __future__ import annotations

from typing import Any

from attnsuite.backends import Target

from ..grid.answering import answer_requests
from ..kinds import make_case
from .candidates import compile_candidate
from .compilation import compile_cell


def main() -> None:
    """Answer requests until stdin ends: ``{"case", "backend", "target"}``, and ``options`` and ``given`` to tune."""
    answer_requests(_compile)


def _compile(request: dict[str, Any]) -> dict[str, Any]:
    case: Any = make_case(request["case"])
    target = Target.named(request["target"])
    if "options" in request:
        return compile_candidate(case, request["backend"], target, request["options"], request["given"])
    return compile_cell(case, request["backend"], target)


if __name__ == "__main__":
    main()
