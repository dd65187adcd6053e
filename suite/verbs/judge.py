"""The verb ``attnsuite judge``: its flags, and the function that runs it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from ..errors import InputError
from .flags import directory, flag


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Hold one backend, or a function of yours (my.py:fn), to the contract, on random problems too."""

    backend: tyro.conf.Positional[str]
    """A registered name, or FILE.py:NAME of a function f(q, k, v) or of what backends.from_function made."""
    cases: Annotated[str | None, flag("PATTERNS", "all")] = None
    """Glob patterns of named problems, separated by commas."""
    random: Annotated[int, flag("N")] = 24
    """How many random problems follow the named ones."""
    first: Annotated[int, flag("NUMBER")] = 0
    """Number of the first random problem."""
    seed: Annotated[int, flag("SEED")] = 0
    """Seed of the random problems."""
    out: Annotated[Path | None, flag("DIR", "runs/<UTC time>-judge")] = None
    """Directory for records and report."""
    cell_timeout: Annotated[float, flag("SECONDS")] = 120.0
    """Time that one problem may take."""


def run(command: Judge) -> int:
    """Judge, and print the page; exit code 1 where something is wrong or nothing was judged."""
    from ..conformance import Request, checked_cases
    from ..names import names_of
    from ..own import own_or_known
    from .selftest import judged

    for name in ("random", "first", "seed"):
        if getattr(command, name) < 0:
            raise InputError(f"--{name} {getattr(command, name)} must be 0 or more.")
    out = directory(command.out, "judge")
    request = Request(
        verb="judge",
        backends=(own_or_known(command.backend),),
        cases=checked_cases(["*"] if command.cases is None else names_of(command.cases, "--cases")),
        numbers=range(command.first, command.first + command.random),
        seed=command.seed,
    )
    return judged(request, out, command.cell_timeout, lambda: f"what was judged is kept in {out}; start again")
