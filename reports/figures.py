"""Tables of cells: what ran, speed, memory and accuracy. Values stay numbers until they are shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from attnsuite.suite import kinds
from attnsuite.suite.record import Record
from attnsuite.suite.shown import is_trusted, shows_memory

from . import cases
from .cells import Cell, Group
from .columns import BASELINE, FIGURES
from .table import CASE, MIB, MILLI, Column, Table, scaled, table
from .words import Value, code, escape, plural, shorten

_PHASES = {"model_prefill": "prefill ", "model_decode": "decode "}
MEMORY_METHODS: dict[str, str] = {
    "compiled_argument": "arguments, compiled (MiB)",
    "compiled_output": "output, compiled (MiB)",
    "compiled_temp": "temporary, compiled (MiB)",
    "process_high_water": "process high-water mark above baseline (MiB)",
    "device_peak": "device peak (MiB)",
}


def reason_numbers(records: Iterable[Record]) -> dict[str, str]:
    """Each distinct reason with its number, ``R1`` onward in the order of the records."""
    distinct = dict.fromkeys(reason for record in records for reason in record.reasons)
    return {reason: f"R{number}" for number, reason in enumerate(distinct, start=1)}


def requested_and_run(groups: Sequence[Group], numbers: Mapping[str, str]) -> Table:
    """The backend asked for, the one that ran, and why: reasons by their number, errors in full."""
    rows: list[dict[str, Value]] = []
    for group in groups:
        for cell in group.cells:
            record = cell.record
            why = [", ".join(numbers[reason] for reason in record.reasons), shorten(record.error or "")]
            rows.append({
                "case": group.case,
                "requested": record.requested,
                "ran": _what_ran(record),
                "mode": record.mode,
                "exact": record.exact,
                "status": record.status,
                "why": ": ".join(part for part in why if part) or None,
            })  # fmt: skip
    columns = [CASE, *(Column(key, key) for key in ("requested", "ran", "mode", "exact", "status", "why"))]
    return table("requested_and_run", "", columns, rows)


def _what_ran(record: Record) -> str | None:
    if record.mode is None or record.resolved is None:
        return None
    return record.resolved if record.devices == 1 else f"{record.resolved}, {record.devices} devices"


def in_one(groups: Sequence[Group]) -> Table | None:
    """A row for each cell that ran: time, ratio, share of the peak, temporary memory, the error nearest its bound."""
    rows = [_in_one(group, cell) for group in groups for cell in group.cells if cell.record.status != "unsupported"]
    baselines = dict.fromkeys(kinds.kind_of(group.kind).baseline for group in groups)
    columns = (
        CASE,
        Column("backend", "backend"),
        *(FIGURES[name].column(baseline=" or ".join(baselines)) for name in _IN_ONE),
        Column("compiled_temp", MEMORY_METHODS["compiled_temp"]),
        Column("error", "error / allowed"),
        Column("ran", "ran"),
    )
    return table("in_one", "", columns, rows) if rows else None


_IN_ONE = ("median", "time_over_standard", "share_of_matmul_peak")


def _in_one(group: Group, cell: Cell) -> dict[str, Value]:
    record = cell.record
    errors = [error for error in record.accuracy.values() if error.max_error is not None and error.allowed]
    ran = {"ok": None if record.mode == "native" else record.mode}.get(record.status, record.status)
    return {
        "case": group.case,
        "backend": cell.label,
        **{name: FIGURES[name].on_page(group, cell) for name in _IN_ONE},
        "compiled_temp": scaled(record.memory.get("compiled_temp"), 1 / MIB) if shows_memory(record) else None,
        "error": max(errors, key=lambda error: (error.max_error or 0.0) / (error.allowed or 1.0), default=None)
        if record.exact
        else None,
        "ran": ran,
    }


def speed(groups: Sequence[Group]) -> tuple[Table, ...]:
    """Two tables for each kind of case that has a speed: times, then rates. One of both is wider than a page."""
    return tuple(
        made
        for kind, title in cases.titles(group.kind for group in groups)
        for made in _speed_of_kind(kind, title, groups)
    )


def _speed_of_kind(kind: str, title: str, groups: Sequence[Group]) -> Iterator[Table]:
    shown = [(group, cell) for group in groups if group.kind == kind for cell in group.cells if cell.speed]
    if not shown:
        return
    rates = [cell.speed.flops_rate or 0.0 for _, cell in shown if cell.speed]
    unit, size = ("TFLOP/s", 1e12) if max(rates) >= 1e13 else ("GFLOP/s", 1e9)
    words = {"baseline": kinds.kind_of(kind).baseline, "phase": _PHASES.get(kind, ""), "flops": unit}
    figures = [
        dataclasses.replace(figure, scale=1 / size) if figure.name == "flops_per_second" else figure
        for figure in FIGURES.values()
    ]
    rows = [
        {"case": problem_of(group), "backend": cell.label, "exact": cell.record.exact}
        | {figure.name: figure.on_page(group, cell) for figure in figures}
        for group, cell in shown
    ]
    times, others = (
        [figure.column(**words) for figure in figures if figure.table == part] for part in ("times", "rates")
    )
    lead = (CASE, Column("backend", "backend"))
    heading = _sentence_case(title)
    yield table(f"speed_{kind}", heading, (*lead, Column("exact", "exact"), *times), rows)
    if any(row.get(column.key) is not None for row in rows for column in others):
        yield table(f"rates_{kind}", f"{heading}: rates, and the time to compile", (*lead, *others), rows)


def overview(groups: Sequence[Group]) -> tuple[Table, ...]:
    """Median milliseconds, one row per case and one column per backend, if more than one case has a speed.

    Fallbacks are left out, because their backend has its own column. More than six backends take a second table.
    """
    timed = [group for group in groups if _native(group)]
    names = list(dict.fromkeys(cell.label for group in timed for cell in _native(group)))
    if len(timed) < 2:
        return ()
    made = []
    for start in range(0, len(names), 6):
        rows: list[dict[str, Value]] = []
        for group in timed:
            medians = {cell.label: cell.speed.median.value * MILLI for cell in _native(group) if cell.speed}
            rows.append({"case": group.case, **medians})
        columns = [CASE, *(Column(name, name) for name in names[start : start + 6])]
        heading = "All cases: median (ms)" if start == 0 else "All cases: median (ms), continued"
        made.append(table(f"overview_{start // 6 + 1}", heading, columns, rows))
    return tuple(made)


def _native(group: Group) -> list[Cell]:
    return [cell for cell in group.cells if cell.speed and cell.record.mode == "native"]


def memory(groups: Sequence[Group]) -> tuple[Table, ...]:
    """One table for each kind of case; every column is named after its method."""
    made = []
    for kind, title in cases.titles(group.kind for group in groups):
        rows = [
            _memory_row(group, cell)
            for group in groups
            for cell in group.cells
            if group.kind == kind and shows_memory(cell.record) and _known_sizes(cell.record)
        ]
        if not rows:
            continue
        others = sorted({key for row in rows for key in row} - set(MEMORY_METHODS) - {*_MEMORY_LEADS, "temp_ratio"})
        columns = [
            CASE,
            Column("backend", "backend"),
            Column("mode", "mode"),
            *(Column(key, header) for key, header in MEMORY_METHODS.items()),
            Column("temp_ratio", f"temporary relative to {kinds.kind_of(kind).baseline}"),
            *(Column(key, f"{key.replace('_', ' ')} (MiB)") for key in others),
        ]
        made.append(table(f"memory_{kind}", _sentence_case(title), columns, rows))
    return tuple(made)


_MEMORY_LEADS = ("case", "backend", "mode")


def _known_sizes(record: Record) -> dict[str, int]:
    return {name: size for name, size in record.memory.items() if size is not None}


def _memory_row(group: Group, cell: Cell) -> dict[str, Value]:
    sizes = {name: size / MIB for name, size in _known_sizes(cell.record).items()}
    ratio = BASELINE if cell.record is group.standard else cell.temp_ratio
    leads = {"case": problem_of(group), "backend": cell.label, "mode": cell.record.mode}
    return {**sizes, **leads, "temp_ratio": ratio}


def accuracy(groups: Sequence[Group]) -> tuple[Table, ...]:
    """Each tensor's error against the float64 oracle beside the allowed error, one table for each kind of case."""
    made = []
    for kind, title in cases.titles(group.kind for group in groups):
        judged = [(g, cell) for g in groups if g.kind == kind for cell in g.cells if cell.record.accuracy]
        if not judged:
            continue
        tensors = dict.fromkeys(name for _, cell in judged for name in cell.record.accuracy)
        columns = (
            CASE,
            Column("backend", "backend"),
            Column("mode", "mode"),
            *(Column(name, f"{name}: max error / allowed") for name in tensors),
            Column("verdict", "verdict"),
        )
        made.append(
            table(f"accuracy_{kind}", _sentence_case(title), columns, [_accuracy_row(*pair) for pair in judged])
        )
    return tuple(made)


