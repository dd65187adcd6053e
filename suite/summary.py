"""A few lines about a run for the terminal; the report has all figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from .kinds import kind_of
from .record import Record
from .reportable import Speed, baseline_of, shows_memory, shows_speed, speed_of, standard_of, times_of
from .statistics import Interval, median

_NAME = 15  # columns of a backend's name
_STYLES = {"ok": "green", "unsupported": "dim", "wrong": "bold red"}


def record_line(record: Record) -> Text:
    """One finished cell: its status, and its time or its error."""
    line = Text.assemble(
        (f"{record.status:<11} ", _STYLES.get(record.status, "red")), f"{record.case} / {_name(record)}"
    )
    if shows_speed(record):
        line.append(f"  {format_seconds(median(times_of(record)))}")
    elif found := kind_of(record.kind).result(record):
        line.append(f"  {', '.join(found)}")
    if "target_memory" in record.environment:  # compiled for a device that is not here
        line.append(f" / {record.target}")
    if (peak := record.memory.get("compiled_peak")) is not None:
        line.append(f"  peak {_megabytes(peak)}")
    if record.status == "unsupported":
        line.append(f"  {refusal(record)}", style="dim")
    elif record.error:
        line.append(f"  {record.error}", style="red")
    return line


def refusal(record: Record) -> str | None:
    """The first reason that a refused cell's own backend gives, without its advice; else what the record says."""
    reasons = [reason for reason in record.reasons if reason.startswith(f"{record.requested}: ")]
    return (
        f"{reasons[0].removeprefix(f'{record.requested}: ').split('; ')[0].rstrip('.')}." if reasons else record.error
    )


def summary_lines(records: Sequence[Record]) -> Iterator[str]:
    """Time, speed relative to the standard backend, share of the machine's measured peaks, memory, error."""
    against = f"x {baseline_of(record.kind for record in records)}"
    yield f"time: median (95% interval); {against}: below 1 is faster; peak: share of this"
    yield "machine's measured rate; temp: compiled temporaries; error: largest relative"
    yield _columns("", "time", against, "peak", "temp", "error")
    for (case, target), name in names_of(records).items():
        yield name
        members = [record for record in records if (record.case, record.target) == (case, target)]
        standard = standard_of(members)
        for record in (member for member in members if member.status != "unsupported"):
            speed = speed_of(record, standard)
            memory = record.memory.get("compiled_temp") if shows_memory(record) else None
            yield _columns(
                shortened(record.requested + ("" if record.devices == 1 else f" on {record.devices}"), _NAME),
                format_seconds(speed.median) if speed else _result(record),
                _ratio(speed, record, standard),
                f"{100 * speed.peak_share:.1f}%" if speed and speed.peak_share is not None else "",
                _megabytes(memory),
                _error(record),
            )


def names_of(records: Sequence[Record]) -> dict[tuple[str, str], str]:
    """A name for each case and target: the case's, with the target where there are several."""
    several = len({record.target for record in records}) > 1
    return {(r.case, r.target): f"{r.case}, for {r.target}" if several else r.case for r in records}


def _columns(name: str, *values: str) -> str:
    """A line of at most 80 columns."""
    widths = (20, 17, 7, 11, 8)
    return f"  {name:<{_NAME}}" + "".join(f"{value:>{width}}" for value, width in zip(values, widths, strict=True))


def shortened(name: str, room: int) -> str:
    """A name in so many columns: the middle of a longer one is left out (the log of a run spells it).

    >>> shortened("ragged_paged_attention", 9)
    'rag\u2026tion'
    """
    half = max(room // 2, 2)
    return name if len(name) <= room else f"{name[: half - 1]}\u2026{name[-half:]}"


def format_seconds(interval: Interval) -> str:
    """Seconds with their interval, in a suitable unit."""
    scale, unit = (1e6, "us") if interval.value < 1e-3 else (1e3, "ms") if interval.value < 1 else (1, "s")
    value, low, high = (
        None if x is None else _number(x * scale) for x in (interval.value, interval.low, interval.high)
    )
    return f"{value} {unit}" if low is None or high is None else f"{value} ({low}-{high}) {unit}"


def _number(value: float) -> str:
    """Three digits, or all of a whole number: never an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(speed: Speed | None, record: Record, standard: Record | None) -> str:
    """Time relative to the standard backend's, round by round if both were measured in one session."""
    if speed is None or standard is None or standard is record or not shows_speed(standard):
        return ""
    if speed.ratio is None:
        return "not paired"
    low, high = speed.ratio.low, speed.ratio.high
    digits = ".2f" if speed.ratio.value < 10 else ".3g"
    return f"{speed.ratio.value:{digits}}" + ("" if low is None else f" ({low:{digits}}-{high:{digits}})")


def _name(record: Record) -> str:
    if record.mode in ("native", "compile", None):
        return record.requested + ("" if record.devices == 1 else f" on {record.devices}")
    return f"{record.requested} ({record.mode}: {record.resolved})"


def _result(record: Record) -> str:
    other = "interpreted" if (record.status, record.mode) == ("ok", "interpret") else record.status
    return next(iter(kind_of(record.kind).result(record)), other)


def _megabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:.1f} MiB"


def _error(record: Record) -> str:
    errors = [error.max_error for error in record.accuracy.values()]
    if not errors:
        return ""
    return "not finite" if None in errors else f"{max(e for e in errors if e is not None):.1e}"
