"""The verb ``attnsuite report``: its flags, and the function that runs it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from .flags import flag


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Render the report of a run again from its records, or one report of several runs."""

    run_dir: tyro.conf.Positional[Path]
    """Directory of the run; the report is written there."""
    others: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Directories of runs that follow on the same page."""
    out: Annotated[Path | None, flag("DIR", "none")] = None
    """Put the runs together as one run in this directory: the shards of attnsuite run --shard."""


def run(command: Report) -> int:
    """Render the page of one run, or of several."""
    if command.out is None:
        return show(command.run_dir, *command.others)
    from ..merge import merge

    merge((command.run_dir, *command.others), command.out)
    return show(command.out)


def show(*directories: Path) -> int:
    """Render the page of these directories and print its summary; the exit code. Raises InputError."""
    from attnsuite import reports

    from ..store import RECORDS, parse_records
    from ..summary import summary_lines

    path = reports.render(*directories)
    for directory in directories:
        run = reports.load(directory)
        if reports.stands_alone(run):
            continue
        if reports.is_compiled(run):
            print(reports.compiled_overview(directory))
        else:
            print(*summary_lines(parse_records(directory / RECORDS)[0]), *reports.answer_lines(run), sep="\n")
        print(f"records: {directory / RECORDS}")
    print(f"report:  {path}")
    for sentence in reports.installs(parse_records(directories[0] / RECORDS)[0]):
        print(sentence)
    return 0
