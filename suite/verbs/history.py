"""The verb ``attnsuite history``: its flags, and the function that runs it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from ..errors import InputError
from .flags import flag


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Keep runs of a machine, and show the trend of each cell with the runs at which its level changed."""

    store: tyro.conf.Positional[Path]
    """Directory of the store."""
    add: Annotated[Path | None, flag("DIR", "nothing is added")] = None
    """Directory of a run to add first. Nothing in the store is ever changed or taken out."""
    share: Annotated[float, flag("PERCENT")] = 5.0
    """Name changes by more than this."""


def run(command: History) -> int:
    """Add a run, and write and print the page of each machine."""
    from attnsuite import reports

    from .. import files, history

    if not 0 < command.share <= 1000:
        raise InputError(f"--share {command.share:g} must be above 0 and at most 1000 percent.")
    if command.add is not None:
        print(f"added:   {history.add(command.store, command.add)}")
    for machine in history.machines(command.store):
        text, _ = reports.history_page(history.entries(machine), command.share / 100)
        files.write_text(machine / "history.md", text)
        print(text)
        print(f"page:    {machine / 'history.md'}")
    return 0
