"""The compiling process for one kind of device: ``python -m attnsuite.suite.absent.worker``, JSON lines in and out.

The process keeps one topology until it ends, because a second one in the same process is not allowed.
"""

from __future__ import annotations

from typing import Any

from attnsuite.backends import Target

from ..grid.answering import answer_requests
from ..kinds import make_case
from .compilation import compile_cell


def main() -> None:
    """Answer requests (``{"case", "backend", "target"}``) until stdin ends."""
    answer_requests(_compile)


def _compile(request: dict[str, Any]) -> dict[str, Any]:
    case: Any = make_case(request["case"])
    return compile_cell(case, request["backend"], Target.named(request["target"]))


if __name__ == "__main__":
    main()
