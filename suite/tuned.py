"""What wins among the options that ``attnsuite tune`` tried, as a choice of a policy (``backends/choices.py``).

Measured candidates win by their time. For a device that is not here, those that compile and fit come first. Among them
come first those with the fewest spilled bytes, then the least expected time (``compile/expected.py``; of few kernels
and devices), then the fewest steps of the kernels' grids, then the fewest bytes loaded, then the largest blocks; the
defaults win a tie. A ranking is no measurement: its choice has the mode ``compile``, and no ratio.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from attnsuite.backends.choices import Choice, problem_of

from . import statistics
from .compile.expected import CHIPS, expected_seconds
from .kinds.attention_call import spec_of
from .kinds.tuning_case import TUNING, Trial
from .record import Record
from .statistics import Interval

EXPECTED = ("splash", "tokamax_splash")  # backends whose kernels the expected times are of
FIRST_ROUNDS, LAST_ROUNDS = 3, 9  # samples of every candidate, and of the best few after a first look


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
    if record.mode == "compile":
        compiled = (trial for trial in tried if trial.error is None)
        return min(compiled, key=functools.partial(_plausibility, record), default=None), None
    default, *others = tried
    contenders = [trial for trial in others if _is_timed(trial) and _is_timed(default)]
    for attempt in sorted(contenders, key=lambda trial: statistics.median(trial.samples).value):
        ratio = statistics.paired_ratio(attempt.samples, default.samples)
        if ratio is not None and ratio.high is not None and ratio.high < 1.0:
            return attempt, ratio
    return default, None


def figures(ratio: Interval | None) -> dict[str, Any]:
    """A ratio as the fields of a choice."""
    if ratio is None:
        return {}
    interval = None if ratio.low is None or ratio.high is None else (ratio.low, ratio.high)
    return {"ratio": ratio.value, "interval": interval}


def _is_timed(trial: Trial) -> bool:
    """Whether all rounds were sampled, which means that the candidate passed the first look."""
    samples = trial.samples
    return trial.error is None and len(samples) == FIRST_ROUNDS + LAST_ROUNDS and min(samples) > 0


def choice(record: Record) -> Choice:
    """The choice of a record that has facts. What else was tried is in the record."""
    best, ratio = winner(record)
    details: dict[str, Any] = {"mode": record.mode, "tried": len(record.facts.tried)}
    if best is not None and (gain := expected_gain(record, best)) is not None:
        details["expected_time_over_default"] = [round(x, 3) for x in gain]
    options: dict[str, Any] = dict(best.options) if best else {}
    problem = problem_of(spec_of(TUNING.call(record.problem)))
    return Choice(
        case=record.case, problem=problem, backend=record.requested, options=options, details=details, **figures(ratio)
    )
