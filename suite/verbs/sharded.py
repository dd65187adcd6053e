"""``attnsuite sharded``: its flags, and what it does with them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from .flags import directory, flag


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sharded:
    """Hold attention that is dealt to many devices (data, heads, context) to the oracle, on devices of the host."""

    out: Annotated[Path | None, flag("DIR", "runs/<UTC time>-sharded")] = None
    """Directory for the table."""


def run(command: Sharded) -> int:
    """Hold every row to the oracle, and write the table."""
    from rich.console import Console

    from .. import sharded

    out = directory(command.out, "sharded")
    with Console(stderr=True).status("starting") as status:
        facts = sharded.run(out, status.update)
    print(f"{sharded.page(facts)}\npage: {out / sharded.PAGE}")
    return 0
