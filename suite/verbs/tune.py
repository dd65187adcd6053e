"""The verb ``attnsuite tune``: its flags, and the function that runs it."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Annotated

import tyro

from ..errors import InputError, as_input
from .flags import OnFleet, arguments_of, directory_of, flag, fleet_of, limits_of, progress, resuming


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tune(OnFleet):
    """Find options of a backend: the fastest here, or the most plausible for a device that is not here."""

    backends: Annotated[str | None, flag("NAMES", "all that can be tuned")] = None
    """Backends to tune, separated by commas."""
    target: Annotated[str, flag("NAME")] = "here"
    """Device to tune for: here, or a kind such as h100, for which candidates are compiled and not timed."""
    cases: Annotated[str | None, flag("PATTERNS", "all")] = None
    """Glob patterns of case names, separated by commas."""
    options: Annotated[str, flag("NAME=VALUE,...", "the backend's")] = ""
    """Options that every candidate has, such as tile_size=256,query_tile=512, separated by commas."""
    out: Annotated[Path | None, flag("DIR", "runs/<UTC time>-tune")] = None
    """Directory for records, report, and policy.json, whose options auto and backends take."""
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Go on with the cells in --out, asked for in the same words; finished ones are kept."""
    minutes: Annotated[float | None, flag("MINUTES", "no limit")] = None
    """Begin no further case after so many minutes; --resume goes on with the rest."""
    imports: Annotated[str | None, flag("FILES", "none", "import")] = None
    """Tune nothing: make policy.json of tables that others measured, separated by commas."""
    cell_timeout: Annotated[float, flag("SECONDS")] = 120.0
    """Time that a case may take; five times that for all its candidates."""


_WHEN_RESUMED = ("backends", "target", "cases", "options", "minutes", "cell_timeout")


def run(command: Tune) -> int:
    """Try every candidate, and write the policy."""
    from attnsuite.backends import Target

    from .. import files
    from ..choosing import POLICY
    from ..flag_values import names_of, parse_options
    from ..imported import TOKAMAX, as_tokamax
    from ..suites import select
    from ..tuning import TUNED, TuneGrid, tunable, tune
    from .report import show

    if command.imports is not None:
        return _import(command)
    with as_input("--target: "):
        target = None if command.target == "here" else Target.named(command.target)
    if target is not None and target.topology:
        raise InputError(
            f"--target {target.name} is a slice; block sizes are those of one chip: --target {target.kind}."
        )
    if command.out is not None and command.out.suffix == ".json":
        raise InputError(f"--out {command.out} names a file; give a directory, into which {POLICY} is written.")
    out = directory_of(command, "tune")
    backends = tunable(None if command.backends is None else names_of(command.backends, "--backends"), target)
    grid = TuneGrid(
        backends=backends,
        cases=TUNED if command.cases is None else select(TUNED, names_of(command.cases, "--cases")),
        target=target,
        limits=limits_of(command.cell_timeout),
        fixed=parse_options(command.options),
        minutes=command.minutes,
        out=out,
        resume=command.resume,
        command=shlex.join(arguments_of(dataclasses.replace(command, backends=",".join(backends), resume=False))),
    )
    if command.minutes is not None and not command.minutes > 0:
        raise InputError(f"--minutes {command.minutes:g} must be above 0.")
    fleet = fleet_of(command)
    with progress(lambda: resuming(command, out, _WHEN_RESUMED)) as display:
        if target is not None:
            display.warn(f"{target} is not here: candidates are ranked by what compiles; no time is measured.")
        tuned = tune(grid, display, fleet)
    print(f"policy:  {out / POLICY}")
    if (theirs := as_tokamax(tuned)) is not None:
        files.write_text(out / TOKAMAX, theirs)
        print(f"tokamax: {out / TOKAMAX} (its format, for its data/autotuning/DEVICE)")
    if left := len(grid.cases) * len(backends) - len(tuned):
        again = resuming(command, out, _WHEN_RESUMED)
        print(f"{left} cells were not begun within --minutes {command.minutes:g}; {again}")
    return show(out)


def _import(command: Tune) -> int:
    """Write a policy of the entries that can be used, and say what became of the others."""
    from .. import files
    from ..choosing import POLICY, write_policy
    from ..imported import import_tables, sources_of, summary

    alone = Tune(imports=command.imports, out=command.out)
    if command != alone:
        raise InputError("--import tunes nothing; beside it only --out can be given.")
    paths = [Path(name.strip()) for name in str(command.imports).split(",") if name.strip()]
    if not paths:
        raise InputError("--import names no file.")
    found = import_tables(paths)
    sources = sources_of(found)
    out = directory_of(command, "tune")
    with files.writing(out):
        out.mkdir(parents=True, exist_ok=True)
    write_policy(out / POLICY, sources)
    print("\n".join(summary(found)))
    print(f"policy:  {out / POLICY}")
    return 0
