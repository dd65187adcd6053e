"""Compare two runs of the same cells: their environments, the speeds that changed, and the statuses that changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from attnsuite.suite import statistics
from attnsuite.suite.record import Record
from attnsuite.suite.shown import label, shows_memory, shows_speed

from . import cases, environment
from .markdown import render_table
from .read import Run, load
from .table import MILLI, Column, Table, table
from .words import Value, escape, plural, shorten

_ABSENT = "absent"


def compare(run_a: Path, run_b: Path) -> str:
    """Markdown that compares run B with run A, cell by cell.

    Each cell with a speed in both runs gets the ratio of its medians, B over A, with a 95% interval from resampling
    each run separately: the runs share no rounds. Raises ReportError if a run cannot be read.
    """
    first, second = load(run_a), load(run_b)
    before = {record.key: record for record in first.records}
    after = {record.key: record for record in second.records}
    shared = sorted(set(before) & set(after), key=lambda key: (cases.order(before[key]), label(before[key]), key))
    blocks = ["# Run B against run A", *_origins(first, second)]
    blocks += _speeds(before, after, shared)
    blocks += _statuses(before, after, shared)
    blocks += _missing("A", set(before) - set(after), "B")
    blocks += _missing("B", set(after) - set(before), "A")
    return "\n\n".join(blocks) + "\n"


def _origins(first: Run, second: Run) -> list[str]:
    facts = [_facts(first.records), _facts(second.records)]
    names = list(dict.fromkeys([*facts[0], *facts[1]]))
    rows: list[dict[str, Value]] = [
        {"what": name, "a": facts[0].get(name, _ABSENT), "b": facts[1].get(name, _ABSENT)} for name in names
    ]
    columns = [Column("what", "what"), Column("a", "run A"), Column("b", "run B")]
    devices = [fact["device"] for fact in facts]
    other = [name for name in names if name not in ("date", "device") and facts[0].get(name) != facts[1].get(name)]
    warned = []
    if devices[0] != devices[1]:
        warned.append(
            f"**Different devices:** {escape(devices[0])} (A) and {escape(devices[1])} (B). "
            "The ratios compare machines, not code."
        )
    if other:
        warned.append(f"**Different:** {escape(', '.join(other))}. The ratios include the effect of these.")
    notes = [f"**Note on run {name}.** {escape(note)}" for name, run in zip("AB", (first, second), strict=True)
             for note in run.notes]  # fmt: skip
    return [*warned, *notes, render_table(Table("origins", "", tuple(columns), tuple(rows)))]


def _facts(records: Sequence[Record]) -> dict[str, str]:
    revisions = sorted({revision for r in records if (revision := r.environment.get("git_revision"))})
    facts = {
        "device": ", ".join(page.device for page in environment.pages(records)),
        "date": environment.date_of(records),
        "suite": ", ".join(sorted({record.suite for record in records})),
        "git revision": ", ".join(revisions),
        **environment.versions_of(records),
    }
    return {name: value for name, value in facts.items() if value}


def _speeds(before: Mapping[str, Record], after: Mapping[str, Record], shared: Sequence[str]) -> list[str]:
    timed = [key for key in shared if shows_speed(before[key]) and shows_speed(after[key])]
    if not timed:
        return ["## Speed", "No cell has a speed in both runs."]
    made = _rows(before, after, timed)
    marked = sum(row["reading"] in ("B slower", "B faster") for row in made)
    intervals = sum(row["reading"] != "too few samples" for row in made)
    told = (
        f"{plural(len(timed), 'cell')} with a speed in both runs; in {marked} the interval of the ratio excludes 1. "
        f"Of {plural(intervals, '95% interval')}, {intervals * 0.05:.1f} would exclude 1 by chance alone, and the "
        "intervals do not know how the machine drifted between the two runs."
    )
    columns = (
        Column("case", "case", merge=True),
        Column("backend", "backend"),
        Column("a_ms", "A median (ms)"),
        Column("b_ms", "B median (ms)"),
        Column("ratio", "B time relative to A [95% interval]"),
        Column("reading", "reading"),
        Column("temp", "temporary memory, B relative to A"),
    )
    return ["## Speed", told, render_table(table("speed", "", columns, made))]


def _rows(before: Mapping[str, Record], after: Mapping[str, Record], timed: Sequence[str]) -> list[dict[str, Value]]:
    rows: list[dict[str, Value]] = []
    for key in timed:
        a, b = before[key], after[key]
        ratio = statistics.unpaired_ratio(b.samples, a.samples)
        words = {None: "too few samples", False: "no measurable difference"}
        apart = "B slower" if ratio.value > 1 else "B faster"
        temps = [r.memory.get("compiled_temp") if shows_memory(r) else None for r in (a, b)]
        rows.append({
            "case": cases.title(a),
            "backend": label(b) if label(a) == label(b) else f"{label(a)} / {label(b)}",
            "a_ms": statistics.median(a.samples).value * MILLI,
            "b_ms": statistics.median(b.samples).value * MILLI,
            "ratio": ratio,
            "reading": words.get(ratio.excludes(1.0), apart),
            "temp": temps[1] / temps[0] if temps[0] and temps[1] is not None else None,
        })  # fmt: skip
    return rows


def _statuses(before: Mapping[str, Record], after: Mapping[str, Record], shared: Sequence[str]) -> list[str]:
    changed = [key for key in shared if _state(before[key]) != _state(after[key])]
    if not changed:
        return ["## What ran", f"{plural(len(shared), 'shared cell')}: status, mode and what ran are the same in both."]
    rows: list[dict[str, Value]] = [
        {
            "cell": key,
            "a": _state(before[key]),
            "b": _state(after[key]),
            "why": shorten(after[key].error or " ".join(after[key].reasons)) or None,
        }
        for key in changed
    ]
    columns = (Column("cell", "cell"), Column("a", "run A"), Column("b", "run B"), Column("why", "why (run B)"))
    return ["## What ran", render_table(table("changed", "", columns, rows))]


def _state(record: Record) -> str:
    ran = record.resolved if record.mode is not None else None
    return ", ".join(part for part in (record.status, record.mode, ran) if part)


def _missing(there: str, keys: set[str], absent: str) -> list[str]:
    if not keys:
        return []
    listed = "\n".join(f"- {escape(key)}" for key in sorted(keys, key=cases.natural))
    return [f"## Only in run {there}", f"{plural(len(keys), 'cell')} of run {there} not in run {absent}:\n\n{listed}"]
