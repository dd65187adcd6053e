"""What ``attnsuite tune`` makes of its records: the winner of each cell, and the table ``tuned.json`` of the winners.

Measured candidates win by their time. For a device that is not here, those that compile and fit come first. Among them
come first those with the fewest spilled bytes, then the least expected time (``compile/expected.py``; of few kernels
and devices), then the fewest steps of the kernels' grids, then the fewest bytes loaded, then the largest blocks; the
defaults win a tie. A ranking is no measurement, and the table says which of the two it holds. ``backends/tuned.py``
reads the table: the winners, and all that was tried or failed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from typing import Any

from attnsuite.backends.tuned import SCHEMA

from . import statistics
from .compile.expected import CHIPS, expected_seconds
from .errors import InputError
from .kinds.attention import spec_of
from .kinds.tuning import TUNING, Trial
from .record import Record
from .reportable import scheduled_bundles
from .statistics import Interval

TABLE = "tuned.json"
EXPECTED = ("splash", "tokamax_splash")  # backends whose kernels the expected times are of
FIRST_ROUNDS, LAST_ROUNDS = 3, 9  # samples of every candidate, and of the best few after a first look
_KERNEL_FIELDS = ("name", "registers", "spilled_bytes", "shared_bytes", "shared_limit_bytes", "blocks")


def table(records: Sequence[Record], command: str) -> str:
    """The table of winners, as JSON with one entry per line. Raises InputError if nothing was tuned."""
    tuned = [record for record in records if record.facts is not None]
    refused = [f"{record.case} / {record.requested}: {record.error}" for record in records if record.facts is None]
    if not tuned:
        raise InputError(f"nothing could be tuned: {refused[0]}")
    kept = ("versions", "git_revision", "target", "cpu", "cores", "flags")
    head = {
        "schema": SCHEMA,
        "command": command,
        "date": max(record.started for record in records)[:10],
        "environment": {name: tuned[0].environment.get(name) for name in kept},
        "refused": refused,
    }
    start, lines = json.dumps(head | {"entries": []})[:-2], ",\n".join(json.dumps(entry(record)) for record in tuned)
    return f"{start}\n{lines}\n]}}\n"


def expected(record: Record, trial: Trial) -> float | None:
    """The expected seconds of a candidate on a device that is not here; None where nothing is expected."""
    if record.mode != "compile" or record.requested not in EXPECTED:
        return None
    return expected_seconds(
        record.target.partition(":")[2], spec_of(TUNING.call(record.problem)), trial.options, trial.work
    )


def expected_gain(record: Record, best: Trial) -> tuple[float, float] | None:
    """The expected time over that of the defaults, and the median relative error of expected times on that device."""
    mine, default = (expected(record, trial) for trial in (best, record.facts.tried[0]))
    if mine is None or default is None:
        return None
    return mine / default, CHIPS[record.target.partition(":")[2]].error


def _plausibility(record: Record, trial: Trial) -> tuple[float, ...]:
    """Spilled bytes of all kernels together (most are the same in every trial), time, work, then the blocks' size."""
    sizes = [value for name, value in trial.options.items() if name.endswith("block_size") and isinstance(value, int)]
    spilled = sum(kernel.spilled_bytes or 0 for kernel in trial.kernels)
    steps, loaded = (trial.work.steps, trial.work.loaded_bytes) if trial.work else (0, 0)
    return spilled, expected(record, trial) or 0.0, steps, loaded, -math.prod(sizes)


def winner(record: Record) -> tuple[Trial | None, Interval | None]:
    """The chosen options of a record that has facts, and their time relative to the defaults if they are faster.

    Measured: the fastest candidate whose interval lies below the defaults', else the defaults. Compiled: the most
    plausible of those that compile and fit, the first of equals; None where none does.
    """
    tried: tuple[Trial, ...] = record.facts.tried
    if record.mode == "compile" or not tried:
        compiled = (trial for trial in tried if trial.error is None)
        return min(compiled, key=functools.partial(_plausibility, record), default=None), None
    default, *others = tried
    contenders = [trial for trial in others if _is_timed(trial) and _is_timed(default)]
    for attempt in sorted(contenders, key=lambda trial: statistics.median(trial.samples).value):
        ratio = statistics.paired_ratio(attempt.samples, default.samples)
        if ratio is not None and ratio.high is not None and ratio.high < 1.0:
            return attempt, ratio
    return default, None


def _is_timed(trial: Trial) -> bool:
    """Whether all rounds were sampled, which means that the candidate passed the first look."""
    samples = trial.samples
    return trial.error is None and len(samples) == FIRST_ROUNDS + LAST_ROUNDS and min(samples) > 0


def entry(record: Record) -> dict[str, Any]:
    """The table's entry for a record that has facts."""
    best, ratio = winner(record)
    options = best.options if best else {}
    if record.mode == "compile":
        gain = None if best is None else expected_gain(record, best)
        method = "what compiles" if gain is None else "what compiles and by an expected time (tpu-times.md of the docs)"
        return {
            **_of(record),
            "method": f"compiled: ranked by {method}, since the device was not there; no time was measured",
            "options": options,
            **({} if gain is None else {"expected_time_over_default": [round(x, 3) for x in gain]}),
            "tried": [_compiled_trial(trial) for trial in record.facts.tried],
        }
    over = None if ratio is None else [round(x, 3) for x in (ratio.value, ratio.low, ratio.high) if x]
    tried = [
        {
            "options": trial.options,
            "median_seconds": round(statistics.median(trial.samples).value, 6) if trial.samples else None,
            "error": trial.error,
        }
        for trial in record.facts.tried
    ]
    return {**_of(record), "method": "measured", "options": options, "time_over_default": over, "tried": tried}


def _compiled_trial(trial: Trial) -> dict[str, Any]:
    told: dict[str, Any] = {"options": trial.options, "error": trial.error}
    if trial.work:
        told["work"] = dataclasses.asdict(trial.work)
    if (bundles := scheduled_bundles(trial.schedules)) is not None:
        told["bundles"] = bundles
    if trial.kernels:
        told["kernels"] = [{name: getattr(kernel, name) for name in _KERNEL_FIELDS} for kernel in trial.kernels]
    return told


def _of(record: Record) -> dict[str, Any]:
    """The keys by which a plan looks up an entry."""
    platform, _, kind = record.target.partition(":")
    case = TUNING.call(record.problem)
    return {
        "backend": record.requested,
        "platform": platform,
        "kind": kind,
        "dtype": case.dtype,
        "grouped": case.heads != case.kv_heads,
        "head_dim": max(case.head_dim, case.value_head_dim or 0),
        "gradient": case.needs_grad,
        "length": case.sequence,
        "case": record.case,
    }
