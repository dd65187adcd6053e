"""Keeps the records of every grid: each is on the disk before the next cell begins, and is told to the watcher."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from ..cell import Cell
from ..record import Environment, Record
from ..store import GridManifest, Manifest, RunStore
from .executors import Watcher


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
    store.settle(manifest)
    finished = store.finished()
    missing = [cell for cell in cells if cell.key not in finished]
    watcher.begin(len(cells) + more, len(cells) - len(missing))
    for record in compute(missing):
        store.append([record])
        watcher.done(record)
    return store.records


def identity(
    verb: Literal["sharded", "tune", "curves"], asked: Mapping[str, Any], target: str, found: Environment
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
