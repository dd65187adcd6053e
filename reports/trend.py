"""The trend of each cell over the runs of one machine, with the runs at which its level changed.

A backend's value in a run is its time relative to ``standard`` of the same rounds, which the machine's drift leaves
alone; that of ``standard`` and of a cell without it is its median time. Levels are found by PELT (Killick, Fearnhead
and Eckley, 2012; ruptures) on the logarithms, over the noise between neighbouring runs. A level lasts three runs or
more, so that a change is named two runs after it happened. What changed in source and versions stands beside it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from attnsuite.suite.errors import InputError
from attnsuite.suite.record import MACHINE_KIND, Record
from attnsuite.suite.reportable import label, same_problem, same_rounds, shows_speed, standard_of
from attnsuite.suite.store import parse_records, records_path

from . import cases, environment
from .formatting import escape, number, plural
from .markdown import render_table
from .regressions import against_control
from .table import MILLI, Column, table

LASTS = 3  # runs that a level lasts at least
LEAST_NOISE = 0.01  # of a value, between neighbouring runs: few runs can look steadier than a machine is
_BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


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
    runs: dict[tuple[object, ...], dict[tuple[str, ...], Entry]] = {}
    for directory in directories:
        records = parse_records(records_path(directory))[0]
        if not records:
            raise InputError(f"{directory} holds no whole record; leave it out.")
        machines = {(r.target, *(r.environment.get(name) for name in MACHINE_KIND)) for r in records}
        if len(machines) > 1:
            raise InputError(f"{directory} has cells of {len(machines)} machines; give runs of one machine each.")
        same = tuple(f"{record.key} {record.started}" for record in records)
        runs.setdefault(machines.pop(), {})[same] = Entry(directory, records)
    if not runs:
        raise InputError("--trend needs the directories of runs, such as runs/*.")
    return [sorted(found.values(), key=lambda run: (run.started, run.directory.name)) for found in runs.values()]


@dataclasses.dataclass(frozen=True, slots=True)
class Series:
    """A cell over the runs that have it: the number of each run, and its value there."""

    case: str
    backend: str
    relative: bool
    runs: tuple[int, ...]
    values: tuple[float, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """A change of level: the last run of the old level, the first of the new, and the new level over the old."""

    series: Series
    before: int
    run: int
    ratio: float


def trend_page(runs: Sequence[Entry], share: float) -> tuple[str, tuple[Change, ...]]:
    """The trend page of a machine's runs as Markdown, and every change of level by more than ``share``.

    Raises InputError if ruptures is not installed.
    """
    found = series(runs)
    changed = [change for each in found for change in changes(each) if abs(math.log(change.ratio)) > math.log1p(share)]
    changed.sort(key=lambda change: (-change.run, change.series.case, change.series.backend))
    device = environment.device_of(runs[-1].records[0])
    days = f"{escape(runs[0].started[:10])} to {escape(runs[-1].started[:10])}"
    sentence = (
        "A backend's value is its time relative to `standard` of the same rounds; that of `standard` is its time."
    )
    blocks = [
        f"# {escape(device)}: {plural(len(runs), 'run')}",
        f"{days}. {sentence} Named are changes by more than {100 * share:g}%.",
        "## Changes",
        _changes(changed, runs) if changed else "No cell changed its level.",
        "## Cells",
        _cells(found) if found else "No cell has a speed.",
    ]
    return "\n\n".join(blocks) + "\n", tuple(changed)


def series(runs: Sequence[Entry]) -> tuple[Series, ...]:
    """The values of every timed cell, in the order of a report's tables."""
    by_run = [{record.key: record for record in run.records if shows_speed(record)} for run in runs]
    latest = {key: record for run in by_run for key, record in run.items()}
    made = []
    for key in sorted(latest, key=lambda key: (cases.order(latest[key]), label(latest[key]), key)):
        found = [
            (at, _value(key, run))
            for at, run in enumerate(by_run)
            if key in run and same_problem(run[key], latest[key])
        ]
        relative = sum(is_relative for _, (_, is_relative) in found) * 2 > len(found)
        comparable = [(at, value) for at, (value, is_relative) in found if is_relative == relative]
        made.append(
            Series(cases.title(latest[key]), label(latest[key]), relative, *map(tuple, zip(*comparable, strict=True)))
        )
    return tuple(made)