def _accuracy_row(group: Group, cell: Cell) -> dict[str, Value]:
    errors = cell.record.accuracy
    outside = [name for name, error in errors.items() if not error.passed]
    verdict = f"OUTSIDE: {', '.join(outside)}" if outside else "within"
    shown: dict[str, Value] = dict(errors)
    if cell.record.exact is False:
        verdict = "not judged: approximate"
        shown = {name: "not finite" if error.max_error is None else error.max_error for name, error in errors.items()}
    leads = {"case": problem_of(group), "backend": cell.label, "mode": cell.record.mode}
    return {**shown, **leads, "verdict": verdict}


def cell_notes(groups: Sequence[Group]) -> tuple[str, ...]:
    """The notes of the records with the cells that they are about, each once, in the order of the cells."""
    found: dict[str, list[str]] = {}
    for group in groups:
        for cell in group.cells:
            for note in cell.record.notes:
                found.setdefault(note, []).append(f"{code(cell.label)} in {escape(group.case)}")
    return tuple(
        f"{noted[0] if len(noted) == 1 else plural(len(noted), 'cell')}: {escape(note)}"
        for note, noted in found.items()
    )


def untimed(groups: Sequence[Group]) -> list[Cell]:
    """Trusted native cells with samples that are no valid times (zero, negative, not finite)."""
    every = [cell for group in groups for cell in group.cells]
    return [
        cell
        for cell in every
        if cell.speed is None
        and cell.record.samples
        and is_trusted(cell.record)
        and cell.record.mode in ("native", "fallback")
    ]


def problem_of(group: Group) -> str:
    """The group's title without its kind, for tables whose heading names the kind."""
    return group.case.removeprefix(f"{kinds.title_of(group.kind)}, ")


def _sentence_case(title: str) -> str:
    return title[:1].upper() + title[1:]
