"""``attnsuite judge``: backends held to the contract on the device that is here, as a grid of conformance cases."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path

from attnsuite.backends import registry
from attnsuite.testing.problems import CASES

from .errors import InputError
from .grid.run import RunGrid, resumed_request
from .grid.running import Limits
from .kinds.conformance import ConformanceCase
from .names import names_of
from .record import Record
from .user_function import known_row

SUITE = "judge"


def new_judgement(
    backends: Sequence[str], patterns: str | None, numbers: range, seed: int, out: Path, limits: Limits
) -> RunGrid:
    """The grid of these flags: named problems that match, then random ones of ``seed``. Raises InputError."""
    named = _matching(["*"] if patterns is None else names_of(patterns, "--cases"))
    return RunGrid(
        suite=SUITE,
        cases=(
            *(ConformanceCase(name=name) for name in named),
            *(ConformanceCase(number=number, seed=seed) for number in numbers),
        ),
        backends=tuple(dict.fromkeys(map(known_row, backends or registry.names()))),
        out=out,
        limits=limits,
    )


def resumed_judgement(out: Path, limits: Limits) -> RunGrid:
    """The grid that was begun in ``out``. Raises InputError where something else was."""
    found = resumed_request(None, None, None, None, out, limits)
    if found.suite != SUITE:
        raise InputError(
            f"{out} holds a run of the suite {found.suite}; go on with attnsuite run --resume --out {out}."
        )
    return found


def all_right(records: Sequence[Record]) -> bool:
    """Whether something was judged, and nothing was wrong."""
    statuses = {record.status for record in records}
    return "ok" in statuses and statuses <= {"ok", "unsupported"}


def _matching(patterns: Sequence[str]) -> list[str]:
    for pattern in patterns:
        if not fnmatch.filter(CASES, pattern):
            raise InputError(f"--cases {pattern!r} matches no problem; they are {', '.join(CASES)}.")
    return [name for name in CASES if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
