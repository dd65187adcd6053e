"""Executes a grid: locks its directory, looks at the machine, and computes the cells that have no record.

The process that does this never initialises JAX where the cells have processes of their own. The grid's identity is
written to its directory before the first cell. A grid can be resumed only where its identity still holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..cell import Cell
from ..record import Environment, Record
from ..store import RunStore
from .fleet import Fleet, FleetRequest
from .grid import Grid, GridWatcher
from .references import References


def execute(grid: Grid, watcher: GridWatcher, fleet: FleetRequest | None = None) -> tuple[Record, ...]:
    """Compute every cell that has no record yet, here or on a fleet; returns all records.

    Raises InputError before anything is computed if the directory holds another grid.
    """
    with RunStore(grid.out, resume=grid.resume) as store:
        for sentence in store.warnings:
            watcher.warn(sentence)
        if fleet is not None:
            with Fleet(grid, fleet, watcher) as nodes:
                watcher.doing("", "", "looking at the nodes")
                environment, cells = nodes.gather()
                return _computed(store, grid, environment, cells, nodes.records, watcher)
        watcher.doing("", "", "looking at the machine")
        environment, cells = grid.look()

        def one_by_one(missing: Sequence[Cell]) -> Iterator[tuple[Record]]:
            machine = grid.measured(environment, watcher, store.directory)
            with contextlib.closing(References(grid.limits.seconds, grid.text)) as references:
                for record in grid.compute(missing, grid.context(machine, watcher, references)):
                    yield (record,)

        return _computed(store, grid, environment, cells, one_by_one, watcher)


def _computed(
    store: RunStore,
    grid: Grid,
    environment: Environment,
    cells: Sequence[Cell],
    compute: Callable[[Sequence[Cell]], Iterable[Sequence[Record]]],
    watcher: GridWatcher,
) -> tuple[Record, ...]:
    """Append what ``compute`` yields for the cells without a record: one record, or those of a case, all or none."""
    store.settle(grid.manifest(environment, len(cells)))
    finished = store.finished()
    missing = [cell for cell in cells if cell.key not in finished]
    at_once = {cell.key for cell in cells if cell.mode in (None, "fallback")}  # unsupported, as is known before
    measured = [cell for cell in cells if cell.key not in at_once]
    watcher.begin(len(measured) + grid.searched, sum(cell.key in finished for cell in measured))
    for records in compute(missing):
        store.append(records)
        for record in records:
            watcher.done(record)
            if record.status == "unsupported" and record.key not in at_once:
                watcher.fewer(1)
    return store.records
