"""The verb ``attnsuite selftest``: its flags, and the function that runs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from .flags import NO_RESULT, directory_of, flag, limits_of, progress, resuming

if TYPE_CHECKING:
    from ..conformance import Request


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Selftest:
    """Hold every backend to the contract on this device: what is right, wrong (how far), and refused."""

    backends: Annotated[str | None, flag("NAMES", "all that are registered")] = None
    """Backends to judge, separated by commas."""
    cases: Annotated[str | None, flag("PATTERNS", "all")] = None
    """Glob patterns of problems, separated by commas."""
    out: Annotated[Path | None, flag("DIR", "runs/<UTC time>-selftest")] = None
    """Directory for records and report."""
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Go on with the run in --out; judged problems are kept."""
    cell_timeout: Annotated[float, flag("SECONDS")] = 120.0
    """Time that one problem may take on one backend."""


def run(command: Selftest) -> int:
    """Judge, and print the page; exit code 1 where something is wrong or nothing was judged."""
    from ..conformance import Request, checked_backends, checked_cases
    from ..names import names_of

    out = directory_of(command, "selftest")
    backends = None if command.backends is None else names_of(command.backends, "--backends")
    cases = ["*"] if command.cases is None else names_of(command.cases, "--cases")
    request = Request(verb="selftest", backends=checked_backends(backends), cases=checked_cases(cases))
    return judged(request, out, command.cell_timeout, lambda: resuming("selftest", out), resume=command.resume)


def judged(request: Request, out: Path, seconds: float, interrupted: Callable[[], str], *, resume: bool = False) -> int:
    """Judge what is requested, write the page and print it; the exit code. ``interrupted`` says how to go on."""
    from attnsuite import reports

    from .. import conformance

    limits = limits_of(seconds)
    with progress(interrupted) as display:
        records = conformance.run(request, out, limits, display, resume=resume)
    path = reports.render(out)
    print(f"{reports.conformance_overview(records)}\nreport: {path}")
    return 0 if conformance.all_right(records) else NO_RESULT
