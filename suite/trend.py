"""Runs of one machine in the order in which they were made, for the trend of each cell."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from .errors import InputError
from .record import MACHINE_KIND, Record
from .store import parse_records, records_path


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A run: its directory and its records."""

    directory: Path
    records: tuple[Record, ...]

    @property
    def started(self) -> str:
        """When its first cell was started, ISO 8601."""
        return min(record.started for record in self.records)


def by_machine(directories: Sequence[Path]) -> list[list[Entry]]:
    """The runs of each machine, the first started first; a run that is given twice counts once.

    Machines are told apart by their device's name and by the facts by which two are of one kind. Raises InputError for
    a directory without records, and for a run that has cells of several machines.
    """
    runs: dict[str, dict[tuple[str, ...], Entry]] = {}
    for directory in directories:
        records = parse_records(records_path(directory))[0]
        if not records:
            raise InputError(f"{directory} holds no whole record; leave it out.")
        machines = {_machine_of(record) for record in records}
        if len(machines) > 1:
            raise InputError(f"{directory} has cells of {len(machines)} machines; give runs of one machine each.")
        same = tuple(f"{record.key} {record.started}" for record in records)
        runs.setdefault(machines.pop(), {})[same] = Entry(directory, records)
    if not runs:
        raise InputError("--trend needs the directories of runs, such as runs/*.")
    return [sorted(found.values(), key=lambda run: (run.started, run.directory.name)) for found in runs.values()]


def _machine_of(record: Record) -> str:
    facts = {name: record.environment.get(name) for name in MACHINE_KIND} | {"target": record.target}
    return json.dumps(facts, sort_keys=True)
