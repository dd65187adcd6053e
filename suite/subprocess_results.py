"""The results of a backend in another process, for the verdict ``deterministic``.

``python -m attnsuite.suite.subprocess_results ROW MODE SEED FILE`` is that process. It computes what the
verdict compares, and writes it to the file.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from attnsuite.backends import Target, registry
from attnsuite.backends.features import Mode
from attnsuite.testing.verdicts import Arrays, InSubprocess, Subject, results

from .measure import arrays, placement
from .user_function import register_functions

_LAST = 300  # characters of what a process that failed wrote last


def results_in_subprocess(row: str, subject: Subject) -> InSubprocess | None:
    """How to compute in another process; None on a device that one process holds alone."""
    return (lambda threads: _computed(row, subject, threads)) if subject.target.platform == "cpu" else None


def _computed(row: str, subject: Subject, threads: int | None) -> dict[str, Arrays]:
    """Raises RuntimeError where the process fails.

    XLA's CPU client reads the number of its threads from ``PJRT_NPROC``. Where the platform can, the process is bound
    to as many cores.
    """
    environment = dict(os.environ) if threads is None else {**os.environ, "PJRT_NPROC": str(threads)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results"
        command = [sys.executable, "-m", __name__, row, subject.mode, str(subject.seed), str(path)]
        done = subprocess.run(  # noqa: S603 (this interpreter and this module)
            command, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            said = " ".join(done.stderr.split())[-_LAST:]
            raise RuntimeError(f"it ran here, and failed in another process: {said}")
        found: dict[str, Arrays] = {}
        for key, array in arrays.load(path).items():
            label, _, name = key.partition("|")
            found.setdefault(label, {})[name] = array
        return found


def _main(row: str, mode: Mode, seed: int, path: Path) -> None:
    if "PJRT_NPROC" in os.environ:
        placement.bind(int(os.environ["PJRT_NPROC"]))
    register_functions([row])
    subject = Subject(registry.get(row), Target.here(), mode, seed)
    found = {f"{label}|{name}": x for label, of_one in results(subject).items() for name, x in of_one.items()}
    arrays.save(path, found)


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))  # pyright: ignore[reportArgumentType]  (the words that _computed gives)
