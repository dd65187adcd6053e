"""Compare two runs of the same cells: what got worse, their source and environments, speeds, and statuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from attnsuite.suite import statistics
from attnsuite.suite.record import Record
from attnsuite.suite.shown import label, same_problem, shows_memory

from . import cases, environment
from .markdown import render_table
from .read import Run, load
from .regressions import Limits, Regression, against_control, control_of, regressions, timed
from .table import MILLI, Column, Table, table
from .words import Value, code, escape, plural, shorten

_ABSENT = "absent"
_SOURCE = ("source digest", "git revision")


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs compared, as Markdown; and what is worse in run B, by the limits that were given."""

    text: str
    regressions: tuple[Regression, ...] = ()


def compare(run_a: Path, run_b: Path, limits: Limits | None = None) -> Comparison:
    """Run B compared with run A, cell by cell.

    Each cell with a speed in both runs gets the ratio of its medians, B over A, with a 95% interval from resampling
    each run separately: the runs share no rounds. With ``limits`` the verdict comes first (``regressions.py``). Raises
    ReportError if a run cannot be read, and InputError where a limit has nothing to be held to.
    """
    first, second = load(run_a), load(run_b)
    before = {record.key: record for record in first.records}
    after = {record.key: record for record in second.records}
    others = sorted(key for key in before.keys() & after.keys() if not same_problem(before[key], after[key]))
    for key in others:
        del before[key], after[key]
    shared = sorted(set(before) & set(after), key=lambda key: (cases.order(before[key]), label(before[key]), key))
    worse = () if limits is None else regressions(before, after, limits)
    blocks = ["# Run B against run A"]
    blocks += [] if limits is None else _verdict(worse, limits, len(shared))
    blocks += _origins(first, second)
    blocks += _speeds(before, after, shared)
    blocks += _statuses(before, after, shared)
    if others:
        sentence = ", ".join(map(code, others))
        blocks.append(f"Not compared, since the name means another problem in run B: {sentence}.")
    blocks += _missing("A", set(before) - set(after), "B")
    blocks += _missing("B", set(after) - set(before), "A")
    return Comparison("\n\n".join(blocks) + "\n", worse)


def _verdict(worse: Sequence[Regression], limits: Limits, count: int) -> list[str]:
    held = f"{plural(count, 'shared cell')} held to: {escape(str(limits))}."
    if not worse:
        return [f"**No regression.** {held}"]
    rows: list[dict[str, Value]] = [{"what": each.what, "cell": each.cell, "told": each.sentence} for each in worse]
    columns = (Column("what", "what"), Column("cell", "cell"), Column("told", "run B"))
    return [f"**{plural(len(worse), 'regression')}.** {held}", render_table(Table("worse", "", columns, tuple(rows)))]


def _origins(first: Run, second: Run) -> list[str]:
    """What differs between the runs, the source first; and every fact of both, folded."""
    facts = [_facts(first.records), _facts(second.records)]
    names = list(dict.fromkeys([*facts[0], *facts[1]]))
    rows: list[dict[str, Value]] = [
        {"what": name, "a": facts[0].get(name, _ABSENT), "b": facts[1].get(name, _ABSENT)} for name in names
    ]
    columns = (Column("what", "what"), Column("a", "run A"), Column("b", "run B"))
    warned = [_source(*facts)]
    devices = [fact["device"] for fact in facts]
    if devices[0] != devices[1]:
        warned.append(
            f"**Different devices:** {escape(devices[0])} (A) and {escape(devices[1])} (B). "
            "The ratios compare machines, not code."
        )
    apart = [row for row in rows if row["a"] != row["b"] and row["what"] != "date"]
    if other := [str(row["what"]) for row in apart if row["what"] not in ("device", *_SOURCE)]:
        warned.append(f"**Different:** {escape(', '.join(other))}. The ratios include the effect of these.")
    notes = [f"**Note on run {name}.** {escape(note)}" for name, run in zip("AB", (first, second), strict=True)
             for note in run.notes]  # fmt: skip
    differing = [render_table(Table("differing", "", columns, tuple(apart)))] if apart else []
    every = render_table(Table("origins", "", columns, tuple(rows)))
    folded = ["<details><summary>Source and environment of both runs</summary>", every, "</details>"]
    return [*warned, *notes, *differing, *folded]


