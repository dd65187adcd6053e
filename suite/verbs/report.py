"""The verb ``attnsuite report``: its flags, and the function that runs it."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Annotated

import tyro

from ..errors import InputError
from .flags import check_once, flag


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Render the report of a run again from its records, one report of several runs, or a bundle that was sent."""

    run_dir: tyro.conf.Positional[Annotated[Path, flag("RUN|FILE.zip")]]
    """Directory of the run, where the report is written; or a bundle (FILE.zip), which is verified."""
    others: tyro.conf.Positional[Annotated[tuple[Path, ...], flag("[RUN ...]", "none")]] = ()
    """Directories of runs that follow on the same page."""
    out: Annotated[Path | None, flag("DIR", "none")] = None
    """Put the runs together as one run in this directory: the shards of attnsuite run --shard. Or unpack a bundle."""
    bundle: Annotated[Path | None, flag("FILE.zip", "none")] = None
    """Write the run as one file to send: no path, user or host name in it, and a hash of every record."""


def run(command: Report) -> int:
    """Render the page of one run, or of several."""
    runs = (command.run_dir, *command.others)
    check_once(runs)
    if command.bundle is not None:
        return _pack(command)
    if _is_bundle(command.run_dir):
        return _verify(command)
    if command.out is None:
        return show(*runs)
    from ..merge import merge

    merge(runs, command.out)
    return show(command.out)


def _is_zip(path: Path) -> bool:
    return path.suffix.lower() == ".zip"


def _is_bundle(path: Path) -> bool:
    return _is_zip(path) and not path.is_dir()


def _pack(command: Report) -> int:
    from ..bundle import pack

    other = _is_bundle(command.run_dir) or command.others or command.out is not None
    if other or command.bundle is None or not _is_zip(command.bundle):
        raise InputError("--bundle takes one run and FILE.zip, as attnsuite report RUN --bundle RUN.zip.")
    if command.bundle.exists():
        raise InputError(f"{command.bundle} exists; give another --bundle.")
    count = pack(command.run_dir, command.bundle)
    print(f"bundle:  {command.bundle}, {count} records")
    return 0


def _verify(command: Report) -> int:
    """Say that a bundle was not edited, and what it holds. It is unpacked only into --out."""
    from attnsuite import reports

    from ..bundle import verified
    from ..store import CONFORMANCE
    from ..summary import summary_lines

    if command.others:
        raise InputError("a bundle is verified by itself; unpack it with --out DIR to put it beside other runs.")
    found = verified(command.run_dir)
    print(f"verified: {len(found.records)} records; the hashes agree, and no record contradicts itself")
    if command.out is None:
        print(*summary_lines(found.records, _width()), sep="\n")
        return 0
    found.write(command.out)
    if (command.out / CONFORMANCE).is_dir():
        reports.render(command.out / CONFORMANCE)
    return show(command.out)


def show(*directories: Path) -> int:
    """Render the page of these directories and print its summary; the exit code. Raises InputError."""
    from attnsuite import reports

    from ..store import RECORDS
    from ..summary import summary_lines

    path = reports.render(*directories)
    runs = [reports.load(directory) for directory in directories]
    for directory, run in zip(directories, runs, strict=True):
        if reports.stands_alone(run):
            continue
        if reports.is_compiled(run):
            print(reports.compiled_overview(directory))
        else:
            print(*summary_lines(run.records, _width()), *reports.answer_lines(run, _width()), sep="\n")
        print(f"records: {directory / RECORDS}")
    print(f"report:  {path}")
    for sentence in reports.installs(runs[0].records):
        print(sentence)
    return 0


def _width() -> int:
    return shutil.get_terminal_size().columns
