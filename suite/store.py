"""The run directory: one manifest, one file of records, one lock.

``records.jsonl`` grows by whole lines. Each is flushed to the disk before the next cell starts, so that a killed run
keeps every finished cell. ``run.json`` identifies the run; a resumed run must have the same identity. The lock is the
operating system's (flock), which releases it when the process ends, however it ends.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, Self

from . import files, typed
from .errors import InputError, as_input
from .kinds import checked, extensions
from .record import ContradictionError, Record, RecordError
from .typed import Scalar, Size

RECORDS = "records.jsonl"
MANIFEST = "run.json"
CONFORMANCE = "conformance"  # the folder in a run of the suite device with what its backends were held to
LOCK = "lock"


class RunStore:
    """A run directory, locked for writing. Use as a context manager.

    Raises InputError if another run holds the directory, if it has records and ``resume`` is False, or if it holds no
    run and ``resume`` is True.
    """

    def __init__(self, directory: Path, *, resume: bool) -> None:
        self.directory = directory
        self.resumed = resume
        self.warnings: tuple[str, ...] = ()
        self._whole: int | None = None  # bytes of whole records, where the last line is damaged
        if resume:
            require_run(directory)
        files.check_directory(directory)
        self._lock = locked(directory)
        try:
            self.records = self._load(resume=resume)
        except BaseException:
            self._lock.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def append(self, records: Iterable[Record]) -> None:
        """Add finished cells: whole lines in one write, on the disk when this returns. Raises InputError."""
        self._cut_off()
        new = tuple(records)
        path = self.directory / RECORDS
        if self.records and not path.is_file():
            raise InputError(f"{path} is gone, and the records that were in it are lost; start again.")
        with files.writing(path, " What is done is kept." if self.records else ""), _open(path, "a") as file:
            file.write("".join(record.to_json() + "\n" for record in new))
            file.flush()
            os.fsync(file.fileno())
        self.records = (*self.records, *new)

    def finished(self) -> frozenset[str]:
        """Keys of the cells that have a record."""
        return frozenset(record.key for record in self.records)

    def settle(self, identity: Manifest) -> None:
        """Write the run's identity, or check that a resumed run still has it. Raises InputError where it differs."""
        if not self.resumed:
            files.write_json(self.directory / MANIFEST, dataclasses.asdict(identity))
            return
        before = dataclasses.asdict(read_manifest(self.directory))
        now = dataclasses.asdict(typed.convert(dataclasses.asdict(identity), type(identity)))
        differing = [name for name in now if before.get(name) != now[name]]
        if differing:
            what = "; ".join(f"{name} was {_short(before.get(name))}, is {_short(now[name])}" for name in differing)
            raise InputError(
                f"the run in {self.directory} cannot be resumed, since its figures would not compare: {what}."
            )
        self._cut_off()

    def _cut_off(self) -> None:
        """Remove a damaged last line, once this run is known to be the one that wrote it."""
        if self._whole is None:
            return
        path = self.directory / RECORDS
        with files.writing(path), _open(path, "r+") as file:
            file.truncate(self._whole)
            os.fsync(file.fileno())
        self._whole = None

    def _load(self, *, resume: bool) -> tuple[Record, ...]:
        path = self.directory / RECORDS
        if not path.is_file() or path.stat().st_size == 0:
            return ()
        if not resume:
            raise InputError(
                f"{self.directory} already has records; add --resume to go on with that run, or choose another --out."
            )
        records, size, warning = parse_records(path)
        if warning:
            self.warnings, self._whole = (warning,), size
        return records


def locked(directory: Path) -> IO[str]:
    """Lock a directory for writing until the file is closed. Raises InputError where another run holds it."""
    with files.writing(directory):
        lock = _open(directory / LOCK, "a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise InputError(
            f"another run is writing to {directory}; wait for it to end, or choose another --out."
        ) from error
    return lock


def _open(path: Path, mode: str) -> IO[str]:
    return open(path, mode, encoding="utf-8", opener=files.open_here)


def records_path(directory: Path) -> Path:
    """The file with the records of a run. Raises InputError where the directory holds none."""
    path = directory / RECORDS
    if not path.is_file():
        raise InputError(f"{directory} holds no {RECORDS}; give the directory that a run was written to.")
    return path


