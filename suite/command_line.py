"""The command ``attnsuite``: run a suite, look at the machine, render a report again, compare two runs.

Exit codes: 0 when the command did what it was asked (failed cells are results), 2 for input that cannot be
used (one sentence on stderr), 130 after Ctrl-C (what is done is kept).
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

import reports
from backends import Target
from suite.cases import OpCase
from suite.doctor import describe, examine_here
from suite.errors import InputError
from suite.memory import machine_bytes
from suite.progress import ProgressDisplay
from suite.run import RunRequest, execute, new_request, resumed_request
from suite.runner import Limits
from suite.store import MANIFEST, RECORDS, parse_records
from suite.suites import find_suite, select
from suite.summary import summary_lines

_INTERRUPTED = 130
_BAD_INPUT = 2
_MEMORY_SHARE = 0.7  # of the machine, for one cell; the other cells of its case wait beside it
_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def _flag(metavar: str, default: str) -> Any:
    """How a flag that may be left out stands in the help."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Measure every backend on every case of a suite and write a report."""

    suite: Annotated[str | None, _flag("NAME|FILE", "quick")] = None
    """quick, full, or the path of a .toml file."""
    backends: Annotated[str | None, _flag("NAMES", "all that are registered")] = None
    """Backends to compare, separated by commas."""
    cases: Annotated[str | None, _flag("PATTERNS", "all of the suite")] = None
    """Glob patterns of case names, separated by commas."""
    out: Annotated[Path | None, _flag("DIR", "runs/<UTC time>-<suite>")] = None
    """Directory for records and report."""
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff, _flag("", "off")] = False
    """Go on with the run in --out; finished cells are kept."""
    text: Annotated[Path | None, _flag("FILE", "prose that ships with Python")] = None
    """Text (UTF-8) to measure perplexity on."""
    cell_timeout: Annotated[float, _flag("SECONDS", "120")] = 120.0
    """Time that a cell may take to get ready, and again for its samples."""
    cell_memory: Annotated[str | None, _flag("SIZE", "70% of the machine")] = None
    """Memory that a cell may hold, such as 4GiB or 500MB."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Doctor:
    """Show devices, versions, and for each backend the mode it would run in or why it would not."""

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Write JSON to stdout."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Render the report of a run again from its records."""

    run_dir: tyro.conf.Positional[Path]
    """Directory of the run."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compare:
    """Hold the second run against the first, cell by cell, as Markdown."""

    run_a: tyro.conf.Positional[Path]
    """Directory of the first run."""
    run_b: tyro.conf.Positional[Path]
    """Directory of the second run."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tune:
    """Search block sizes: timed where the device is here, ranked by what compiles where it is not."""

    backends: Annotated[str, _flag("NAMES", "kvax")] = "kvax"
    """Backends to tune, separated by commas."""
    target: Annotated[str, _flag("NAME", "here")] = "here"
    """Device to tune for: here, or a kind such as h100."""
    suite: Annotated[str, _flag("NAME|FILE", "full")] = "full"
    """Suite whose op cases are tuned for."""
    cases: Annotated[str, _flag("PATTERNS", "forward-backward-s4096-h8k8-d128-bf16")] = (
        "forward-backward-s4096-h8k8-d128-bf16"
    )
    """Glob patterns of case names, separated by commas."""
    out: Annotated[Path, _flag("FILE", "tuned.json")] = Path("tuned.json")
    """JSON to add the results to; pass it to a backend as its option `tuned`."""


Command = (
    Annotated[Run, tyro.conf.subcommand("run")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[Tune, tyro.conf.subcommand("tune")]
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of ``attnsuite``; exits the process."""
    command = tyro.cli(
        Command,  # pyright: ignore[reportArgumentType]  (a union of annotated types is a type to tyro)
        prog="attnsuite",
        description="Which attention implementation, for your shapes, on your device: measured, and checked.",
        args=arguments,
    )
    try:
        match command:
            case Run():
                code = _run(command)
            case Doctor():
                code = _doctor(command)
            case Report():
                code = _report(command.run_dir)
            case Compare():
                print(reports.compare(command.run_a, command.run_b))  # noqa: T201
                code = 0
            case Tune():
                code = _tune(command)
    except (InputError, reports.ReportError) as error:
        print(f"attnsuite: {error}", file=sys.stderr)  # noqa: T201 (the command line's output)
        code = _BAD_INPUT
    except KeyboardInterrupt:
        code = _INTERRUPTED
    sys.exit(code)


def _run(command: Run) -> int:
    request = _request(command)
    errors = Console(stderr=True)
    try:
        with ProgressDisplay(errors) as display:
            execute(request, display)
    except KeyboardInterrupt:
        hint = "nothing was measured yet; start the run again."
        if (request.out / MANIFEST).is_file():
            kept = "what is done is kept; " if (request.out / RECORDS).is_file() else ""
            hint = f"{kept}go on with: attnsuite run --resume --out {request.out}"
        print(f"\ninterrupted: {hint}", file=sys.stderr)  # noqa: T201
        return _INTERRUPTED
    return _report(request.out)


def _request(command: Run) -> RunRequest:
    if not command.cell_timeout > 0:
        raise InputError(f"--cell-timeout {command.cell_timeout:g} must be above 0 seconds.")
    memory = int(_MEMORY_SHARE * machine_bytes()) if command.cell_memory is None else parse_size(command.cell_memory)
    limits = Limits(command.cell_timeout, memory)
    if command.resume:
        if command.out is None:
            raise InputError("--resume needs --out with the directory of the run to go on with.")
        return resumed_request(command.suite, command.backends, command.cases, command.text, command.out, limits)
    suite = command.suite or "quick"
    now = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%SZ")
    out = command.out or Path("runs") / f"{now}-{Path(suite).stem}"
    return new_request(suite, command.backends, command.cases, command.text, out, limits)


def _report(directory: Path) -> int:
    path = reports.render(directory)
    print(*summary_lines(parse_records(directory / RECORDS)[0]), sep="\n")  # noqa: T201
    print(f"records: {directory / RECORDS}\nreport:  {path}")  # noqa: T201
    return 0


def _doctor(command: Doctor) -> int:
    found = examine_here()
    if command.json:
        print(json.dumps(found, indent=1))  # noqa: T201
    else:
        Console().print(describe(found))
    return 0


def _tune(command: Tune) -> int:
    # The only command that runs JAX in this process.
    from suite import tuning  # noqa: PLC0415

    try:
        target = Target.named(command.target)
    except ValueError as error:
        raise InputError(f"--target: {error}") from error
    names = [name.strip() for name in command.backends.split(",")]
    patterns = [pattern.strip() for pattern in command.cases.split(",")]
    for case in select(find_suite(command.suite).cases, patterns):
        if not isinstance(case, OpCase):
            raise InputError(f"case {case.name} is not one attention call; choose forward- or forward-backward- cases.")
        for name in names:
            found = tuning.tune(name, case, target)
            tuning.write(command.out, [found])
            print(*tuning.describe(found, case.name), sep="\n")  # noqa: T201
    print(f"written: {command.out}")  # noqa: T201
    return 0


def parse_size(text: str) -> int:
    """Bytes of a size such as ``4GiB``, ``500 MB`` or ``1e9``. Raises InputError.

    >>> parse_size("1.5GiB")
    1610612736
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    try:
        size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    except (ValueError, KeyError):
        size = 0
    if size <= 0:
        raise InputError(f"--cell-memory {text!r} is not a size; give one such as 4GiB or 500MB.")
    return size
