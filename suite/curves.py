"""``attnsuite curves``: train the standard backend, its noise runs, its controls and every other backend.

``kinds/loss_curve.py`` says how the curves are judged. The native setting is for backends that run on this device. The
interpreted setting is short and includes all backends.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from attnsuite.models.sharded_training import MeshSizes

from .cell import Asked
from .grid.executors import Limits, RunContext, here
from .grid.keeping import GridWatcher, identity, keep, opened
from .kinds.loss_curve import LOSS_CURVE, TrainingCase, own_runs
from .measure.environment import describe
from .measure.memory import machine_bytes
from .names import known_backend
from .record import Record


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


def run_curves(request: CurvesRequest, out: Path, watcher: GridWatcher, *, resume: bool = False) -> tuple[Record, ...]:
    """Train with every backend, in both settings where possible; the records, written to ``out``. Raises InputError."""
    preset, backends = request.preset, tuple(map(known_backend, request.backends))
    on_mesh = () if request.mesh is None else [f"{name}@{request.mesh}" for name in ("standard", *backends)]
    cases = (
        TrainingCase(preset=preset, setting="native", steps=request.steps, batch=2, length=256),
        TrainingCase(preset=preset, setting="interpreted", steps=request.interpreted_steps, batch=1, length=256),
    )
    rows = {case: (*own_runs(), *backends, *(on_mesh if case is cases[0] else ())) for case in cases}
    asked = [Asked(rows=tuple(dict.fromkeys(rows[case])), cases=(case,)) for case in cases]
    cells = [cell for each in asked for cell in LOSS_CURVE.cells(each.cases[0], each)]
    found = describe()
    words = dataclasses.asdict(request) | {"backends": ",".join(request.backends)}
    words |= {"mesh": None if request.mesh is None else str(request.mesh)}
    manifest = identity("curves", words, found.get("target", ""), found)
    limits = Limits(math.inf, machine_bytes())
    context = RunContext(suite="curves", limits=limits, environment=found, text=None, watcher=watcher)
    with opened(out, watcher, resume=resume) as store:
        return keep(store, manifest, cells, lambda missing: here(missing, context), watcher)
