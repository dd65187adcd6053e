"""Read a run directory: its records, with notes on the file itself.

A killed run can leave a last line that stops in the middle. That line is left out with a note. Any other line that is
no record is an error, because a report that silently left out cells would be false.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from attnsuite.suite import store
from attnsuite.suite.errors import InputError
from attnsuite.suite.record import Record
from attnsuite.suite.store import Manifest

from .formatting import plural


class ReportError(InputError):
    """A run directory from which no report can be made."""


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """The records of one run in the order of the file, its manifest if it has one, and notes about the file."""

    records: tuple[Record, ...]
    manifest: Manifest | None = None
    notes: tuple[str, ...] = ()


def load(run_dir: Path) -> Run:
    """Read ``records.jsonl`` and, if it exists, ``run.json``.

    Raises ReportError if the directory or the file is missing, if it has no whole record, if a line is no record, and
    if a key occurs twice.
    """
    try:
        path = store.records_path(run_dir)
        records, _, warning = store.parse_records(path)
        manifest = store.read_manifest(run_dir) if (run_dir / store.MANIFEST).exists() else None
    except InputError as error:
        raise ReportError(str(error)) from error
    if not records:
        raise ReportError(f"{path} holds no whole record; run at least one cell before asking for a report.")
    notes = [f"The last line of {store.RECORDS} is cut off or damaged and was left out."] if warning else []
    cells = len(records) if manifest is None or manifest.cells is None else manifest.cells
    if cells > len(records):
        notes.append(f"This run was not finished: {cells - len(records)} of its {cells} cells have no record.")
    if cells < len(records):
        counts = f"{plural(len(records), 'record')}, and {store.MANIFEST} says {plural(cells, 'cell')}"
        notes.append(f"{store.RECORDS} has {counts}: some records are of another run.")
    return Run(records, manifest, tuple(notes))
