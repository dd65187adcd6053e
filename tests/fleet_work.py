"""A fleet without measurements: nodes that make records at once, and die, wait or differ as they are told."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from attnsuite.suite.cell import Cell
from attnsuite.suite.grid.grid import Grid
from attnsuite.suite.grid.node import Doing
from attnsuite.suite.grid.run_grid import RunGrid
from attnsuite.suite.grid.running import Limits, RunContext
from attnsuite.suite.kinds import problem_of
from attnsuite.suite.kinds.attention_call import OpCase
from attnsuite.suite.measure.environment import source_digest, versions
from attnsuite.suite.record import Environment, Record

ROWS = ("standard", "chunked")
GO = "go"  # a file beside the run, for which a case waits
BEGUN = "begun"  # a file beside the run: one line for each attempt at a case


class Work:
    """As :class:`attnsuite.suite.grid.node.Node`. The end of a case's name says what happens to its node."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._request: RunGrid | None = None

    def look(self, request: RunGrid) -> tuple[Environment, list[Cell]]:
        self._request = request
        found = versions() | ({"jax": told} if (told := os.environ.get("FLEET_WORK_JAX")) else {})
        environment: Environment = {"versions": found, "source": source_digest(), "git_revision": None, "flags": {}}
        environment |= {"target": os.environ.get("FLEET_WORK_TARGET", "cpu:fake"), "cpu": "fake", "cores": 1}
        cells = [
            Cell(case=case, row=row, target="cpu", resolved=row, mode="native", exact=True)
            for case in request.cases
            for row in request.backends
        ]
        return environment, cells

    def compute(self, cells: Sequence[Cell]) -> Iterator[object]:
        case, folder = cells[0].case.name, self._request.out.parent
        with (folder / BEGUN).open("a") as file:
            file.write(f"{case} {self._name}\n")
        yield Doing(case, cells[0].row, "pretending")
        if case.endswith("-slow"):
            time.sleep(0.5)
        while case.endswith("-waiting") and not (folder / GO).exists():
            time.sleep(0.05)
        first = not (folder / f"{case}.died").exists()
        if case.endswith("-deadly") or (case.endswith("-once") and first):
            (folder / f"{case}.died").touch()
            os.kill(os.getppid(), signal.SIGKILL)  # raylet: the node is gone
            time.sleep(60)
        if case.endswith("-raising"):
            raise OSError("no space left on this node")
        large = ("x" * 300_000,) if case.endswith("-large") else ()
        yield tuple(dataclasses.replace(record_of(cell, self._name), notes=large) for cell in cells)

    def close(self) -> None:
        pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretendGrid(Grid):
    """As the grids of ``tune``, ``compile`` and the suites that list their own cells: its records are made at once."""

    suite: str = "fleet"
    request: RunGrid

    def look(self) -> tuple[Environment, list[Cell]]:
        return Work("here").look(self.request)

    def compute(self, cells: Sequence[Cell], context: RunContext) -> Iterator[Record]:
        context.watcher.doing(cells[0].case, cells[0].row, "pretending")
        with tempfile.NamedTemporaryFile() as file:
            where = Path(file.name).parent.name
        for cell in cells:
            yield dataclasses.replace(record_of(cell, context.environment.get("node", "here")), notes=(where,))


def record_of(cell: Cell, node: str) -> Record:
    return Record(key=cell.key, suite="fleet", case=cell.case.name, kind=cell.kind, problem=problem_of(cell.case),
                  requested=cell.row, resolved=cell.row, mode="native", exact=True, target=cell.target, status="ok",
                  samples=(1e-3,) * 5, environment={"node": node}, started="2026-11-20T00:00:00+00:00")  # fmt: skip


class Seen:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.told: list[str] = []

    def begin(self, total: int, finished: int) -> None:
        pass

    def fewer(self, cells: int) -> None:
        pass

    def doing(self, case: str, backend: str, what: str) -> None:
        self.told.append(what)

    def warn(self, sentence: str) -> None:
        self.warnings.append(sentence)

    def done(self, record: Record) -> None:
        pass


def request(out: Path, names: Sequence[str], *, resume: bool = False) -> RunGrid:
    """A run of cases with these names, two cells each."""
    cases = tuple(OpCase(kind="op_forward", sequence=16, heads=1, kv_heads=1, name=name) for name in names)
    limits = Limits(10, 2**30)
    return RunGrid(suite="fleet", cases=cases, backends=ROWS, text=None, out=out, resume=resume, limits=limits)


@contextlib.contextmanager
def cluster(nodes: int = 0, store: int | None = None, **settings: object) -> Iterator[object]:
    """A cluster of Ray on this machine; its head computes nothing. ``store``: bytes of each node's object store."""
    from ray.cluster_utils import Cluster  # noqa: PLC0415 (an extra)

    # A dead node is noticed after 2 seconds; Ray's own patience is 15.
    health = {"health_check_period_ms": 500, "health_check_timeout_ms": 1000, "health_check_failure_threshold": 3}
    memory = {"object_store_memory": store} if store else {}
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": health | settings, **memory}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(nodes):
            made.add_node(num_cpus=1, wait=True, **memory)
        yield made
    finally:
        made.shutdown()
