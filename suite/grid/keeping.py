"""Keeps the records of every grid: each is on the disk before the next cell begins, and is told to the watcher."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from ..record import Environment, Record
from ..store import GridManifest, RunStore
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


def keep(
    out: Path,
    identity: GridManifest,
    keys: Sequence[str],
    records: Callable[[frozenset[str]], Iterable[Record]],
    watcher: GridWatcher,
    *,
    resume: bool,
) -> tuple[Record, ...]:
    """Append the records that ``records`` yields for unfinished cells; returns all records of the grid.

    ``keys`` are those of all cells; ``records`` is called with the keys of the finished ones. Raises InputError before
    anything is computed if ``out`` cannot be written, holds another grid, or holds records and ``resume`` is False.
    """
    with RunStore(out, resume=resume) as store:
        for sentence in store.warnings:
            watcher.warn(sentence)
        store.settle(identity)
        finished = store.finished()
        watcher.begin(len(keys), len(finished.intersection(keys)))
        for record in records(finished):
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
