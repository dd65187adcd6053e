"""A few lines about a run for the terminal; the report has all figures."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from rich.text import Text

from .kinds import kind_of
from .record import Record
from .reportable import Speed, baseline_of, shows_memory, shows_speed, speed_of, standard_of, times_of
from .statistics import Interval, median

_NAME = 15  # columns of a backend's name
_COLUMNS = {"time": 20, "against": 17, "peak": 7, "temp": 11, "error": 8}
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


def summary_lines(records: Sequence[Record], width: int = 80) -> Iterator[str]:
    """Time, speed relative to the standard backend, share of the machine's measured peaks, memory, error.

    Memory and share are left out where a terminal of ``width`` columns has no room for them.
    """
    against = f"x {baseline_of(record.kind for record in records)}"
    columns = tuple(column for column in _COLUMNS if width >= 80 or column not in ("peak", "temp"))
    room = max(4, width - 2 - sum(_COLUMNS[column] for column in columns))
    short = shortened_apart(map(_label, records), room)
    room = min(room, max(_NAME, *map(len, short.values())))

    def line(name: str, *values: str) -> str:
        shown = zip(_COLUMNS.items(), values, strict=True)
        return f"  {name:<{room}}" + "".join(f"{value:>{size}}" for (key, size), value in shown if key in columns)

    legend = f"time: median (95% interval); {against}: below 1 is faster; "
    legend += "peak: share of this machine's measured rate; temp: compiled temporaries; " if "peak" in columns else ""
    yield from textwrap.wrap(f"{legend}error: largest relative", width)
    yield line("", "time", against, "peak", "temp", "error")
    for (case, target), name in names_of(records).items():
        yield name
        members = [record for record in records if (record.case, record.target) == (case, target)]
        standard = standard_of(members)
        for record in (member for member in members if member.status != "unsupported"):
            speed = speed_of(record, standard)
            memory = record.memory.get("compiled_temp") if shows_memory(record) else None
            yield line(
                short[_label(record)],
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


def shortened_apart(names: Iterable[str], room: int) -> dict[str, str]:
    """Each name in so many columns, no two alike: a longer one without its middle, else its beginning and a number.

    >>> shortened_apart(["standard", "my.py:first_attention", "my.py:fifth_attention"], 15).values()
    dict_values(['standard', 'my.py:fir\u2026ntion', 'my.py:fif\u2026ntion'])
    """
    names, room = list(dict.fromkeys(names)), max(room, 4)
    for tail in sorted(range(1, room - 1), key=lambda tail: abs(tail - room // 2)):
        cuts = {x: x if len(x) <= room else f"{x[: room - 1 - tail]}\u2026{x[-tail:]}" for x in names}
        if len(set(cuts.values())) == len(names):
            return cuts
    return {x: x if len(x) <= room else f"{x[: room - 1 - len(f'{n}')]}\u2026{n}" for n, x in enumerate(names, 1)}


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


def _label(record: Record) -> str:
    return record.requested + ("" if record.devices == 1 else f" on {record.devices}")


def _name(record: Record) -> str:
    if record.mode in ("native", "compile", None):
        return _label(record)
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
