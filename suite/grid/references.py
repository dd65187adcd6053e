"""The references that judge cells: each is computed once per problem, kept in a file, and shared by the cells."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cell import Case
from ..errors import CellFailure
from ..kinds import kind_of, problem_of
from ..measure.memory import machine_bytes
from .process import Worker

if TYPE_CHECKING:
    from attnsuite.models import TextFile

_REFERENCE_SECONDS = 600.0  # at least: the oracle is slower than a cell may be
_REFERENCE_SHARE = 0.9  # of the machine's memory


class References:
    """Computes references in one process for the whole run and keeps them in a temporary directory."""

    def __init__(self, seconds: float, text: TextFile | None = None) -> None:
        self._text = text
        self._seconds = max(seconds, _REFERENCE_SECONDS)
        self._directory = tempfile.TemporaryDirectory(prefix="attnsuite-")
        self.folder = Path(self._directory.name)
        self._worker: Worker | None = None
        self._paths: dict[tuple[Any, ...], Path] = {}

    def path(self, case: Case, mode: str | None = "native") -> Path | None:
        """The .npz of ``case`` run in ``mode``, computed at the first call; None if the case brings its own comparison.

        Raises CellFailure where the reference cannot be computed.
        """
        judges = kind_of(case.kind).judged_by(case, mode)
        if not judges:
            return None
        for known in judges:
            if _problem(known) in self._paths:
                return self._paths[_problem(known)]
        case = judges[0]
        path = self.folder / f"{len(self._paths)}.npz"
        if self._worker is None:
            self._worker = Worker(int(_REFERENCE_SHARE * machine_bytes()))
        try:
            self._worker.ask(
                {"do": "reference", "case": problem_of(case), "path": str(path), "text": text_words(self._text)},
                self._seconds,
            )
        except CellFailure as failure:
            self._worker.close()
            self._worker = None
            raise CellFailure(failure.status, f"there is no reference to judge by: {failure.message}") from failure
        self._paths[_problem(case)] = path
        return path

    def close(self) -> None:
        """End the process and remove the files."""
        if self._worker is not None:
            self._worker.close()
        self._directory.cleanup()


def text_words(text: TextFile | None) -> dict[str, Any] | None:
    """The text in a question to a worker."""
    return None if text is None else dataclasses.asdict(text)


def _problem(case: Case) -> tuple[Any, ...]:
    """The fields of a case without its name."""
    return tuple(item for item in problem_of(case).items() if item[0] != "name")
