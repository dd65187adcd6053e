"""A run directory -> its records, with a note for everything a reader should know about the file itself.

A killed run can leave a last line that stops in the middle: it is left out with a note. Anything else that
is not a record is an error, because a report that silently leaves out cells would be a false report.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from suite import store
from suite.errors import InputError
from suite.record import Record


class ReportError(ValueError):
    """A run directory from which no report can be made."""


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """The records of one run in the order of the file, its manifest, and notes about the file."""

    records: tuple[Record, ...]
    manifest: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


def load(run_dir: Path) -> Run:
    """Read ``records.jsonl`` and, where it is there, ``run.json``.

    Raises ReportError where the directory or the file is missing, where no whole record is in it, where a
    line is not a record, and where a key comes twice.
    """
    path = Path(run_dir) / store.RECORDS
    if not path.is_file():
        raise ReportError(f"{run_dir} holds no {store.RECORDS}; give the directory that a run was written to.")
    try:
        records, _, warning = store.parse_records(path)
    except InputError as error:
        raise ReportError(str(error)) from error
    if not records:
        raise ReportError(f"{path} holds no whole record; run at least one cell before asking for a report.")
    notes = (f"The last line of {store.RECORDS} is cut off or damaged and was left out.",) if warning else ()
    return Run(records, _manifest(Path(run_dir) / store.MANIFEST), notes)


def _manifest(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ReportError(f"{path} is not JSON ({error}); restore it or move it away.") from error
    return data if isinstance(data, dict) else {}
