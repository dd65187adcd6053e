"""The suite ``curves`` of ``attnsuite run``: loss curves of standard, its noise runs, its controls, and other backends.

``kinds/loss_curve.py`` says how the curves are judged. The native setting is for backends that run on this device. The
interpreted setting is short and includes all backends.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attnsuite.models.sharded_training import MeshSizes

from .cell import Cell, Request
from .errors import InputError
from .flag_values import known_backend, names_of
from .grid.executors import here
from .grid.grid import Grid
from .grid.references import References
from .grid.running import Limits, RunContext
from .host_devices import make_host_devices, parse_mesh
from .kinds.loss_curve import LOSS_CURVE, TrainingCase, own_runs
from .measure.environment import describe
from .measure.memory import machine_bytes
from .record import Environment, Record
from .typed import Scalar

BACKENDS = ("chunked", "splash", "kvax")  # beside standard


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CurvesGrid(Grid):
    """What to train: a preset, the backends beside standard, and the number of updates in each setting.

    With a mesh standard and the backends that run natively train on it too. All train in the process that computes
    them, without a limit.
    """

    suite: str = "curves"
    limits: Limits = dataclasses.field(default_factory=lambda: Limits(math.inf, machine_bytes()))
    preset: str
    backends: tuple[str, ...]
    steps: int
    interpreted_steps: int
    mesh: MeshSizes | None = None

    def look(self) -> tuple[Environment, list[Cell]]:
        """What this machine is, and its cells. Raises InputError."""
        if self.mesh is not None:
            make_host_devices(self.mesh.count)
        preset, backends = self.preset, tuple(map(known_backend, self.backends))
        on_mesh = () if self.mesh is None else [f"{name}@{self.mesh}" for name in ("standard", *backends)]
        cases = (
            TrainingCase(preset=preset, setting="native", steps=self.steps, batch=2, length=256),
            TrainingCase(preset=preset, setting="interpreted", steps=self.interpreted_steps, batch=1, length=256),
        )
        rows = {case: (*own_runs(), *backends, *(on_mesh if case is cases[0] else ())) for case in cases}
        asked = [Request(rows=tuple(dict.fromkeys(rows[case])), cases=(case,)) for case in cases]
        cells = [cell for each in asked for cell in LOSS_CURVE.cells(each.cases[0], each)]
        return describe(), cells

    def asked(self) -> dict[str, Scalar]:
        """The flags of the command line."""
        flags: dict[str, Scalar] = {name: getattr(self, name) for name in ("preset", "steps", "interpreted_steps")}
        return flags | {"backends": ",".join(self.backends), "mesh": None if self.mesh is None else str(self.mesh)}

    def compute(self, cells: Sequence[Cell], references: References, context: RunContext) -> Iterator[Record]:
        """The record of each cell."""
        yield from here(cells, context)


def grid_of(flags: Any, out: Path) -> CurvesGrid:
    """The grid of the flags of ``attnsuite run``. Raises InputError."""
    steps = 60 if flags.steps is None else flags.steps
    interpreted = 8 if flags.interpreted_steps is None else flags.interpreted_steps
    for name, value in (("--steps", steps), ("--interpreted-steps", interpreted)):
        if value < 1:
            raise InputError(f"{name} {value} must be at least 1.")
    return CurvesGrid(
        out=out,
        resume=flags.resume,
        preset=flags.model or "tiny",
        backends=BACKENDS if flags.backends is None else tuple(names_of(flags.backends, "--backends")),
        steps=steps,
        interpreted_steps=interpreted,
        mesh=None if flags.mesh is None else parse_mesh(flags.mesh),
    )
