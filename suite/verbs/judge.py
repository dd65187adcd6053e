"""The verb ``attnsuite judge``: its flags, and the function that runs it."""

from __future__ import annotations

import dataclasses
import secrets
from pathlib import Path
from typing import Annotated

import tyro

from ..errors import InputError
from .flags import NO_RESULT, DType, OnFleet, directory_of, flag, fleet_of, limits_of, progress, resuming, tell

_RANDOM, _MOST = 24, 10**5  # random problems: of backends that are named, and of one run
_WHEN_RESUMED = ("require", "badge", "cell_timeout")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Judge(OnFleet):
    """Hold backends, or a function of yours (my.py:fn), to the contract: what is right, and which verdicts it earns."""

    backends: tyro.conf.Positional[Annotated[tuple[str, ...], flag("[NAME|FILE.py:NAME ...]", "all")]] = ()
    """Registered names (without any: all), or FILE.py:NAME of a function f(q, k, v) or of a backend."""
    cases: Annotated[str | None, flag("PATTERNS", "all")] = None
    """Glob patterns of named problems and verdicts, separated by commas."""
    dtype: Annotated[DType | None, flag("DTYPE", "each problem's own", choices=DType)] = None
    """Ask the named problems in this dtype."""
    random: Annotated[int | None, flag("N", f"{_RANDOM} for backends that are named, else 0")] = None
    """How many random problems follow the named ones."""
    first: Annotated[int, flag("NUMBER")] = 0
    """Number of the first random problem."""
    seed: Annotated[int | None, flag("SEED", "another each time for a function of yours, else 0")] = None
    """Seed of the random problems, and of the arrays of the named ones."""
    require: Annotated[str | None, flag("VERDICTS", "none")] = None
    """Verdicts, separated by commas, that have to be yes: deterministic, batch_invariant, isolates, symmetric."""
    interpret: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Run kernels of other devices in their interpreter."""
    badge: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Write a badge into --out, as JSON and SVG."""
    out: Annotated[Path | None, flag("DIR", "runs/<UTC time>-judge")] = None
    """Directory for records and report."""
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Go on with the run in --out; judged problems stay."""
    cell_timeout: Annotated[float, flag("SECONDS")] = 120.0
    """Time that one problem may take on one backend."""


def run(command: Judge) -> int:
    """Judge, and print the page; exit code 1 where something is wrong, nothing was judged, or a verdict is missing."""
    from attnsuite import reports

    from ..grid.execute import execute
    from ..judgement import all_right, checked_verdicts, missing, new_judgement, resumed_judgement
    from ..user_function import is_reference

    random = (_RANDOM if command.backends else 0) if command.random is None else command.random
    fresh = secrets.randbits(32) if any(map(is_reference, command.backends)) else 0
    seed = fresh if command.seed is None else command.seed
    for name, value in (("random", random), ("first", command.first), ("seed", seed)):
        if value < 0:
            raise InputError(f"--{name} {value} must be 0 or more.")
    if random > _MOST:
        raise InputError(f"--random {random} must be at most {_MOST}; --first begins at a later one.")
    required = checked_verdicts(command.require or "")
    out, limits = directory_of(command, "judge"), limits_of(command.cell_timeout)
    if command.resume:
        given = [
            field.name
            for field in dataclasses.fields(command)
            if field.name in ("backends", "cases", "dtype", "random", "first", "seed", "interpret")
            and getattr(command, field.name) != field.default
        ]
        if given:
            raise InputError(
                f"{', '.join(given)} cannot change a run that was begun; leave it out, or start a new run."
            )
        grid = resumed_judgement(out, limits)
    else:
        numbers = range(command.first, command.first + random)
        grid = new_judgement(
            command.backends,
            command.cases,
            numbers,
            seed,
            out,
            limits,
            required=required,
            interpret=command.interpret,
            dtype=command.dtype,
        )
    with progress(lambda: resuming(command, out, _WHEN_RESUMED, grid.backends)) as display:
        records = execute(grid, display, fleet_of(command))
    path = reports.render(out)
    print(f"{reports.conformance_overview(records)}\nreport: {path}")
    for written in reports.write_badges(records, out) if command.badge else ():
        print(f"badge: {written}")
    for sentence in (lacking := missing(records, required)):
        tell(sentence)
    return 0 if all_right(records, command.backends) and not lacking else NO_RESULT
