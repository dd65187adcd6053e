"""The verb ``attnsuite merge``: its flags, and the function that runs it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from .flags import flag


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """Put runs of different cases together as one run: the shards of attnsuite run --shard."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Directories of the runs."""
    out: Annotated[Path, flag("DIR")]
    """Directory for the merged records and the report."""


def run(command: Merge) -> int:
    """Write the merged run, and render its page."""
    from ..merge import merge
    from .report import show

    merge(command.runs, command.out)
    return show(command.out)
