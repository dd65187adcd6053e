"""Keeps the records of every grid: each is on the disk before the next cell begins, and is told to the watcher."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from ..cell import Cell
from ..record import Environment, Record
from ..store import GridManifest, Manifest, RunStore
from .executors import Limits, Watcher


class GridWatcher(Watcher, Protocol):
    """Receives the progress of a grid."""

    def begin(self, total: int, finished: int) -> None:
        """The grid has ``total`` cells; ``finished`` of them have a record already."""
        ...

    def fewer(self, cells: int) -> None:
        """The grid has ``cells`` cells fewer than :meth:`begin` said."""
        ...

    def done(self, record: Record) -> None:
        """A cell has its record, and the record is on the disk."""
        ...


class Grid(Protocol):
    """The cells of a verb, wherever they are computed. Data: nodes of a fleet get a copy."""

    @property
    def suite(self) -> str:
        """What the records name as their suite."""
        ...

    @property
    def out(self) -> Path:
        """The directory of the records."""
        ...

    @property
    def resume(self) -> bool:
        """Whether the directory holds a part of the grid already."""
        ...

    @property
    def limits(self) -> Limits:
        """What a cell may use."""
        ...

    def look(self) -> tuple[Environment, list[Cell]]:
        """What this machine is, and the cells of the grid on it. Raises InputError."""
        ...

    def manifest(self, environment: Environment) -> Manifest:
        """The identity of the grid."""
        ...

    def compute(self, cells: Sequence[Cell], environment: Environment, watcher: Watcher) -> Iterator[Record]:
        """The records of these cells, computed on this machine."""
        ...


@contextlib.contextmanager
def opened(out: Path, watcher: GridWatcher, *, resume: bool) -> Iterator[RunStore]:
    """The directory of a grid, locked. Raises InputError as :class:`RunStore`."""
    with RunStore(out, resume=resume) as store:
        for sentence in store.warnings:
            watcher.warn(sentence)
        yield store


def keep(
    store: RunStore,
    manifest: Manifest,
    cells: Sequence[Cell],
    compute: Callable[[list[Cell]], Iterable[Record]],
    watcher: GridWatcher,
    *,
    more: int = 0,
) -> tuple[Record, ...]:
    """Append the records that ``compute`` yields for the cells without one; returns all records of the grid.

    ``more`` counts the cells that ``compute`` may find beside those that it is given. Raises InputError before anything
    is computed if the directory holds another grid.
    """

    def one_by_one(missing: list[Cell]) -> Iterator[tuple[Record]]:
        return ((record,) for record in compute(missing))

    return keep_together(store, manifest, cells, one_by_one, watcher, more=more)


def keep_together(
    store: RunStore,
    manifest: Manifest,
    cells: Sequence[Cell],
    compute: Callable[[list[Cell]], Iterable[Sequence[Record]]],
    watcher: GridWatcher,
    *,
    more: int = 0,
) -> tuple[Record, ...]:
    """As :func:`keep`, where ``compute`` yields records that are kept all or none: those of a case."""
    store.settle(manifest)
    finished = store.finished()
    missing = [cell for cell in cells if cell.key not in finished]
    watcher.begin(len(cells) + more, len(cells) - len(missing))
    for records in compute(missing):
        store.append(records)
        for record in records:
            watcher.done(record)
    return store.records


def identity(
    verb: Literal["sharded", "tune", "curves", "judge"],
    asked: Mapping[str, Any],
    target: str,
    found: Environment,
) -> GridManifest:
    """The manifest of a grid: the flags that asked for it, and the place where it is computed."""
    return GridManifest(
        verb=verb,
        asked=dict(asked),
        target=target,
        versions=found.get("versions", {}),
        source=found.get("source", ""),
        git_revision=found.get("git_revision"),
        flags=found.get("flags", {}),
    )
