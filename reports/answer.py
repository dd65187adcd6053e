"""The answer of a page: for each case the exact backend to use, what it gains, and how sure that is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tabulate import tabulate

from attnsuite.suite.record import Record
from attnsuite.suite.reportable import baseline_of, ratio_of, same_rounds
from attnsuite.suite.statistics import Interval
from attnsuite.suite.summary import names_of, shortened_apart
from attnsuite.suite.user_function import is_reference

from .cells import Cell, Group, group
from .columns import BASELINE
from .formatting import TIMES, Value, estimate, number, plural
from .read import Run
from .table import MILLI, Column, Table, table

FASTER = "measurably faster"
_INSTALL = re.compile(r"pip install '[^']+'")


def answer(groups: Sequence[Group]) -> Table | None:
    """A row per case that has a speed; None where none has one."""
    rows = [_row(member) for member in groups if any(cell.speed for cell in member.cells)]
    baseline = baseline_of(member.kind for member in groups)
    columns = (
        Column("case", "case", merge=True),
        Column("use", "use this"),
        Column("time_over_standard", f"time relative to {baseline} [95% interval]"),
        Column("median_ms", "median (ms)"),
        Column("temp_ratio", f"temporary memory relative to {baseline}"),
        Column("sure", "how sure"),
        Column("others", f"next, and others (their time, {TIMES} that of the first)"),
    )
    return table("answer", "", columns, rows) if rows else None


def installs(records: Iterable[Record]) -> list[str]:
    """A sentence for each backend that one install keeps from running: no reason of its own asks for another device."""
    lacking: dict[tuple[str, str], set[str]] = {}
    for record in records:
        reasons = [reason for reason in record.reasons if reason.startswith(f"{record.requested}: ")]
        commands = [_INSTALL.search(reason) for reason in reasons]
        if record.status == "unsupported" and reasons and all(commands):
            command = next(found[0] for found in commands if found)
            lacking.setdefault((record.requested, command), set()).add(record.case)
    return [
        f"{backend} did not run in {plural(len(cases), 'case')} and may be faster; to have it: {command}"
        for (backend, command), cases in lacking.items()
    ]


def unmeasured(records: Sequence[Record], names: Iterable[str] | None = None) -> list[str]:
    """A sentence for each of ``names`` (None: each function of the user) that was not measured in some case."""
    found = []
    functions = (record.requested for record in records if is_reference(record.requested))
    for name in dict.fromkeys(functions if names is None else names):
        requested = [record for record in records if record.requested == name]
        without = [record for record in requested if record.status == "unsupported"]
        if without:
            reason = next(iter(without[0].reasons), without[0].error)
            found.append(f"{name} is unsupported in {len(without)} of {plural(len(requested), 'case')}: {reason}")
    return found


def answer_lines(run: Run, width: int = 80) -> list[str]:
    """The answer in lines of at most ``width``: case, backend, time relative to standard; below, what is not sure."""
    timed = [member for member in group(run.records) if any(cell.speed for cell in member.cells)]
    if not timed:
        return []
    found = [_row(member) for member in timed]
    headers = {"use": "use this"}
    if any(row.get("time_over_standard") for row in found):
        headers["time_over_standard"] = f"time, x {baseline_of(record.kind for record in run.records)}"
    values = [[_plain(row.get(key)) for key in headers] for row in found]
    room = width - 2 - sum(max(map(len, column)) + 2 for column in zip(headers.values(), *values, strict=True))
    full, first = names_of(run.records), [member.cells[0].record for member in timed]
    short = shortened_apart(full.values(), room)
    names = [short[full[record.case, record.target]] for record in first]
    rows = [[name, *row] for name, row in zip(names, values, strict=True)]
    unsure = [f"{name}: {row['sure']}" for name, row in zip(names, found, strict=True) if row["sure"] != FASTER]
    return [*tabulate(rows, ["case", *headers.values()], tablefmt="plain", disable_numparse=True).splitlines(), *unsure]


def _plain(value: Value) -> str:
    return estimate(value) if isinstance(value, Interval) else str(value or "-")


def exact_speeds(members: Group) -> list[Cell]:
    """The fastest cell of each exact backend with right numbers, fastest first.

    A fallback counts if its backend has no cell of its own.
    """
    timed = [cell for cell in members.cells if cell.speed and cell.record.exact and not cell.is_peer]
    native = [cell for cell in timed if cell.record.mode == "native"]
    names = {cell.record.resolved for cell in native}
    others = [cell for cell in timed if cell.record.resolved not in names]
    found = {cell.record.resolved: cell for cell in sorted([*native, *others], key=_seconds, reverse=True)}
    return sorted(found.values(), key=lambda cell: (_seconds(cell), cell.label))


def _row(case: Group) -> dict[str, Value]:
    ranked = exact_speeds(case)
    if not ranked:
        return {"case": case.case, "sure": "no exact backend has a speed here; the approximate ones are under Speed"}
    best = ranked[0]
    return {
        "case": case.case,
        "use": best.label,
        "time_over_standard": BASELINE if best.is_baseline else _against_standard(best, case),
        "median_ms": _seconds(best) * MILLI,
        "temp_ratio": BASELINE if best.is_baseline else best.temp_ratio,
        "sure": _sure(ranked),
        "others": ", ".join(_other(cell, best, whole=cell is ranked[1]) for cell in ranked[1:]) or None,
    }


def _seconds(cell: Cell) -> float:
    return cell.speed.median.value if cell.speed else float("inf")


def _against_standard(best: Cell, case: Group) -> Interval | str | None:
    """The time relative to the baseline's, or why there is none; None where the baseline was not asked for."""
    if best.speed is not None and best.speed.ratio is not None:
        return best.speed.ratio
    baseline = baseline_of([case.kind])
    if all(cell.record.requested != baseline for cell in case.cells):
        return None
    timed = any(cell.is_baseline and cell.speed for cell in case.cells)
    return f"{baseline} was measured in another session" if timed else f"{baseline} has no speed here"


def _sure(ranked: Sequence[Cell]) -> str:
    """Whether the rounds that both have tell the fastest backend from the next."""
    if len(ranked) == 1:
        return "nothing else that is exact was timed"
    ratio = _paired(ranked[1], ranked[0])
    if ratio is None:
        return "the next was measured in another session"
    if ratio.low is None:
        return f"{plural(ratio.count, 'round')}: too few to tell"
    return FASTER if distinguishable(ranked) else "no measurable difference to the next"


def distinguishable(ranked: Sequence[Cell]) -> bool:
    """Whether the rounds that the first two cells share tell them apart."""
    ratio = _paired(ranked[1], ranked[0])
    return ratio is not None and bool(ratio.excludes(1.0))


def _paired(cell: Cell, best: Cell) -> Interval | None:
    """Time of ``cell`` relative to that of ``best``; None where they share no rounds."""
    if not same_rounds(cell.record, best.record):
        return None
    return ratio_of(cell.record, best.record)


def _other(cell: Cell, best: Cell, *, whole: bool) -> str:
    ratio = _paired(cell, best)
    if ratio is None:
        return cell.label
    return f"{cell.label} {estimate(ratio) if whole else number(ratio.value)}"
