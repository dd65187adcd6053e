"""The verb ``attnsuite curves``: its flags, and the function that runs it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from ..errors import InputError
from .flags import OnFleet, directory_of, flag, fleet_of, progress, resuming


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Curves(OnFleet):
    """Train with every backend and hold its loss curve to the standard backend's, within its noise."""

    preset: Annotated[str, flag("NAME")] = "tiny"
    """The model: a preset of vocabulary 256."""
    backends: Annotated[str, flag("NAMES")] = "chunked,splash,kvax"
    """Backends to train with beside standard, separated by commas."""
    steps: Annotated[int, flag("N")] = 60
    """Updates with what runs natively here."""
    interpreted_steps: Annotated[int, flag("N")] = 8
    """Updates with what runs in an interpreter."""
    mesh: Annotated[str | None, flag("AXIS=N,...", "none")] = None
    """Train standard and what runs natively on several devices too: data, fsdp, heads, context."""
    out: Annotated[Path | None, flag("DIR", "runs/<UTC time>-curves")] = None
    """Directory for records, page and picture."""
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Go on with the curves in --out, asked for in the same words; finished ones are kept."""


def run(command: Curves) -> int:
    """Train with each backend, and render the page."""
    from ..curves import CurvesRequest, run_curves
    from ..host_devices import parse_mesh
    from ..names import names_of
    from .report import show

    for name in ("steps", "interpreted_steps"):
        if getattr(command, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} {getattr(command, name)} must be at least 1.")
    mesh = None if command.mesh is None else parse_mesh(command.mesh)
    request = CurvesRequest(
        preset=command.preset,
        backends=tuple(names_of(command.backends, "--backends")),
        steps=command.steps,
        interpreted_steps=command.interpreted_steps,
        mesh=mesh,
    )
    out = directory_of(command, "curves")
    fleet = fleet_of(command)
    with progress(lambda: resuming("curves", out)) as display:
        run_curves(request, out, display, resume=command.resume, fleet=fleet)
    return show(out)
