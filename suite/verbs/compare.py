"""The verb ``attnsuite compare``: its flags, and the function that runs it."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Annotated

import tyro

from .flags import CHECK_FAILED, flag, tell

SUMMARY = "GITHUB_STEP_SUMMARY"  # the file that a step of a GitHub workflow appends Markdown to


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compare:
    """Hold the second run against the first, cell by cell, as Markdown. Also appended to $GITHUB_STEP_SUMMARY."""

    run_a: tyro.conf.Positional[Path]
    """Directory of the first run."""
    run_b: tyro.conf.Positional[Path]
    """Directory of the second run."""
    fail_on: Annotated[str | None, flag("WHAT,...", "nothing")] = None
    """Exit with code 3 if run B is worse: wrong, failed, slower:10%, memory:10%, bundles:5%, separated by commas."""


def run(command: Compare) -> int:
    """Print the comparison; the exit code says whether run B is worse."""
    from attnsuite import reports

    from .. import files

    limits = None if command.fail_on is None else reports.parse_limits(command.fail_on)
    found = reports.compare(command.run_a, command.run_b, limits)
    print(found.text)
    if summary := os.environ.get(SUMMARY):
        with files.writing(Path(summary)), Path(summary).open("a", encoding="utf-8") as file:
            file.write(f"{found.text}\n")
    for each in found.regressions:
        tell(f"{each.what}: {each.cell}: {each.told}")
    return CHECK_FAILED if found.regressions else 0
