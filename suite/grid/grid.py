"""What a verb computes: a :class:`Grid` lists its cells on a machine, says what identifies it, and makes the records.

``execute.py`` executes any grid, here or on the nodes of a fleet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from attnsuite.models import TextFile

from ..cell import Cell
from ..kinds import problem_of
from ..record import Environment, Record
from ..store import Manifest
from ..typed import Scalar
from .references import References
from .running import Limits, RunContext, Watcher


class GridWatcher(Watcher, Protocol):
    """Receives the progress of a grid."""

    def begin(self, total: int, finished: int) -> None:
        """The grid has ``total`` cells; ``finished`` of them have a record already."""
        ...

    def done(self, record: Record) -> None:
        """A cell has its record, and the record is on the disk."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The cells of a verb, wherever they are computed. Data: nodes of a fleet get a copy.

    ``suite`` is what the records name as their suite, ``out`` the directory of the records. With ``resume`` the
    directory holds a part of the grid already. ``limits`` are what a cell may use. ``cases`` and ``backends`` are what
    was asked for. ``text`` is what the cases read.
    """

    suite: str
    out: Path
    limits: Limits
    cases: tuple[Any, ...] = ()
    backends: tuple[str, ...] = ()
    resume: bool = False
    text: TextFile | None = None

    @property
    def searched(self) -> int:
        """How many cells :meth:`compute` may find beside those of :meth:`look`."""
        return 0

    def look(self) -> tuple[Environment, list[Cell]]:
        """What this machine is, and the cells of the grid on it. Raises InputError."""
        raise NotImplementedError

    def options(self) -> dict[str, Scalar]:
        """The flags of the command line that say what is computed, beside cases and backends."""
        return {}

    def manifest(self, environment: Environment, cells: int) -> Manifest:
        """The identity of the grid, which has so many cells: what was asked for, and the machine."""
        return Manifest(
            verb=self.suite,
            suite=self.suite,
            options=self.options(),
            cases=tuple(map(problem_of, self.cases)),
            backends=self.backends,
            target=environment.get("target", ""),
            versions=environment.get("versions", {}),
            source=environment.get("source", ""),
            git_revision=environment.get("git_revision"),
            flags=environment.get("flags", {}),
        )

    def context(self, environment: Environment, watcher: Watcher, references: References) -> RunContext:
        """What all cells of the grid share on this machine."""
        return RunContext(self.suite, self.limits, environment, self.text, watcher, references)

    def measured(self, environment: Environment, watcher: Watcher, directory: Path | None) -> Environment:
        """The environment with what is measured once per machine. A node of a fleet has no ``directory``."""
        del watcher, directory
        return environment

    def compute(self, cells: Sequence[Cell], context: RunContext) -> Iterator[Record]:
        """The records of these cells, computed on this machine."""
        raise NotImplementedError