def _value(key: str, run: Mapping[str, Record]) -> tuple[float, bool]:
    """The value of a cell in a run, and whether it is relative to standard."""
    standard = standard_of([record for record in run.values() if record.case == run[key].case])
    if standard is None or standard.key == key or not same_rounds(run[key], standard):
        return float(np.median(run[key].samples)), False
    pair = against_control(key, run, run, [standard.key])
    return float(np.median(pair[0] if pair else run[key].samples)), pair is not None


def changes(each: Series) -> list[Change]:
    """Where the level of a series changes. Raises InputError if ruptures is not installed."""
    try:
        import ruptures  # noqa: PLC0415  # pyright: ignore[reportMissingImports] (an extra)
    except ImportError as error:
        raise InputError("change points need ruptures; pip install '.[history]'.") from error
    if len(each.values) < 2 * LASTS:
        return []
    logs = np.log(each.values)
    noise = max(float(np.median(np.abs(np.diff(logs)))) / (0.6745 * math.sqrt(2)), LEAST_NOISE)
    found = ruptures.Pelt(model="l2", min_size=LASTS, jump=1).fit(logs / noise).predict(pen=4 * math.log(len(logs)))
    borders = [0, *found]
    levels = [float(np.median(logs[a:b])) for a, b in itertools.pairwise(borders)]
    return [
        Change(each, each.runs[at - 1], each.runs[at], math.exp(after - before))
        for at, before, after in zip(found, levels, levels[1:], strict=False)
    ]


def _changes(changed: Sequence[Change], runs: Sequence[Entry]) -> str:
    columns = (
        Column("run", "first run", lambda change: runs[change.run].started[:19]),
        Column("case", "case", lambda change: change.series.case),
        Column("backend", "backend", lambda change: change.series.backend),
        Column("ratio", "new level over old", lambda x: f"{number(x.ratio)} ({'slower' if x.ratio > 1 else 'faster'})"),
        Column("what", "what differs from the run before", lambda x: _differs(runs[x.before], runs[x.run])),
    )
    return render_table(table("changes", "", columns, changed))


def _differs(before: Entry, after: Entry) -> str:
    """The source and the versions that differ between two runs; a revision where the digest of the source does."""
    old, new = (entry.records[0].environment for entry in (before, after))
    sentence = []
    if old.get("source") != new.get("source"):
        sentence.append(
            f"source {new.get('source', 'not recorded')} (revision {new.get('git_revision') or 'not known'})"
        )
    for name, prefix in (("versions", ""), ("source_files", "file of "), ("flags", "")):
        there, here = old.get(name, {}), new.get(name, {})
        sentence += [
            f"{prefix}{key} {there.get(key, 'absent')} to {here.get(key, 'absent')}"
            for key in dict.fromkeys((*there, *here))
            if there.get(key) != here.get(key)
        ]
    return "; ".join(sentence) or "nothing that the records tell"


def _cells(found: Sequence[Series]) -> str:
    columns = (
        Column("case", "case", lambda each: each.case, merge=True),
        Column("backend", "backend", lambda each: each.backend),
        Column("runs", "runs", lambda each: len(each.values)),
        Column("first", "first", lambda each: _format_value(each, each.values[0])),
        Column("last", "last", lambda each: _format_value(each, each.values[-1])),
        Column("trend", "trend (low is fast)", lambda each: _trend(each.values)),
    )
    return render_table(table("cells", "", columns, found))


def _format_value(each: Series, value: float) -> str:
    return number(value) if each.relative else f"{number(value * MILLI)} ms"


def _trend(values: Sequence[float]) -> str:
    """A bar per run, the last forty. Their whole height is at least a tenth of the value, so that noise looks flat."""
    logs = np.log(values[-40:])
    spread = max(float(np.ptp(logs)), math.log(1.1))
    return "".join(_BARS[min(7, int(8 * (value - logs.min()) / spread))] for value in logs)
