"""Runs of each machine by date, for the trend of their cells.

The machine is a digest of the device's name and of the facts by which two machines are of one kind. A run that is given
twice, in whatever directory, counts once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from .errors import InputError
from .record import MACHINE_KIND, Record
from .store import parse_records, records_path


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A run: its directory and its records, the first started first."""

    directory: Path
    records: tuple[Record, ...]

    @property
    def started(self) -> str:
        """When its first cell was started, ISO 8601."""
        return min(record.started for record in self.records)


def machines(runs: Sequence[Path]) -> list[list[Entry]]:
    """The runs of each machine in the order in which they were started. Raises InputError for what is no run."""
    if not runs:
        raise InputError("--trend needs the directory of at least one run.")
    found: dict[str, dict[bytes, Entry]] = {}
    for run in runs:
        path = records_path(run)
        records, size, _ = parse_records(path)
        if not records:
            raise InputError(f"{path} holds no whole record; leave {run} out.")
        names = {machine_of(record) for record in records}
        if len(names) > 1:
            raise InputError(f"{run} has cells of {len(names)} machines; a trend is of one: leave {run} out.")
        digest = hashlib.sha256(path.read_bytes()[:size]).digest()
        found.setdefault(names.pop(), {}).setdefault(digest, Entry(run, records))
    return [
        sorted(entries.values(), key=lambda entry: (entry.started, entry.directory.name))
        for _, entries in sorted(found.items())
    ]


def machine_of(record: Record) -> str:
    """The digest of the machine that a record was made on."""
    facts = {name: record.environment.get(name) for name in MACHINE_KIND} | {"target": record.target}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
