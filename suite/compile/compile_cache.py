"""The disk cache of compilers' answers: one file per cell, named by a hash of everything that could change the answer.

The hash covers the case, the configuration of its model, the backend, the device, the versions, this project's source
and the flags. A damaged file, or one that another version wrote, counts as missing. A file that cannot be written costs
time; the run goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnsuite.backends import Target

from ..cell import Cell
from ..kinds import problem_of
from ..kinds.model_case import ModelCase
from ..record import Record, RecordError
from .programs import model_config

_CIRCUMSTANCES = ("versions", "source", "flags")


def path_of(folder: Path, cell: Cell, target: Target, environment: Mapping[str, Any]) -> Path:
    """The file of a cell in ``folder``. ``environment`` is that of the cell's record."""
    what: dict[str, Any] = {"case": problem_of(cell.case), "backend": cell.row, "target": dataclasses.asdict(target)}
    if isinstance(cell.case, ModelCase):
        what["model"] = repr(model_config(cell.case))
    what |= {name: environment[name] for name in _CIRCUMSTANCES}
    return folder / f"{hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]}.json"


def find(path: Path, key: str) -> Record | None:
    """The record in ``path``; None where there is none, or it is not that of the cell ``key``."""
    with contextlib.suppress(OSError, RecordError):
        record = Record.from_json(path.read_bytes())
        return record if record.key == key else None
    return None


def keep(path: Path, record: Record) -> None:
    """Write the record, whole or not at all."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        partial.write_text(record.to_json(), encoding="utf-8")
        partial.replace(path)
