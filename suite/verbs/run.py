"""The verb ``attnsuite run``: its flags, and the function that runs it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ..errors import InputError, as_input
from .flags import DType, OnFleet, added, directory_of, flag, fleet_of, limits_of, progress, resuming, tell, text_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..grid.run_grid import RunGrid
    from ..record import Record
    from ..suites import ModelSuiteFlags


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run(OnFleet):
    """Measure every backend on every case of a suite and write a report."""

    suite: Annotated[str | None, flag("NAME|FILE", "quick")] = None
    """quick, device, full, cpu-speed, caller, serving, sharded, curves, the suite of an extension (a name that there is
    not lists them all; NAME --help shows its flags), or the path of a .toml file."""
    model: Annotated[str | None, flag("NAME|DIR", "none")] = None
    """Instead of a suite: every backend in a checkpoint, on text and on the clock; text, or a directory."""
    backends: Annotated[str | None, flag("NAMES", "all, and the suite's peers")] = None
    """Backends (and peers) to compare, separated by commas; my.py:fn is a function f(q, k, v) of yours."""
    cases: Annotated[str | None, flag("PATTERNS", "all of the suite")] = None
    """Glob patterns of case names, separated by commas."""
    out: Annotated[Path | None, flag("DIR", "runs/<UTC time>-<suite>")] = None
    """Directory for records and report."""
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Go on with the run in --out; finished cells are kept."""
    shard: Annotated[str | None, flag("I/N", "all cases")] = None
    """Measure every N-th case only, from the I-th on; attnsuite report RUNS... --out DIR puts them together."""
    text: Annotated[Path | None, flag("FILE", "prose that ships with Python")] = None
    """Text (UTF-8) to measure perplexity on."""
    text_field: Annotated[str | None, flag("NAME", "plain text")] = None
    """Field of JSON lines that holds the text."""
    seq_len: Annotated[int | None, flag("TOKENS", "512")] = None
    """With --model: length of the texts and prompts."""
    batch: Annotated[int | None, flag("N", "1")] = None
    """With --model: prompts at a time; several are of unequal length."""
    dtype: Annotated[DType | None, flag("DTYPE", "as stored", choices=DType)] = None
    """With --model: what it computes in."""
    profile: Annotated[Path | None, flag("DIR", "none")] = None
    """Directory for a profile of one more call of each timed cell, for Perfetto and XProf (docs/how-to/measure.md)."""
    cell_timeout: Annotated[float, flag("SECONDS")] = 120.0
    """Time that a cell may take to get ready, and again for its samples; of a loss curve, that of each update."""
    sample_seconds: Annotated[float | None, flag("SECONDS", "10 samples, or 1 second")] = None
    """How long each cell is sampled: more samples, narrower intervals (docs/how-to/guard.md)."""
    busy: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Measure on an NVIDIA GPU that other processes use; without it such a run does not start."""
    cell_memory: Annotated[str | None, flag("SIZE", "70% of the machine")] = None
    """Memory that a cell may hold, such as 4GiB or 500MB."""


# The flags of a run that is resumed, which are not written down, and those of the suite device.
_WHEN_RESUMED = ("profile", "cell_timeout", "busy", "cell_memory")
_OF_DEVICE = ("suite", "out", "resume", "backends", "cases", "cell_timeout", "cell_memory", "sample_seconds", "busy")


def run(command: Run) -> int:
    """Measure every cell, and render the page."""
    from ..files import check_directory
    from ..grid.execute import execute
    from .report import show

    if command.suite == "device":
        return _device(command)
    fleet = fleet_of(command)
    if fleet is not None and command.profile is not None:
        raise InputError("--profile is for one machine: nodes would write to their own disks; leave out --executor.")
    request = _request(command).lasting(command.sample_seconds)
    request = dataclasses.replace(request, profile=command.profile, busy=command.busy)
    if request.profile is not None:
        check_directory(request.profile)
    with progress(lambda: resuming(command, request.out, _WHEN_RESUMED, request.backends)) as display:
        records = execute(request, display, fleet)
    named = command.backends is not None
    code = show(request.out, *_verdicts(command, request, records)) or _named(request, records, requested=named)
    if request.profile is not None:
        from attnsuite import reports

        for sentence in reports.draw_profiles(request.profile):
            tell(sentence)
    return code


def _device(command: Run) -> int:
    """Hold the device's backends to the contract, then run the suite; what is run is printed first."""
    from attnsuite import reports

    from ..device_run import device_run
    from ..flag_values import names_of
    from ..grid.execute import execute
    from .report import show

    _check_flags(command)
    out, limits = directory_of(command, "device"), limits_of(command.cell_timeout, command.cell_memory)
    requested = None if command.backends is None else tuple(names_of(command.backends, "--backends"))
    found = device_run(requested, out, limits, resume=command.resume, busy=command.busy, cases=command.cases)
    print("\n".join(found.plan()), flush=True)
    busy = command.busy or found.suite.busy
    suite = dataclasses.replace(found.suite.lasting(command.sample_seconds), busy=busy)
    with progress(lambda: resuming(command, out, (*_WHEN_RESUMED, *_device_flags(out)))) as display:
        judged = execute(found.judgement, display)
        print(f"{reports.conformance_overview(judged)}\nreport:  {reports.render(found.judgement.out)}")
        execute(suite, display)
    code = show(out)
    print(f"to send: attnsuite report {out} --bundle {out.name}.zip")
    return code


