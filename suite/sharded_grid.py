"""The suite ``sharded`` of ``attnsuite run``: checks that attention divided among many devices gives the same results.

It runs every backend that can be sharded, on meshes of data, heads and context, forward and backward, on eight devices
that JAX makes of the host's CPU, and on two real processes that ``jax.distributed`` joins over loopback. A refusal is a
record too, with its reasons. ``kinds/sharded.py`` says how a cell is judged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from attnsuite.backends import Target, names, registry
from attnsuite.backends.devices import cpu_name

from .cell import Cell, Request
from .grid.executors import one_after_another
from .grid.grid import Grid
from .grid.references import References
from .grid.running import Limits, RunContext
from .kinds.sharded import SHARDED, ShardedCase
from .measure import environment
from .measure.memory import machine_bytes
from .record import Environment, Record

_SECONDS = 600.0  # for one row
_MEMORY_SHARE = 0.7  # of the machine, for all processes of a row
_ALL, _LONG = "data 2 x heads 2 x context 2", "heads 2 x context 4"


def cell_of(
    backend: str, mesh: str, problem: str, exchange: Literal["gather", "ring"] | None = "gather", processes: int = 1
) -> Cell:
    """The cell of a backend on a mesh; ``exchange`` counts where the mesh divides the context."""
    exchange = exchange if "context" in mesh else None
    case = ShardedCase(problem=problem, mesh=mesh, exchange=exchange, processes=processes)
    (cell,) = SHARDED.cells(case, Request(rows=(backend,), cases=(case,)))
    return cell


def rows() -> list[Cell]:
    """The cells of the suite: eight devices of one process, then two joined processes."""
    return [
        cell_of("standard", _ALL, "causal"),
        cell_of("standard", _LONG, "packed, window, soft cap"),
        cell_of("chunked", _ALL, "causal"),
        cell_of("chunked", _ALL, "causal bfloat16"),
        cell_of("chunked", _ALL, "packed, window, soft cap"),
        cell_of("chunked", _ALL, "causal", "ring"),
        cell_of("chunked", _LONG, "causal bfloat16", "ring"),
        cell_of("chunked", _LONG, "packed, window, soft cap", "ring"),
        cell_of("chunked", _LONG, "balanced", "ring"),
        cell_of("chunked", "data 2 x context 4", "ragged", "ring"),
        cell_of("splash", _ALL, "packed", "ring"),
        cell_of("splash", _ALL, "ragged"),
        # Refused, with the reason.
        cell_of("splash", _ALL, "causal"),
        cell_of("splash", _ALL, "balanced", "ring"),
        cell_of("standard", _ALL, "causal", "ring"),
        cell_of("chunked", _ALL, "one KV head"),
        # Approximate backends divide their heads themselves.
        *(cell_of(name, "data 4 x heads 2", "causal") for name in names() if not registry.get(name).exact),
        # The first axis of a mesh spans the processes.
        cell_of("standard", "context 2 x heads 2", "packed, window, soft cap", processes=2),
        cell_of("chunked", "context 2 x heads 2", "causal", "ring", processes=2),
        cell_of("chunked", "context 4", "packed, window, soft cap", "ring", processes=2),
        cell_of("chunked", "data 2 x heads 2", "causal", processes=2),
    ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShardedGrid(Grid):
    """All rows."""

    suite: str = "sharded"
    limits: Limits = dataclasses.field(default_factory=lambda: Limits(_SECONDS, int(_MEMORY_SHARE * machine_bytes())))

    def look(self) -> tuple[Environment, list[Cell]]:
        """What this machine is, and its cells."""
        found: Environment = {
            "versions": environment.versions(),
            "source": environment.source_digest(),
            "git_revision": environment.git_revision(),
            "cpu": cpu_name(),
            "flags": environment.flags(),
            "target": str(Target("cpu", cpu_name())),
        }
        return found, rows()

    def compute(self, cells: Sequence[Cell], references: References, context: RunContext) -> Iterator[Record]:
        """The record of each cell."""
        yield from one_after_another(cells, references, context)


def grid_of(flags: Any, out: Path) -> ShardedGrid:
    """The grid of the flags of ``attnsuite run``."""
    return ShardedGrid(out=out, resume=flags.resume)
