"""The references that judge cells: each is computed once per problem, kept in a file, and shared by the cells."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attnsuite.models import TextFile

from .. import typed
from ..cell import Case
from ..errors import CellFailure
from ..kinds import kind_of, problem_of
from ..measure.memory import machine_bytes
from ..measure.program import Draw
from ..record import TensorError
from . import folders, work
from .process import Worker

_REFERENCE_SECONDS = 600.0  # at least: the oracle is slower than a cell may be
_REFERENCE_SHARE = 0.9  # of the machine's memory


class References:
    """Computes references in one process for the whole run, keeps them in a temporary directory, and judges by them.

    Outputs are judged there and not in the process of their cell, which may have loaded code of the user. ``seed``
    draws the inputs of the judged calls. It is told to a cell when its program is compiled.
    """

    def __init__(self, seconds: float, text: TextFile | None = None) -> None:
        self._text = text
        self._seconds = max(seconds, _REFERENCE_SECONDS)
        folders.sweep()
        self._directory = folders.make()
        self.folder = Path(self._directory.name)
        self._worker: Worker | None = None
        self._paths: dict[tuple[Any, ...], Path] = {}
        self._digests: dict[Path, str] = {}
        self.seed = secrets.randbits(32)

    def path(self, case: Case, mode: str | None = "native", *, drawn: bool = False) -> Path | None:
        """The .npz of ``case`` run in ``mode``, computed at the first call; None if the case brings its own comparison.

        With ``drawn`` it is for the inputs of :attr:`seed`, else for those that follow from the case. Raises
        CellFailure where the reference cannot be computed.
        """
        judges = kind_of(case.kind).judged_by(case, mode)
        if not judges:
            return None
        for known in judges:
            if (found := self._paths.get((drawn, *_problem(known)))) is not None:
                return found
        path = self.folder / f"{len(self._paths)}.npz"
        try:
            self._ask(work.write_reference, judges[0], path, self._text, self.seed if drawn else None)
        except CellFailure as failure:
            raise CellFailure(failure.status, f"there is no reference to judge by: {failure.message}") from failure
        self._paths[(drawn, *_problem(judges[0]))] = path
        self._digests[path] = _digest(path)
        return path

    def judge(
        self, case: Case, mode: str | None, reference: Path, outputs: Path, *, exact: bool
    ) -> dict[str, TensorError]:
        """The errors of a cell's outputs for the inputs of :attr:`seed`, in a file of ``measure/arrays.py``.

        Raises CellFailure for what is no such file or has the wrong form, and where somebody has changed the reference.
        """
        if _digest(reference) != self._digests[reference]:
            raise CellFailure("crashed", "the file of the reference was changed by another process; run it again.")
        judged = next(iter(kind_of(case.kind).judged_by(case, mode)))
        found = self._ask(work.judge, judged, outputs, reference, self.seed, exact)
        return typed.convert(found, dict[str, TensorError])

    def recheck(self, case: Case, outputs: Path, seed: int, call: int) -> dict[str, TensorError] | None:
        """The errors of a part of a timed call, chosen at random; None where its kind cannot judge it."""
        found = self._ask(work.recheck, case, outputs, Draw(seed, call), secrets.randbits(32))
        return None if found is None else typed.convert(found, dict[str, TensorError])

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self._worker is None:
            # A TPU admits one process, and a GPU's memory is for the cells: this process sees CPUs only.
            self._worker = Worker(int(_REFERENCE_SHARE * machine_bytes()), {"JAX_PLATFORMS": "cpu"})
        try:
            return self._worker.ask(self._seconds, function, *arguments)
        except CellFailure as failure:
            if failure.status != "wrong":
                self._worker.close()
                self._worker = None
            raise

    def close(self) -> None:
        """End the process and remove the files."""
        if self._worker is not None:
            self._worker.close()
        self._directory.cleanup()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _problem(case: Case) -> tuple[Any, ...]:
    """The fields of a case without its name."""
    return tuple(item for item in problem_of(case).items() if item[0] != "name")
