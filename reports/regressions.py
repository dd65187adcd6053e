"""What got worse from run A to run B, by limits that the caller gives, such as ``wrong,failed,slower:10%,memory:10%``.

Two runs share no rounds, and a machine drifts between them: a plain ratio of times measures the drift too. A cell's
time is here the first decile of its samples, since what disturbs a sample only makes it longer. A cell is slower by
more than P where all of these hold:

- Its time relative to its control, B over A, is above 1 + P. The control shared the cell's rounds in each run, so that
  drift cancels: ``standard`` for every other backend, and the other backends together for ``standard``.
- Its plain time, B over A, is above 1 + P/2. A cell is not slower because its control became faster. If the other
  cells (the median of those that are neither the cell nor its control) became faster, the machine did, and the plain
  time is divided by what they took.
- Both intervals lie above 1. Their level is 95% for all cells together: 1 - 0.05/cells for each (Bonferroni).

A cell without a control needs 1 + P of its plain time. What all cells share is the control's blind spot, so that the
whole run is one more entry. It is slower where three quarters of the cells are: the lower quartile of the plain ratios
is above 1 + P, and that of the intervals' lower ends above 1, also after division by what the machine's matmul rate
lost.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from attnsuite.sentences import quoted
from attnsuite.suite import statistics
from attnsuite.suite.errors import InputError
from attnsuite.suite.record import Record
from attnsuite.suite.reportable import (
    STANDARD,
    is_trusted,
    program_bytes,
    same_rounds,
    scheduled_bundles,
    shows_memory,
    shows_speed,
)

from .formatting import estimate, number, plural

Runs = Mapping[str, Record]  # by key
What = Literal["wrong", "failed", "slower", "memory", "bundles"]
WITH_SHARE = ("slower", "memory", "bundles")
_WORD = re.compile(r"(\w+)(?::(\d{1,4}(?:\.\d{1,3})?)%)?")
WHOLE = "all cells"


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What counts as a regression: the names, with the share that is allowed for those of :data:`WITH_SHARE`."""

    allowed: Mapping[What, float]

    def held(self, before: Runs, after: Runs) -> str:
        """How many cells are held to each limit; a cell without a figure in both runs is not."""
        return "; ".join(
            name
            + (f" by more than {100 * share:.3g}%" if name in WITH_SHARE else "")
            + f": {plural(len(_CELLS[name](before, after)), 'cell')}"
            for name, share in self.allowed.items()
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Regression:
    """A cell of run B that is worse than in run A, and how; the cell may be :data:`WHOLE`."""

    what: What
    cell: str
    sentence: str


def parse_limits(text: str) -> Limits:
    """The limits in ``wrong,failed,slower:10%,memory:10%``. Raises InputError for any other word.

    >>> parse_limits("wrong,slower:10%").allowed
    {'wrong': 0.0, 'slower': 0.1}
    """
    allowed: dict[What, float] = {}
    for word in text.split(","):
        match = _WORD.fullmatch(word.strip())
        name = next((name for name in get_args(What) if match and match[1] == name), None)
        if match is None or name is None or (match[2] is not None) != (name in WITH_SHARE) or name in allowed:
            raise InputError(
                f"--fail-on {quoted(word.strip())} is not accepted; give each of wrong, failed, slower:P%, memory:P%, "
                "bundles:P% once at most, separated by commas."
            )
        allowed[name] = float(match[2] or 0) / 100
    return Limits(allowed)


def regressions(before: Runs, after: Runs, limits: Limits) -> tuple[Regression, ...]:
    """What is worse in ``after``, records by key. Raises InputError where a limit has nothing to be held to."""
    if not _shared(before, after):
        raise InputError(
            "--fail-on: the two runs share no cell (a cell is a case, a backend, a device and a mode); "
            "compare runs of the same suite on the same device."
        )
    requested = [what for what in get_args(What) if what in limits.allowed]
    return tuple(
        each
        for what in requested
        for each in _FOUND[what](before, after, _CELLS[what](before, after), limits.allowed[what])
    )


def _shared(before: Runs, after: Runs) -> list[str]:
    return [key for key in before if key in after]


def timed(before: Runs, after: Runs) -> list[str]:
    """The keys of the cells that have a speed in both runs."""
    return [key for key in before if key in after and shows_speed(before[key]) and shows_speed(after[key])]


def control_of(key: str, before: Runs, after: Runs, both: Sequence[str]) -> Sequence[str]:
    """The controls of a cell, among ``both`` of its case and rounds: ``standard`` if it is there, else all of them."""
    others = [
        other
        for other in both
        if other != key
        and (before[other].case, before[other].target) == (before[key].case, before[key].target)
        and all(same_rounds(run[other], run[key]) for run in (before, after))
    ]
    standard = [other for other in others if before[other].requested == before[other].resolved == STANDARD]
    return standard[:1] or others


def against_control(
    key: str, before: Runs, after: Runs, control: Sequence[str]
) -> tuple[list[float], list[float]] | None:
    """The samples of a cell in A and in B, each divided by its control's of the same round; None without a control."""
    if not control:
        return None
    first, second = (_quotients(run[key], [run[other] for other in control]) for run in (before, after))
    return first, second


def _quotients(record: Record, control: Sequence[Record]) -> list[float]:
    """Each sample over the control's of the same round."""
    means = _together(control)
    rounds = min(len(record.samples), len(means))
    return list(np.divide(record.samples[:rounds], means[:rounds]))


def _together(records: Sequence[Record]) -> list[float]:
    """The geometric mean of these cells' samples of each round that all of them have."""
    rounds = min(len(each.samples) for each in records)
    return list(np.exp(np.mean([np.log(each.samples[:rounds]) for each in records], axis=0)))


def _with_interval(before: Runs, after: Runs) -> list[str]:
    """The timed cells with enough samples for an interval in both runs."""
    samples = {key: min(len(before[key].samples), len(after[key].samples)) for key in timed(before, after)}
    return [key for key, count in samples.items() if count >= statistics.FEWEST]


def _slower(before: Runs, after: Runs, judged: Sequence[str], share: float) -> list[Regression]:
    both = timed(before, after)
    if not both:
        raise InputError("--fail-on slower: no cell has a speed in both runs; leave it out, or run both on the device.")
    if not judged:
        raise InputError(
            f"--fail-on slower: {plural(len(both), 'cell')} with fewer than {statistics.FEWEST} samples in "
            "a run, which give no interval; leave it out, or measure again."
        )
    level = 1 - 0.05 / len(judged)
    plain = {key: statistics.quick_ratio(after[key].samples, before[key].samples) for key in judged}
    found = []
    for key in judged:
        first, second = before[key].samples, after[key].samples
        control = control_of(key, before, after, both)
        needed = [("its time", (second, first), share)]
        if control:
            rest = [ratio for other, ratio in plain.items() if other != key and other not in control]
            pace = min(1.0, float(np.median(rest))) if rest else 1.0
            sides = [_together([run[other] for other in control]) for run in (after, before)]
            allowed = [pace * sample for sample in first]
            needed = [
                ("its time relative to its control", (second, first, *sides), share),
                ("its time", (second, allowed), share / 2),
            ]
        if sentence := _describe_slowdown(needed, level):
            found.append(Regression("slower", key, f"{sentence} (allowed: {number(1 + share)})"))
    return [*_whole(before, after, plain, share), *found]


def _describe_slowdown(needed: Sequence[tuple[str, tuple[Sequence[float], ...], float]], level: float) -> str:
    """How much slower a cell is, if each ratio (a name, its samples, a share) says so; else empty."""
    sentence = []
    for name, samples, least in needed:
        if statistics.quick_ratio(*samples) <= 1 + least:  # most cells end here, without an interval
            return ""
        ratio = statistics.quick_interval(*samples, level=level)
        if ratio.low is None or ratio.low <= 1:
            return ""
        sentence.append(f"{name} {estimate(ratio)} of that in A")
    return ", ".join(sentence)


def _whole(before: Runs, after: Runs, plain: Mapping[str, float], share: float) -> list[Regression]:
    """The run as a whole, if it is slower and the machine is not: where every cell moves, no control shows it."""
    if len(plain) < 2:
        return []
    rates = [_matmul(run, plain) for run in (before, after)]
    lost = rates[0] / rates[1] if rates[0] and rates[1] else 1.0
    quartile = float(np.quantile(list(plain.values()), 0.25))
    if min(quartile, quartile / lost) <= 1 + share:
        return []
    lows = [statistics.quick_interval(after[key].samples, before[key].samples).low or 0.0 for key in plain]
    if float(np.quantile(lows, 0.25)) <= 1:
        return []
    sentence = f"three quarters of {plural(len(plain), 'cell')} take at least {number(quartile)} of their time in A"
    machine = f"; the machine's matrix product takes {number(lost)} of its time in A" if all(rates) else ""
    return [Regression("slower", WHOLE, f"{sentence} (allowed: {number(1 + share)}){machine}")]


def _matmul(run: Mapping[str, Record], keys: Iterable[str]) -> float | None:
    """The float32 matmul rate that a run measured on its machine; None where it is not known."""
    rates = (run[key].environment.get("machine", {}).get("matmul_flops", {}).get("float32") for key in keys)
    return next((rate for rate in rates if rate), None)


def _larger(before: Runs, after: Runs, sizes: Mapping[str, tuple[int, int]], share: float) -> list[Regression]:
    """The cells whose programs take more memory: arguments, outputs and temporaries together."""
    if not sizes:
        raise InputError("--fail-on memory: no cell has its program's sizes in both runs; leave it out.")
    sentence = "its program takes {} MiB, {} of that in A (allowed: {})"
    return [
        Regression("memory", key, sentence.format(number(b / 2**20), number(b / a), number(1 + share)))
        for key, (a, b) in sizes.items()
        if b > (1 + share) * a
    ]


def _sizes(before: Runs, after: Runs) -> dict[str, tuple[int, int]]:
    return _known(before, after, lambda record: program_bytes(record) if shows_memory(record) else None)


def _longer(before: Runs, after: Runs, counts: Mapping[str, tuple[int, int]], share: float) -> list[Regression]:
    """The cells for whose Pallas kernels a TPU's compiler scheduled more bundles, times the steps of their grids."""
    if not counts:
        raise InputError("--fail-on bundles: no cell has schedules in both runs; compile both with --schedule.")
    sentence = "its kernels have {} bundles x grid steps, {} of those in A (allowed: {})"
    return [
        Regression("bundles", key, sentence.format(b, number(b / a), number(1 + share)))
        for key, (a, b) in counts.items()
        if b > (1 + share) * a
    ]


def _bundles(before: Runs, after: Runs) -> dict[str, tuple[int, int]]:
    return _known(before, after, lambda record: scheduled_bundles(record.schedules))


def _known(before: Runs, after: Runs, count: Callable[[Record], int | None]) -> dict[str, tuple[int, int]]:
    """The cells that have a count in both runs."""
    counts = {key: (count(before[key]), count(after[key])) for key in _shared(before, after)}
    return {key: (a, b) for key, (a, b) in counts.items() if a and b is not None}


def _wrong(before: Runs, after: Runs, shared: Sequence[str], _: float) -> list[Regression]:
    sentence = "a tensor is outside of what is allowed"
    new = [key for key in shared if _is_wrong(after[key]) and not _is_wrong(before[key])]
    return [Regression("wrong", key, after[key].error or sentence) for key in new]


def _ran(before: Runs, _: Runs) -> list[str]:
    return [key for key, record in before.items() if record.status == "ok"]


def _failed(before: Runs, after: Runs, ran: Sequence[str], _: float) -> list[Regression]:
    failures = {key: _failure(after.get(key)) for key in ran}
    return [Regression("failed", key, sentence) for key, sentence in failures.items() if sentence]


def _is_wrong(record: Record) -> bool:
    return record.status == "wrong" or (record.status == "ok" and not is_trusted(record))


def _failure(record: Record | None) -> str:
    """Why a cell has no result in B; empty if it has one, be it a wrong one."""
    if record is None:
        return "it ran in A; run B has no such cell"
    if record.status in ("ok", "wrong"):
        return ""
    return f"it ran in A; {record.status}: {record.error or ' '.join(record.reasons)}"


_CELLS: Mapping[What, Callable[[Runs, Runs], Any]] = {  # that are held to a limit
    "wrong": _shared,
    "failed": _ran,
    "slower": _with_interval,
    "memory": _sizes,
    "bundles": _bundles,
}
_FOUND: Mapping[What, Callable[[Runs, Runs, Any, float], list[Regression]]] = {
    "wrong": _wrong,
    "failed": _failed,
    "slower": _slower,
    "memory": _larger,
    "bundles": _longer,
}
