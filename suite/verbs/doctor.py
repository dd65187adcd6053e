"""The verb ``attnsuite doctor``: its flags, and the function that runs it."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import tyro


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Doctor:
    """Show devices, versions, and for each backend the mode it would run in or why it would not."""

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Write JSON to stdout."""


def run(command: Doctor) -> int:
    """Print what this machine has."""
    from rich.console import Console

    from ..doctor import describe, examine_here

    found = examine_here()
    if command.json:
        print(json.dumps(found, indent=1))
    else:
        Console().print(describe(found))
    return 0
