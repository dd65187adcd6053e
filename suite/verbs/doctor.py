"""The verb ``attnsuite doctor``: its flags, and the function that runs it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from typing import Annotated

import tyro


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Doctor:
    """Show the device, the versions, and for each backend whether it runs here, or what it needs."""

    all: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Every reason against every backend, all versions and flags."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Write JSON to stdout."""


def run(command: Doctor) -> int:
    """Print what this machine has."""
    from ..diagnosis import describe, examine_here

    found = examine_here()
    if command.json:
        print(json.dumps(found, indent=1))
    else:
        width = min(79, shutil.get_terminal_size().columns)
        print("\n".join(describe(found, every=command.all, width=width)))
    return 0
