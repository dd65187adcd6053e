"""``attnsuite judge``: backends held to the contract on the device that is here, as a grid of conformance cases."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Sequence
from pathlib import Path

from attnsuite.backends import registry
from attnsuite.testing.problems import CASES
from attnsuite.testing.verdicts import VERDICTS

from .errors import InputError
from .flag_values import names_of
from .grid.run_grid import RunGrid, resumed_request
from .grid.running import Limits
from .kinds.conformance_case import TAKES, ConformanceCase, answer_of
from .kinds.kind import Dtype
from .record import Record
from .user_function import is_reference, known_row

SUITE = "judge"


def new_judgement(
    backends: Sequence[str],
    patterns: str | None,
    numbers: range,
    seed: int,
    out: Path,
    limits: Limits,
    *,
    required: Sequence[str] = (),
    interpret: bool = False,
    dtype: Dtype | None = None,
) -> RunGrid:
    """The grid of these flags: verdicts and named problems that match, then random ones; ``seed`` draws problems.

    With ``dtype`` the named problems are asked in it. What a gate requires is among them. Raises InputError.
    """
    told = [TAKES] if any(map(is_reference, backends)) else []  # or nobody sees why a function takes so little
    named = _matching([*(["*"] if patterns is None else names_of(patterns, "--cases")), *required, *told])
    changed: dict[str, Dtype | None] = {name: dtype for name, case in CASES.items() if case.dtype != dtype}
    return RunGrid(
        suite=SUITE,
        cases=(
            *(
                ConformanceCase(name=name, seed=seed or None, interpret=interpret, dtype=changed.get(name))
                for name in named
            ),
            *(ConformanceCase(number=number, seed=seed, interpret=interpret) for number in numbers),
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


def all_right(records: Sequence[Record], named: Collection[str] = ()) -> bool:
    """Whether something was judged, something of each that is ``named``, and nothing was wrong."""
    judged = {record.requested for record in records if record.status == "ok" and record.case != TAKES}
    return bool(judged) and judged.issuperset(named) and {x.status for x in records} <= {"ok", "unsupported"}


def missing(records: Sequence[Record], required: Sequence[str]) -> list[str]:
    """A sentence for each backend and required verdict that is not answered with yes."""
    names = dict.fromkeys(record.requested for record in records)
    answers = {(record.requested, record.case): answer_of(record) for record in records}
    results = [(name, verdict, answers.get((name, verdict), "not judged")) for name in names for verdict in required]
    return [f"{name} is not {verdict}: {answer}." for name, verdict, answer in results if answer != "yes"]


def checked_verdicts(text: str) -> tuple[str, ...]:
    """The verdicts of ``--require``. Raises InputError for a name that is none."""
    names = tuple(names_of(text, "--require")) if text else ()
    for name in names:
        if name not in VERDICTS:
            raise InputError(f"--require {name} is no verdict; they are {', '.join(VERDICTS)}.")
    return names


def _matching(patterns: Sequence[str]) -> list[str]:
    known = (TAKES, *VERDICTS, *CASES)
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            raise InputError(f"--cases {pattern!r} matches no problem or verdict; they are {', '.join(known)}.")
    return [name for name in known if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
