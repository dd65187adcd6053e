"""The verb ``attnsuite sharded``: its flags, and the function that runs it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from .flags import OnFleet, directory_of, flag, fleet_of, progress, resuming


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sharded(OnFleet):
    """Hold attention that is dealt to many devices (data, heads, context) to the oracle, on devices of the host."""

    out: Annotated[Path | None, flag("DIR", "runs/<UTC time>-sharded")] = None
    """Directory for records and report."""
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Go on with the rows in --out; finished ones are kept."""


def run(command: Sharded) -> int:
    """Hold every row to the oracle, and write the table."""
    from attnsuite import reports

    from .. import sharded

    out = directory_of(command, "sharded")
    fleet = fleet_of(command)
    with progress(lambda: resuming("sharded", out)) as display:
        sharded.run(out, display, resume=command.resume, fleet=fleet)
    path = reports.render(out)
    print(f"{path.read_text(encoding='utf-8')}\nreport: {path}")
    return 0
