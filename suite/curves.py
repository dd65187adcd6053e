"""``attnsuite curves``: train the standard backend, its noise runs, its controls and every other backend.

``kinds/loss_curve.py`` says how the curves are judged. The native setting is for backends that run on this device. The
interpreted setting is short and includes all backends.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from attnsuite.models.sharded_training import MeshSizes

from .cell import Asked, Cell
from .grid.executors import Limits, RunContext, Watcher, here
from .grid.fleet import FleetRequest, execute_grid
from .grid.keeping import GridWatcher, identity
from .host_devices import make_host_devices
from .kinds.loss_curve import LOSS_CURVE, TrainingCase, own_runs
from .measure.environment import describe
from .measure.memory import machine_bytes
from .names import known_backend
from .record import Environment, Record
from .store import GridManifest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CurvesRequest:
    """What to train: a preset, the backends beside standard, and the number of updates in each setting.

    With a mesh standard and the backends that run natively train on it too.
    """

    preset: str
    backends: tuple[str, ...]
    steps: int
    interpreted_steps: int
    mesh: MeshSizes | None = None


def run_curves(
    request: CurvesRequest, out: Path, watcher: GridWatcher, *, resume: bool = False, fleet: FleetRequest | None = None
) -> tuple[Record, ...]:
    """Train with every backend, in both settings where possible; the records, written to ``out``. Raises InputError."""
    return execute_grid(CurvesGrid(request=request, out=out, resume=resume), watcher, fleet)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CurvesGrid:
    """The cells of a request: a :class:`.grid.keeping.Grid`. They train in the process that computes them."""

    request: CurvesRequest
    out: Path
    resume: bool
    suite: str = "curves"

    @property
    def limits(self) -> Limits:
        """None but the machine's."""
        return Limits(math.inf, machine_bytes())

    def look(self) -> tuple[Environment, list[Cell]]:
        """What this machine is, and its cells. Raises InputError."""
        request = self.request
        if request.mesh is not None:
            make_host_devices(request.mesh.count)
        preset, backends = request.preset, tuple(map(known_backend, request.backends))
        on_mesh = () if request.mesh is None else [f"{name}@{request.mesh}" for name in ("standard", *backends)]
        cases = (
            TrainingCase(preset=preset, setting="native", steps=request.steps, batch=2, length=256),
            TrainingCase(preset=preset, setting="interpreted", steps=request.interpreted_steps, batch=1, length=256),
        )
        rows = {case: (*own_runs(), *backends, *(on_mesh if case is cases[0] else ())) for case in cases}
        asked = [Asked(rows=tuple(dict.fromkeys(rows[case])), cases=(case,)) for case in cases]
        cells = [cell for each in asked for cell in LOSS_CURVE.cells(each.cases[0], each)]
        return describe(), cells

    def manifest(self, environment: Environment) -> GridManifest:
        """The identity of the grid."""
        request = self.request
        words = dataclasses.asdict(request) | {"backends": ",".join(request.backends)}
        words |= {"mesh": None if request.mesh is None else str(request.mesh)}
        return identity("curves", words, environment.get("target", ""), environment)

    def compute(self, cells: Sequence[Cell], environment: Environment, watcher: Watcher) -> Iterator[Record]:
        """The record of each cell."""
        yield from here(cells, RunContext(suite="curves", limits=self.limits, environment=environment, text=None,
                                          watcher=watcher))  # fmt: skip
