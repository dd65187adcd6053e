"""``attnsuite curves``: its flags, and what it does with them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from ..errors import InputError
from .flags import directory, flag


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Train with every backend and hold its loss curve to the standard backend's, within its noise."""

    preset: Annotated[str, flag("NAME")] = "tiny"
    """The model: a preset of vocabulary 256."""
    backends: Annotated[str, flag("NAMES")] = "chunked,splash,kvax"
    """Backends to train with beside standard, separated by commas."""
    steps: Annotated[int, flag("N")] = 60
    """Updates with what runs natively here."""
    interpreted_steps: Annotated[int, flag("N")] = 8
    """Updates with what runs in an interpreter."""
    out: Annotated[Path | None, flag("DIR", "runs/<UTC time>-curves")] = None
    """Directory for curves, page and picture; what it holds of them is replaced."""


def run(command: Curves) -> int:
    """Train with each backend, and render the page."""
    from attnsuite import reports

    from ..curves_run import run_curves
    from ..loss_curves import Setting

    for name in ("steps", "interpreted_steps"):
        if getattr(command, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} {getattr(command, name)} must be at least 1.")
    out = directory(command.out, "curves")
    native = Setting("native", command.steps, batch=2, length=256)
    interpreted = Setting("interpreted", command.interpreted_steps, batch=1, length=256)
    run_curves(command.preset, command.backends.split(","), native, interpreted, out)
    print(f"report: {reports.render_curves(out)}")
    return 0
