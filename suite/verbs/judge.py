"""The verb ``attnsuite judge``: its flags, and the function that runs it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from ..errors import InputError
from .flags import NO_RESULT, directory_of, flag, limits_of, progress, resuming


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Hold backends, or a function of yours (my.py:fn), to the contract: right, wrong (how far), unsupported."""

    backends: tyro.conf.Positional[tuple[str, ...]] = ()
    """Registered names (without any: all), or FILE.py:NAME of a function f(q, k, v) or of a backend."""
    cases: Annotated[str | None, flag("PATTERNS", "all")] = None
    """Glob patterns of named problems, separated by commas."""
    random: Annotated[int | None, flag("N", "24 where a backend is named, else 0")] = None
    """How many random problems follow the named ones."""
    first: Annotated[int, flag("NUMBER")] = 0
    """Number of the first random problem."""
    seed: Annotated[int, flag("SEED")] = 0
    """Seed of the random problems."""
    out: Annotated[Path | None, flag("DIR", "runs/<UTC time>-judge")] = None
    """Directory for records and report."""
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Go on with the run in --out, asked for in the same words; judged problems are kept."""
    cell_timeout: Annotated[float, flag("SECONDS")] = 120.0
    """Time that one problem may take on one backend."""


def run(command: Judge) -> int:
    """Judge, and print the page; exit code 1 where something is wrong or nothing was judged."""
    from attnsuite import reports

    from .. import conformance
    from ..names import names_of
    from ..own import is_reference, own_or_known

    for name in ("random", "first", "seed"):
        if (getattr(command, name) or 0) < 0:
            raise InputError(f"--{name} {getattr(command, name)} must be 0 or more.")
    yours = [name for name in command.backends if is_reference(name)]
    if command.resume and yours:
        raise InputError(f"--resume: {', '.join(yours)} may have changed since; judge it anew, in another --out.")
    number = (24 if command.backends else 0) if command.random is None else command.random
    request = conformance.Request(
        backends=tuple(map(own_or_known, command.backends)) or conformance.checked_backends(None),
        cases=conformance.checked_cases(["*"] if command.cases is None else names_of(command.cases, "--cases")),
        numbers=range(command.first, command.first + number),
        seed=command.seed,
    )
    out = directory_of(command, "judge")
    limits = limits_of(command.cell_timeout)
    go_on = (lambda: f"what was judged is kept in {out}; start again") if yours else (lambda: resuming("judge", out))
    with progress(go_on) as display:
        records = conformance.run(request, out, limits, display, resume=command.resume)
    path = reports.render(out)
    print(f"{reports.conformance_overview(records)}\nreport: {path}")
    return 0 if conformance.all_right(records) else NO_RESULT
