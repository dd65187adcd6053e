"""The page of ``attnsuite run --suite sharded``: attention divided among many devices, judged against the oracle."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from attnsuite.suite.record import Record

from ..environment import date_of, versions_of

_COLUMNS = ("backend", "mesh", "keys by", "problem", "status", "output", "dq", "dk", "dv")
_TENSORS = ("out", "dq", "dk", "dv")
_COUNTED = {1: "one process", 2: "two processes"}


def files(records: Sequence[Record], _: Path) -> dict[str, str]:
    """The page: what it shows, where it was computed, and the tables."""
    return {"report.md": "\n".join((*_title(records), *_tables(records))) + "\n"}


def _title(records: Sequence[Record]) -> Iterator[str]:
    environment, versions = records[0].environment, versions_of(records)
    packages = ", ".join(f"{name} {versions[name]}" for name in ("jax", "numpy") if versions.get(name))
    revision = environment.get("git_revision")
    made = f"{date_of(records)}, {environment.get('cpu')}, {packages}, revision {revision}"
    yield from (
        "# Sharded equality",
        "",
        "Attention dealt to many devices, held to the float64 oracle: largest error relative to the largest value, of",
        "output, dq, dk and dv; in brackets that of the same backend on one device. `ok`: each within what the judge",
        "allows (twice the error of `standard` on one device plus a floor, docs/explanation/design.md). Devices of a",
        "host share its cores, so there is no time here. `splash` runs in Pallas' interpreter.",
        "",
        f"{made}; `attnsuite run --suite sharded`.",
    )


def _tables(records: Sequence[Record]) -> Iterator[str]:
    """A table per number of processes, and the refusals below it."""
    for (processes, devices), members in itertools.groupby(sorted(records, key=_start), key=_start):
        ran, refused = [], []
        for record in members:
            (refused if record.status == "unsupported" else ran).append(record)
        each = "" if processes == 1 else " each"
        yield from ("", f"## {_COUNTED.get(processes, f'{processes} processes')}, {devices} devices{each}", "")
        yield f"| {' | '.join(_COLUMNS)} |"
        yield "|" + "---|" * len(_COLUMNS)
        yield from map(_row, ran)
        if refused:
            yield from ("", "Refused before anything is traced:", "")
        for record in refused:
            where = f"`{record.requested}`, {record.problem.get('mesh')}, {record.problem.get('exchange') or ''}"
            yield f"- {where}, {record.problem.get('problem')}: {' '.join(record.reasons)}"


def _start(record: Record) -> tuple[int, int]:
    """Processes, and devices of each."""
    processes = record.problem.get("processes")
    processes = processes if isinstance(processes, int) and processes > 0 else 1
    return processes, record.devices // processes


def _row(record: Record) -> str:
    what = [record.problem.get(name) or "" for name in ("mesh", "exchange", "problem")]
    cells = [_error(record, name) for name in _TENSORS] if record.accuracy else [record.error or "", "", "", ""]
    return "| " + " | ".join([f"`{record.requested}`", *map(str, what), record.status, *cells]) + " |"


def _error(record: Record, name: str) -> str:
    if name not in record.accuracy:
        return ""
    alone = None if record.facts is None else record.facts.one_device.get(name)
    return f"{_format_error(record.accuracy[name].max_error)} ({_format_error(alone)})"


def _format_error(error: float | None) -> str:
    return "not finite" if error is None else f"{error:.1e}"
