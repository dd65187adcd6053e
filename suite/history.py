"""A store of runs of one machine, to which runs are only added: ``STORE/<machine>/<start>-<digest>/records.jsonl``.

The machine is a digest of the device's name and of the facts by which two machines are of one kind. A run keeps its
bytes. The same run is added once, whatever its directory was called.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from . import files
from .errors import InputError
from .record import MACHINE_KIND, Record
from .store import RECORDS, parse_records, records_path

_MACHINE = re.compile("[0-9a-f]{12}")  # so that a directory of runs is not taken for a store


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A run in a store: its directory and its records, the first started first."""

    directory: Path
    records: tuple[Record, ...]

    @property
    def started(self) -> str:
        """When its first cell was started, ISO 8601."""
        return min(record.started for record in self.records)


def add(store: Path, run: Path) -> Path:
    """Copy a run into the store; the directory that it has there. Raises InputError."""
    path = records_path(run)
    records, kept, _ = parse_records(path)
    if not records:
        raise InputError(f"{path} holds no whole record; there is nothing to add.")
    machines = {machine_of(record) for record in records}
    if len(machines) > 1:
        raise InputError(f"{run} has cells of {len(machines)} machines; add the runs of each machine on their own.")
    data = path.read_bytes()[:kept]
    started = "".join(c for c in min(record.started for record in records)[:19] if c.isalnum())
    place = store / machines.pop() / f"{started}-{hashlib.sha256(data).hexdigest()[:12]}"
    if not (place / RECORDS).is_file():
        files.check_directory(place)
        files.write_text(place / RECORDS, data.decode("utf-8"))
    return place


def machine_of(record: Record) -> str:
    """The digest of the machine that a record was made on."""
    facts = {name: record.environment.get(name) for name in MACHINE_KIND} | {"target": record.target}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def machines(store: Path) -> tuple[Path, ...]:
    """The directories of the store's machines. Raises InputError if the store holds no run."""
    runs = store.glob(f"*/*/{RECORDS}") if store.is_dir() else ()
    found = sorted({path.parent.parent for path in runs if _MACHINE.fullmatch(path.parent.parent.name)})
    if not found:
        raise InputError(f"{store} holds no run; add one with attnsuite history {store} --add RUN.")
    return tuple(found)


def entries(machine: Path) -> Sequence[Entry]:
    """The runs of a machine in the order in which they were started. Raises InputError for a damaged file."""
    found = [Entry(path.parent, parse_records(path)[0]) for path in machine.glob(f"*/{RECORDS}")]
    return sorted((entry for entry in found if entry.records), key=lambda entry: (entry.started, entry.directory.name))
