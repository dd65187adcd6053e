"""Compare two runs of the same cells: what got worse, their source and environments, speeds, and statuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from attnsuite.suite import statistics
from attnsuite.suite.record import Record
from attnsuite.suite.reportable import label, same_problem, shows_memory
from attnsuite.suite.statistics import Interval

from . import cases, environment
from .formatting import Value, code, escape, plural, shorten
from .markdown import render_table
from .read import Run, load
from .regressions import Limits, Regression, against_control, control_of, regressions, timed
from .table import MILLI, Column, table

_NOT_RECORDED = "absent"
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
    blocks += [] if limits is None else _verdict(worse, limits.held(before, after))
    blocks += _origins(first, second)
    blocks += _speeds(before, after, shared)
    blocks += _statuses(before, after, shared)
    if others:
        sentence = ", ".join(map(code, others))
        blocks.append(f"Not compared, since the name means another problem in run B: {sentence}.")
    blocks += _missing("A", set(before) - set(after), "B")
    blocks += _missing("B", set(after) - set(before), "A")
    return Comparison("\n\n".join(blocks) + "\n", worse)


def _verdict(worse: Sequence[Regression], held: str) -> list[str]:
    held = f"Held to {escape(held)}."
    if not worse:
        return [f"**No regression.** {held}"]
    columns = (
        Column("what", "what", lambda each: each.what),
        Column("cell", "cell", lambda each: each.cell),
        Column("told", "run B", lambda each: each.sentence),
    )
    return [f"**{plural(len(worse), 'regression')}.** {held}", render_table(table("worse", "", columns, worse))]


def _origins(first: Run, second: Run) -> list[str]:
    """What differs between the runs, the source first; and every fact of both, folded."""
    facts = [_facts(first.records), _facts(second.records)]
    names = list(dict.fromkeys([*facts[0], *facts[1]]))
    columns = (
        Column("what", "what", lambda name: name),
        Column("a", "run A", lambda name: facts[0].get(name, _NOT_RECORDED)),
        Column("b", "run B", lambda name: facts[1].get(name, _NOT_RECORDED)),
    )
    warned = [_source(*facts)]
    devices = [fact.get("device", _NOT_RECORDED) for fact in facts]
    if devices[0] != devices[1]:
        warned.append(
            f"**Different devices:** {escape(devices[0])} (A) and {escape(devices[1])} (B). "
            "The ratios compare machines, not code."
        )
    apart = [name for name in names if facts[0].get(name) != facts[1].get(name) and name != "date"]
    if other := [name for name in apart if name not in ("device", *_SOURCE)]:
        warned.append(f"**Different:** {escape(', '.join(other))}. The ratios include the effect of these.")
    notes = [
        f"**Note on run {name}.** {escape(note)}"
        for name, run in zip("AB", (first, second), strict=True)
        for note in run.notes
    ]
    differing = [render_table(table("differing", "", columns, apart))] if apart else []
    every = render_table(table("origins", "", columns, names))
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
    sentence = " and ".join(
        f"{digest} ({revision}; run {name})" for digest, revision, name in zip(digests, revisions, "AB", strict=True)
    )
    return f"**Different source:** {escape(sentence)}."


def _facts(records: Sequence[Record]) -> dict[str, str]:
    digests = sorted({digest for r in records if (digest := r.environment.get("source"))})
    revisions = sorted({revision for r in records if (revision := r.environment.get("git_revision"))})
    facts = {
        "source digest": ", ".join(digests),
        "git revision": ", ".join(revisions),
        **{f"digest of {name}": " and ".join(values) for name, values in _named(records, "source_files").items()},
        "device": ", ".join(environment.by_device(records)),
        "date": environment.date_of(records),
        "suite": ", ".join(sorted({record.suite for record in records})),
        **environment.versions_of(records),
        **{name: " and ".join(values) for name, values in _named(records, "flags").items()},
        "pinned threads": ", ".join(sorted({str(r.environment.get("pinned_threads", 0)) for r in records})),
        "system": ", ".join(sorted({r.environment.get("platform", "") for r in records})),
    }
    return {name: value for name, value in facts.items() if value}


def _named(records: Sequence[Record], what: Literal["flags", "source_files"]) -> dict[str, list[str]]:
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

    def relative(key: str) -> Value:
        pair = against_control(key, before, after, control_of(key, before, after, both))
        return None if pair is None else statistics.unpaired_ratio(pair[1], pair[0])

    def temporary(key: str) -> Value:
        a, b = (r.memory.get("compiled_temp") if shows_memory(r) else None for r in (before[key], after[key]))
        return b / a if a and b is not None else None

    ratios = {key: statistics.unpaired_ratio(after[key].samples, before[key].samples) for key in both}
    marked = sum(bool(ratio.excludes(1.0)) for ratio in ratios.values())
    intervals = sum(ratio.low is not None for ratio in ratios.values())
    sentence = (
        f"{plural(len(both), 'cell')} with a speed in both runs; in {marked} the interval of the ratio excludes 1. "
        f"Of {plural(intervals, '95% interval')}, {intervals * 0.05:.1f} would exclude 1 by chance alone, and the "
        "intervals do not know how the machine drifted between the two runs. Drift cancels in the time relative to the "
        "cell's control: `standard`, or for `standard` the other backends, of the same case and rounds."
    )
    columns = (
        Column("case", "case", lambda key: cases.title(before[key]), merge=True),
        Column("backend", "backend", lambda key: " / ".join(dict.fromkeys((label(before[key]), label(after[key]))))),
        Column("a_ms", "A median (ms)", lambda key: statistics.median(before[key].samples).value * MILLI),
        Column("b_ms", "B median (ms)", lambda key: statistics.median(after[key].samples).value * MILLI),
        Column("ratio", "B time relative to A [95% interval]", ratios.get),
        Column("relative", "the same of its time relative to its control [95% interval]", relative),
        Column("reading", "reading", lambda key: _reading(ratios[key])),
        Column("temp", "temporary memory, B relative to A", temporary),
    )
    return ["## Speed", sentence, render_table(table("speed", "", columns, both))]


def _reading(ratio: Interval) -> str:
    labels = {None: "too few samples", False: "no measurable difference"}
    return labels.get(ratio.excludes(1.0), "B slower" if ratio.value > 1 else "B faster")


def _statuses(before: Mapping[str, Record], after: Mapping[str, Record], shared: Sequence[str]) -> list[str]:
    changed = [key for key in shared if _state(before[key]) != _state(after[key])]
    if not shared:
        return ["## What ran", "The runs share no cell (a cell is a case, a backend, a device and a mode)."]
    if not changed:
        return ["## What ran", f"{plural(len(shared), 'shared cell')}: status, mode and what ran are the same in both."]
    columns = (
        Column("cell", "cell", lambda key: key),
        Column("a", "run A", lambda key: _state(before[key])),
        Column("b", "run B", lambda key: _state(after[key])),
        Column("why", "why (run B)", lambda key: shorten(after[key].error or " ".join(after[key].reasons)) or None),
    )
    return ["## What ran", render_table(table("changed", "", columns, changed))]


def _state(record: Record) -> str:
    ran = record.resolved if record.mode is not None else None
    return ", ".join(part for part in (record.status, record.mode, ran) if part)


def _missing(there: str, keys: set[str], other: str) -> list[str]:
    if not keys:
        return []
    listed = "\n".join(f"- {escape(key)}" for key in sorted(keys, key=cases.natural))
    return [f"## Only in run {there}", f"{plural(len(keys), 'cell')} of run {there} not in run {other}:\n\n{listed}"]
