"""The verb ``attnsuite compare``: its flags, and the function that runs it."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Annotated

import tyro

from ..errors import InputError
from .flags import CHECK_FAILED, check_once, flag, tell

SUMMARY = "GITHUB_STEP_SUMMARY"  # the file that a step of a GitHub workflow appends Markdown to


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compare:
    """Hold the second run against the first, or show the trend over many. Also appended to $GITHUB_STEP_SUMMARY."""

    runs: tyro.conf.Positional[Annotated[tuple[Path, ...], flag("RUN ...", "none")]]
    """Directories of two runs; with --trend of any number, in any order."""
    fail_on: Annotated[str | None, flag("WHAT,...", "nothing")] = None
    """Exit with code 3 if run B is worse: wrong, failed, slower:10%, memory:10%, bundles:5%, separated by commas."""
    trend: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """The trend of each cell over all runs of a machine, with the runs at which its level changed."""
    share: Annotated[float | None, flag("PERCENT", "5")] = None
    """With --trend: name changes by more than this."""


def run(command: Compare) -> int:
    """Print the comparison; the exit code says whether run B is worse."""
    if command.trend or command.fail_on is not None:
        check_once(command.runs)
    if command.trend:
        return _show_trend(command)
    from attnsuite import reports

    if len(command.runs) != 2:
        raise InputError(f"compare takes two runs, not {len(command.runs)}; with --trend any number.")
    if command.share is not None:
        raise InputError("--share is about a trend; add --trend.")
    limits = None if command.fail_on is None else reports.parse_limits(command.fail_on)
    found = reports.compare(*command.runs, limits)
    _publish(found.text)
    for each in found.regressions:
        tell(f"{each.what}: {each.cell}: {each.sentence}")
    return CHECK_FAILED if found.regressions else 0


def _show_trend(command: Compare) -> int:
    from attnsuite import reports

    share = 5.0 if command.share is None else command.share
    if not 0 < share <= 1000:
        raise InputError(f"--share {share:g} must be above 0 and at most 1000 percent.")
    if command.fail_on is not None:
        raise InputError("--fail-on compares two runs; leave out --trend.")
    for runs in reports.by_machine(command.runs):
        _publish(reports.trend_page(runs, share / 100)[0])
    return 0


def _publish(text: str) -> None:
    from .. import files

    print(text)
    if summary := os.environ.get(SUMMARY):
        with files.writing(Path(summary)), Path(summary).open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")