def parse_records(path: Path) -> tuple[tuple[Record, ...], int, str | None]:
    """The records of a file, the bytes they take, and a warning if the last line was cut off or damaged.

    Raises InputError if a line before the last is no record, if a key occurs twice, or if a case means two problems.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    lines = data.split(b"\n")
    tail = lines.pop()  # empty where the file ends in a newline
    records: list[Record] = []
    size = 0
    warning = None
    for number, line in enumerate(lines, start=1):
        try:
            records.append(read_record(line))
        except RecordError as error:
            if number < len(lines) or tail or isinstance(error, ContradictionError):
                raise InputError(f"line {number} of {path} is not a record ({error}); move the file away.") from error
            warning = f"the last line of {path} is damaged ({error}); it is dropped and its cell runs again."
            break
        size += len(line) + 1
    if tail:
        warning = f"the last line of {path} was cut off; it is dropped and its cell runs again."
    keys = Counter(record.key for record in records)
    twice = sorted(key for key, count in keys.items() if count > 1)
    if twice:
        raise InputError(f"{path} has more than one record of {', '.join(twice)}; move the file away.")
    first: dict[str, Record] = {}
    for record in records:
        other = first.setdefault(record.case, record)
        if other.problem != record.problem:
            raise InputError(
                f"{path}: case {record.case} means two problems ({other.key} and {record.key}), whose times do not "
                "compare; keep each run in a directory of its own."
            )
    return tuple(records), size, warning


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextIdentity:
    """Identifies the text that a run reads."""

    path: str
    sha256: str
    field: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The identity of a run: it can be resumed only where all fields but ``file`` are the same.

    ``verb`` is what listed the cells: run, compile or tune. ``options`` holds the flags of the command line that say
    what is computed, of ``run`` those of extensions. Of ``run``: ``checkpoint`` holds the flags about a checkpoint that
    the cases were made with, ``file`` is the path of the suite's file as it was given, ``cells`` the number of cells of
    all cases, ``sample_seconds`` how long each is sampled (None: ten samples or a second), and ``shard`` is ``i/n``
    where the cases are the i-th of n parts of the requested ones. Of ``compile``: ``targets``, the cases of
    ``searches``, and the ``command``.
    """

    verb: str = "run"
    suite: str
    target: str
    versions: dict[str, str]
    source: str
    git_revision: str | None
    flags: dict[str, str]
    options: dict[str, Scalar] = dataclasses.field(default_factory=dict)
    cases: tuple[dict[str, Scalar], ...] = ()
    backends: tuple[str, ...] = ()
    text: TextIdentity | None = None
    all_cores: bool = False
    checkpoint: dict[str, Scalar] | None = None
    file: str | None = None
    shard: str | None = None
    cells: Size | None = None
    sample_seconds: float | None = None
    targets: tuple[str, ...] = ()
    searches: tuple[dict[str, Scalar], ...] = ()
    command: tuple[str, ...] = ()


_RENAMED = {"asked": "options"}  # fields under the names that earlier versions wrote
_NO_MACHINE = {"target": "", "versions": {}, "source": "", "git_revision": None, "flags": {}}


def require_run(directory: Path) -> None:
    """Raise InputError unless this directory holds a run that can be resumed."""
    if not (directory / MANIFEST).is_file():
        raise InputError(f"{directory} holds no run to resume; leave out --resume to start one.")


def read_manifest(directory: Path) -> Manifest:
    """The identity of the run in this directory. Raises InputError where there is none or it cannot be read."""
    path = directory / MANIFEST
    instead = "; without this file a report is made of the records alone, and the run is not resumed."
    with as_input(f"{path} is damaged or of another version: ", instead):
        return parse_manifest(typed.read_json(path))


def parse_manifest(data: Any) -> Manifest:
    """The identity of a run from its JSON. Raises ValueError without a full stop."""
    return typed.convert(_converted(data) if isinstance(data, dict) else data, Manifest)


def _converted(data: dict[str, Any]) -> dict[str, Any]:
    """A manifest as earlier versions wrote it, in the form of this one."""
    if "verb" not in data and "targets" in data:
        data = {"verb": "compile", **_NO_MACHINE, **data}
    elif "verb" in data and "suite" not in data:
        data = {"suite": data["verb"], **data}
    for old, new in _RENAMED.items():
        if old in data and new not in data:
            data[new] = data.pop(old)
    for name in extensions().keys() & data.keys():  # the flags of an extension, under its name
        flags = data.pop(name)
        data["options"] = data.get("options") or flags
    checkpoint = data.get("checkpoint")
    if isinstance(checkpoint, dict) and checkpoint.pop("guide", False):
        checkpoint["suite"] = data.get("suite")
    return data


def read_record(line: bytes) -> Record:
    """The record on one line, if its kind is known and its fields agree. Raises RecordError, without a full stop."""
    record = checked(Record.from_json(line))
    record.check_agreement()
    return record


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
