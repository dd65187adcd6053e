"""A few lines about a run for the terminal; the whole of it is in the report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.text import Text

from . import statistics
from .kinds.formulas import ITEM_BYTES
from .record import LossCurve, Record

_STYLES = {"ok": "green", "unsupported": "dim", "wrong": "bold red"}


def record_line(record: Record) -> Text:
    """One finished cell: its status, and its time or what went wrong."""
    line = Text.assemble((f"{record.status:<11} ", _style(record)), f"{record.case} / {_name(record)}")
    if record.samples:
        line.append(f"  {format_seconds(record)}")
    elif "recall" in record.quality:
        line.append(f"  recall {record.quality['recall']:.3f}")
    elif "bits_per_byte" in record.quality:
        line.append(f"  {record.quality['bits_per_byte']:.4f} bits/byte, KL {record.quality['kl_mean']:.1e}")
    if isinstance(record.facts, LossCurve) and record.facts.losses:
        first, last = (math.nan if loss is None else loss for loss in (record.facts.losses[0], record.facts.losses[-1]))
        line.append(f"  {first:.3f} -> {last:.6f} nats")
    if "target_memory" in record.environment:  # compiled for a device that is not here
        line.append(f" / {record.target}")
    if (peak := record.memory.get("compiled_peak")) is not None:
        line.append(f"  peak {_megabytes(peak)}")
    if record.error:
        line.append(f"  {record.error}", style="dim" if record.status == "unsupported" else "red")
    return line


def summary_lines(records: Sequence[Record]) -> Iterator[str]:
    """Time, speed relative to the standard backend, share of the machine's measured peaks, memory, error."""
    yield "time: median (95% interval); x standard: below 1 is faster; peak, copy: share of"
    yield "this machine's measured best; temp: compiled temporaries; error: largest relative"
    width = max((len(_name(record)) for record in records), default=0) + 3
    yield _columns(width, "", "time", "x standard", "peak", "copy", "temp", "error")
    baselines = {r.case: r for r in records if r.requested == "standard" and r.samples}
    for case in dict.fromkeys(record.case for record in records):
        yield case
        for record in (r for r in records if r.case == case and r.status != "unsupported"):
            yield _columns(
                width,
                "  " + _name(record),
                format_seconds(record) if record.samples else _result(record),
                _speedup(record, baselines.get(case)),
                *_shares(record),
                _megabytes(record.memory.get("compiled_temp")),
                _error(record),
            )


def _columns(first: int, name: str, *values: str) -> str:
    widths = (22, 17, 6, 6, 11, 8)
    return f"{name:<{first}}" + "".join(f"{value:>{width}}" for value, width in zip(values, widths, strict=True))


def format_seconds(record: Record) -> str:
    """The median with its interval, in the unit that suits it."""
    interval = statistics.median(record.samples)
    scale, unit = (1e6, "us") if interval.value < 1e-3 else (1e3, "ms") if interval.value < 1 else (1, "s")
    text = f"{interval.value * scale:.3g}"
    if interval.low is not None and interval.high is not None:
        text += f" ({interval.low * scale:.3g}-{interval.high * scale:.3g})"
    return f"{text} {unit}"


def ratio_to(record: Record, baseline: Record) -> Any:
    """Time of ``record`` relative to ``baseline``, by rounds where both were measured in one session."""
    if record.environment.get("session") != baseline.environment.get("session"):
        return None
    return statistics.paired_ratio(record.samples, baseline.samples)


def _speedup(record: Record, baseline: Record | None) -> str:
    if baseline is None or baseline is record or not record.samples:
        return ""
    ratio = ratio_to(record, baseline)
    if ratio is None:
        return "not paired"
    return f"{ratio.value:.2f}" + ("" if ratio.low is None else f" ({ratio.low:.2f}-{ratio.high:.2f})")


def _shares(record: Record) -> tuple[str, str]:
    """Share of the measured matmul peak of the dtype, and of the measured copy bandwidth."""
    machine = record.environment.get("machine", {})
    if not record.samples:
        return "", ""
    seconds = statistics.median(record.samples).value
    dtype = str(record.problem.get("dtype", "float32"))
    peaks = machine.get("matmul_flops", {})
    peak = peaks.get(dtype) or (peaks.get("bfloat16") if ITEM_BYTES.get(dtype) == 2 else None)
    rate = machine.get("copy_bytes_per_second")
    return _percent(record.flops, seconds, peak), _percent(record.bytes_moved, seconds, rate)


def _percent(amount: float | None, seconds: float, ceiling: float | None) -> str:
    return "" if amount is None or not ceiling else f"{100 * amount / seconds / ceiling:.1f}%"


def _name(record: Record) -> str:
    if record.mode in ("native", "compile", None):
        return record.requested + ("" if record.devices == 1 else f" on {record.devices}")
    return f"{record.requested} ({record.mode}: {record.resolved})"


def _result(record: Record) -> str:
    if "recall" in record.quality:
        return f"recall {record.quality['recall']:.3f}"
    if "bits_per_byte" in record.quality:
        return f"{record.quality['bits_per_byte']:.4f} bits/byte"
    return record.status


def _megabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:.1f} MiB"


def _error(record: Record) -> str:
    errors = [error.max_error for error in record.accuracy.values()]
    if not errors:
        return ""
    return "not finite" if None in errors else f"{max(e for e in errors if e is not None):.1e}"


def _style(record: Record) -> str:
    return _STYLES.get(record.status, "red")
