"""The page of ``attnsuite tune``: the winning options, how many were tried, and the cells that could not be tuned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from attnsuite.suite.choosing import expected_gain, winner
from attnsuite.suite.compile.occupancy import WARPS, occupancy
from attnsuite.suite.kinds.tuning_case import Trial
from attnsuite.suite.record import Record
from attnsuite.suite.reportable import scheduled_bundles

from ..environment import date_of, device_of, versions_of
from ..formatting import Value, code, escape, estimate, number
from ..markdown import render_table
from ..table import Column, table

_COLUMNS = (
    Column("case", "case", merge=True),
    Column("backend", "backend"),
    Column("device", "device", merge=True),
    Column("options", "options"),
    Column("ratio", "time relative to the defaults [95% interval]"),
    Column("expected", "expected time relative to the defaults (median error of expected times)"),
    Column("steps", "steps of the kernels (of the defaults)"),
    Column("loaded", "MiB loaded (of the defaults)"),
    Column("bundles", "bundles x grid steps (of the defaults)"),
    Column("waves", "waves, and occupancy, of the last kernel (of the defaults)"),
    Column("tried", "tried"),
    Column("failed", "of them failed"),
)


def files(records: Sequence[Record], _: Path) -> dict[str, str]:
    """The page."""
    return {"report.md": "\n\n".join(_page(records)) + "\n"}


def _page(records: Sequence[Record]) -> Iterator[str]:
    """The date, the device and the versions; a row per cell; the cells that could not be tuned, and why."""
    yield "# Tuned options"
    versions = ", ".join(f"{name} {version}" for name, version in versions_of(records).items())
    yield escape(f"{date_of(records)}, {device_of(records[0])}. Versions: {versions}")
    rows = []
    for record in records:
        if record.facts is not None:
            best, ratio = winner(record)
            options = ", ".join(f"{name} {value}" for name, value in best.options.items()) if best else "none compiles"
            compiled = "not measured" if record.mode == "compile" else "1 (the defaults)"
            rows.append(
                {
                    "case": record.case,
                    "backend": record.requested,
                    "device": record.target,
                    "options": options,
                    "ratio": compiled if ratio is None else estimate(ratio),
                    "expected": _expected(record, best),
                    **_work(best, record.facts.tried[0]),
                    "bundles": _bundles(best, record.facts.tried[0]),
                    "waves": _waves(best, record.facts.tried[0], record.target),
                    "tried": len(record.facts.tried),
                    "failed": sum(trial.error is not None for trial in record.facts.tried),
                }
            )
    if rows:
        yield render_table(table("tuned", "", _COLUMNS, rows))
    lines = [
        f"- **{record.status}**, {code(record.requested)} in {escape(record.case)}: {escape(record.error or '')}"
        for record in records
        if record.facts is None
    ]
    if lines:
        yield "## Not tuned"
        yield "\n".join(lines)


def _expected(record: Record, best: Trial | None) -> str | None:
    """The gain that is expected of the chosen options on a device that is not here; no measurement."""
    gain = None if best is None else expected_gain(record, best)
    return gain and f"{gain[0]:.3g} (± {100 * gain[1]:.2g}%)"


def _work(best: Trial | None, default: Trial) -> dict[str, Value]:
    """What the kernels do with the chosen options, and with the defaults, where the backend counts it."""
    if best is None or best.work is None or default.work is None:
        return {}
    loaded = (number(trial.loaded_bytes / 2**20) for trial in (best.work, default.work))
    return {"steps": f"{best.work.steps} ({default.work.steps})", "loaded": "{} ({})".format(*loaded)}


def _bundles(best: Trial | None, default: Trial) -> str | None:
    """What the compiler scheduled with the chosen options, and with the defaults."""
    counts = [scheduled_bundles(trial.schedules) if trial else None for trial in (best, default)]
    return None if None in counts else f"{counts[0]} ({counts[1]})"


def _waves(best: Trial | None, default: Trial, target: str) -> str | None:
    """Waves and occupancy with the chosen options, and with the defaults. Only the last kernel is that of the pass."""
    found = [occupancy(trial.kernels[-1], target) if trial and trial.kernels else None for trial in (best, default)]
    paragraphs = [f"{each.waves}, {100 * each.warps / WARPS:.3g}%" for each in found if each]
    return f"{paragraphs[0]} ({paragraphs[1]})" if len(paragraphs) == 2 else None
