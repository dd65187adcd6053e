"""What a verb computes: a :class:`Grid` lists its cells on a machine, says what identifies it, and makes the records.

``execute.py`` executes any grid, here or on the nodes of a fleet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..cell import Cell
from ..record import Environment, Record
from ..store import GridManifest, GridVerb, Manifest
from .running import Limits, Watcher

if TYPE_CHECKING:
    from attnsuite.models import TextFile

    from .references import References


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
    directory holds a part of the grid already. ``limits`` are what a cell may use. ``text`` is what its cases read.
    """

    suite: str
    out: Path
    limits: Limits
    resume: bool = False
    text: TextFile | None = None

    @property
    def searched(self) -> int:
        """How many cells :meth:`compute` may find beside those of :meth:`look`."""
        return 0

    def look(self) -> tuple[Environment, list[Cell]]:
        """What this machine is, and the cells of the grid on it. Raises InputError."""
        raise NotImplementedError

    def manifest(self, environment: Environment, cells: int) -> Manifest:
        """The identity of the grid, which has so many cells."""
        raise NotImplementedError

    def measured(self, environment: Environment, watcher: Watcher, directory: Path | None) -> Environment:
        """The environment with what is measured once per machine. A node of a fleet has no ``directory``."""
        del watcher, directory
        return environment

    def compute(
        self, cells: Sequence[Cell], environment: Environment, watcher: Watcher, references: References
    ) -> Iterator[Record]:
        """The records of these cells, computed on this machine."""
        raise NotImplementedError


def identity(verb: GridVerb, flags: Mapping[str, Any], target: str, environment: Environment) -> GridManifest:
    """The manifest of a grid: the flags of the command line, and the machine."""
    return GridManifest(
        verb=verb,
        asked=dict(flags),
        target=target,
        versions=environment.get("versions", {}),
        source=environment.get("source", ""),
        git_revision=environment.get("git_revision"),
        flags=environment.get("flags", {}),
    )