def _source(a: Mapping[str, str], b: Mapping[str, str]) -> str:
    """Whether both runs are of the same source, by the digest of the package's files."""
    digests = [facts.get("source digest") for facts in (a, b)]
    if unknown := [name for name, digest in zip("AB", digests, strict=True) if digest is None]:
        which = f"run {unknown[0]}" if len(unknown) == 1 else "both runs"
        return f"**Source not recorded** in {which}: whether the code is the same is not known."
    if digests[0] == digests[1]:
        return f"Same source in both runs (digest {escape(str(digests[0]))})."
    revisions = [facts.get("git revision", "no checkout") for facts in (a, b)]
    sentence = " and ".join(f"{digest} ({revision}; run {name})"
                        for digest, revision, name in zip(digests, revisions, "AB", strict=True))  # fmt: skip
    return f"**Different source:** {escape(sentence)}."


def _facts(records: Sequence[Record]) -> dict[str, str]:
    digests = sorted({digest for r in records if (digest := r.environment.get("source"))})
    revisions = sorted({revision for r in records if (revision := r.environment.get("git_revision"))})
    facts = {
        "source digest": ", ".join(digests),
        "git revision": ", ".join(revisions),
        **{f"digest of {name}": " and ".join(values) for name, values in _named(records, "own").items()},
        "device": ", ".join(page.device for page in environment.pages(records)),
        "date": environment.date_of(records),
        "suite": ", ".join(sorted({record.suite for record in records})),
        **environment.versions_of(records),
        **{name: " and ".join(values) for name, values in _named(records, "flags").items()},
        "pinned threads": ", ".join(sorted({str(r.environment.get("pinned_threads", 0)) for r in records})),
        "system": ", ".join(sorted({r.environment.get("platform", "") for r in records})),
    }
    return {name: value for name, value in facts.items() if value}


def _named(records: Sequence[Record], what: Literal["flags", "own"]) -> dict[str, list[str]]:
    """Each environment variable that changes what is computed, or each file of a user's rows: its values."""
    found: dict[str, set[str]] = {}
    for record in records:
        for name, value in record.environment.get(what, {}).items():
            found.setdefault(name, set()).add(value)
    return {name: sorted(values) for name, values in found.items()}


def _speeds(before: Mapping[str, Record], after: Mapping[str, Record], shared: Sequence[str]) -> list[str]:
    speeds = set(timed(before, after))
    both = [key for key in shared if key in speeds]
    if not both:
        return ["## Speed", "No cell has a speed in both runs."]
    made = _rows(before, after, both)
    marked = sum(row["reading"] in ("B slower", "B faster") for row in made)
    intervals = sum(row["reading"] != "too few samples" for row in made)
    sentence = (
        f"{plural(len(both), 'cell')} with a speed in both runs; in {marked} the interval of the ratio excludes 1. "
        f"Of {plural(intervals, '95% interval')}, {intervals * 0.05:.1f} would exclude 1 by chance alone, and the "
        "intervals do not know how the machine drifted between the two runs. Drift cancels in the time relative to the "
        "cell's control: `standard`, or for `standard` the other backends, of the same case and rounds."
    )
    columns = (
        Column("case", "case", merge=True),
        Column("backend", "backend"),
        Column("a_ms", "A median (ms)"),
        Column("b_ms", "B median (ms)"),
        Column("ratio", "B time relative to A [95% interval]"),
        Column("relative", "the same of its time relative to its control [95% interval]"),
        Column("reading", "reading"),
        Column("temp", "temporary memory, B relative to A"),
    )
    return ["## Speed", sentence, render_table(table("speed", "", columns, made))]


def _rows(before: Mapping[str, Record], after: Mapping[str, Record], both: Sequence[str]) -> list[dict[str, Value]]:
    rows: list[dict[str, Value]] = []
    for key in both:
        a, b = before[key], after[key]
        ratio = statistics.unpaired_ratio(b.samples, a.samples)
        pair = against_control(key, before, after, control_of(key, before, after, both))
        words = {None: "too few samples", False: "no measurable difference"}
        apart = "B slower" if ratio.value > 1 else "B faster"
        temps = [r.memory.get("compiled_temp") if shows_memory(r) else None for r in (a, b)]
        rows.append({
            "case": cases.title(a),
            "backend": label(b) if label(a) == label(b) else f"{label(a)} / {label(b)}",
            "a_ms": statistics.median(a.samples).value * MILLI,
            "b_ms": statistics.median(b.samples).value * MILLI,
            "ratio": ratio,
            "relative": None if pair is None else statistics.unpaired_ratio(pair[1], pair[0]),
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