def _device_flags(out: Path) -> tuple[str, ...]:
    """The flags that go on with a run on a device; its timed part is not written down before the first of its cells."""
    from ..store import MANIFEST

    return ("suite",) if (out / MANIFEST).is_file() else ("suite", "cases", "sample_seconds")


def _check_flags(command: Run) -> None:
    """Raise InputError for a flag that has no meaning for the suite device."""
    from ..flag_values import spelled

    for field in dataclasses.fields(command):
        if getattr(command, field.name) != field.default and field.name not in _OF_DEVICE:
            raise InputError(f"{spelled([field.name])} is not for --suite device, which takes {spelled(_OF_DEVICE)}.")


def _named(request: RunGrid, records: Sequence[Record], *, requested: bool) -> int:
    """Say where what was asked for by name did not run; 2 if a function of the user has run in no case, else 0."""
    from attnsuite import reports

    from ..user_function import is_reference

    for sentence in reports.unmeasured(records, request.backends) if requested else ():
        tell(sentence)
    ran = {record.requested for record in records if record.status in ("ok", "wrong")}
    idle = [name for name in request.backends if is_reference(name) and name not in ran]
    for name in idle:
        tell(f"{name} ran in no case; the reasons are on the page.")
    return 2 if idle else 0


def _verdicts(command: Run, request: RunGrid, records: Sequence[Record]) -> tuple[Path, ...]:
    """The directory of what is compiled for an H100 beside a run of ``quick``; () if nothing is."""
    from .. import compile_run
    from ..compile_request import verdict_request
    from ..store import RECORDS

    found = verdict_request(request, records)
    if found is None:
        return ()
    if not (found.out / RECORDS).exists():  # a resumed run may have them
        with progress(lambda: resuming(command, request.out, _WHEN_RESUMED, request.backends)) as display:
            compile_run.compile_all(found, display)
    return (found.out,)


def _request(command: Run) -> RunGrid:
    from ..flag_values import spelled
    from ..grid.run_grid import new_request, resumed_request
    from ..suites import parse_shard

    shard = None if command.shard is None else parse_shard(command.shard)
    limits = limits_of(command.cell_timeout, command.cell_memory)
    flags = added(command, Run)
    model = _model_flags(command, {} if command.resume else flags)
    if command.resume:
        out = directory_of(command, "")
        if named := spelled(flags) or ("--model" if model else ""):
            raise InputError(f"{named} cannot change a run that was begun; leave it out, or start a new run.")
        return resumed_request(command.suite, command.backends, command.cases, text_of(command), out, limits, shard)
    suite = command.suite or "quick"
    name = Path(suite).stem if model is None or model.suite else Path(model.model).resolve().name
    out = directory_of(command, name)
    return new_request(model or suite, command.backends, command.cases, text_of(command), out, limits, flags, shard)


def _model_flags(command: Run, flags: Mapping[str, Any]) -> ModelSuiteFlags | None:
    from .. import typed
    from ..suites import ModelSuiteFlags, model_suites

    sizes = {
        "--seq-len": command.seq_len,
        "--batch": command.batch,
        "--dtype": command.dtype,
        "--calibration": flags.get("calibration"),
    }
    named = [flag for flag, value in sizes.items() if value is not None]
    made = command.suite if command.suite in model_suites() else ""
    if command.model is None and not made:
        if named:
            raise InputError(f"{', '.join(named)} is about a checkpoint; add --model.")
        return None
    if command.suite is not None and not made:
        known = " or ".join(f"--suite {name}" for name in model_suites())
        raise InputError(f"--model brings its own cases; leave out --suite, or give {known}.")
    fields = {"sequence": command.seq_len, "batch": command.batch, "dtype": command.dtype}
    values = {name: value for name, value in fields.items() if value is not None}
    with as_input(f"--model {command.model}: ", "."):
        return typed.convert({"model": command.model or "text", "suite": made, **values}, ModelSuiteFlags)
