"""The verb ``attnsuite compare``: its flags, and the function that runs it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import tyro


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compare:
    """Hold the second run against the first, cell by cell, as Markdown."""

    run_a: tyro.conf.Positional[Path]
    """Directory of the first run."""
    run_b: tyro.conf.Positional[Path]
    """Directory of the second run."""


def run(command: Compare) -> int:
    """Print the comparison."""
    from attnsuite import reports

    print(reports.compare(command.run_a, command.run_b))
    return 0
