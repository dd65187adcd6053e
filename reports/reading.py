"""Computed sentences of a page, in which every claim has its number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from attnsuite.suite.reportable import baseline_of

from . import quality
from .answer import exact_speeds
from .cells import Cell, Group, cells_of
from .formatting import TIMES, code, escape, estimate, number, plural, shorten

_FEW = 3  # failed cases that are named
_FAILED = ("wrong", "oom", "timeout", "crashed")


def counts(cells: Sequence[Cell]) -> str:
    """The number of cells, in all and by status."""
    modes = Counter(cell.record.mode for cell in cells if cell.record.status == "ok")
    statuses = Counter(cell.record.status for cell in cells if cell.record.status != "ok")
    phrases = {"native": "ran natively", "fallback": "ran as a fallback", "interpret": "ran in an interpreter",
             "compile": "compiled for a device that is not here", None: "ok with no mode recorded"}  # fmt: skip
    parts = [f"{modes[mode]} {phrase}" for mode, phrase in phrases.items() if modes[mode]]
    parts += [f"{count} {status}" for status, count in sorted(statuses.items())]
    return f"{plural(len(cells), 'cell')}: {', '.join(parts)}."


def headline(groups: Sequence[Group]) -> list[str]:
    """One sentence per exact backend that is the fastest somewhere: in how many timed cases, and by how much."""
    winners = [ranked[0] for group in groups if (ranked := exact_speeds(group))]
    sentences, baseline = [], baseline_of(group.kind for group in groups)
    for label, wins in Counter(cell.label for cell in winners).most_common():
        ratios = [cell.speed.ratio for cell in winners if cell.label == label and cell.speed and cell.speed.ratio]
        apart = sorted(ratio.value for ratio in ratios if ratio.excludes(1.0))
        sentence = f"{code(label)} is the fastest exact backend in {wins} of {plural(len(winners), 'timed case')}"
        if apart:
            span = number(apart[0]) if len(apart) == 1 else f"{number(apart[0])} to {number(apart[-1])}"
            sentence += f"; in {len(apart)} of them measurably, at {span} {TIMES} {code(baseline)}'s time"
        sentences.append(f"{sentence}.")
    return sentences


def refused(groups: Sequence[Group], numbers: Mapping[str, str]) -> list[str]:
    """Every reason once, with the backends that were asked for, the cases that it applies to, and what ran instead."""
    cells = cells_of(groups)
    sentences = []
    for reason, name in numbers.items():
        touched = [cell for cell in cells if reason in cell.record.reasons]
        backends = list(dict.fromkeys(cell.record.requested for cell in touched))
        requested = ", ".join(code(backend) for backend in backends)
        text = reason.removeprefix(f"{backends[0]}: ") if len(backends) == 1 else reason
        sentences.append(f"**{name}** {requested} in {_cases(touched, groups)}: {escape(text)} *{_instead(touched)}*")
    return sentences


def ran_nowhere(groups: Sequence[Group]) -> list[str]:
    """A line for each reason for which a backend ran natively in no case, with the backends that have it alike.

    The line ends before the reason's advice; a page holds the whole of it elsewhere.
    """
    every = [cell.record for cell in cells_of(groups)]
    lines: dict[str, list[str]] = {}
    for name in dict.fromkeys(record.requested for record in every):
        requested = [record for record in every if record.requested == name]
        if any(record.resolved == name and record.mode in ("native", "compile") for record in requested):
            continue
        reasons = [
            {r.removeprefix(f"{name}: ") for r in record.reasons if r.startswith(f"{name}: ")} for record in requested
        ]
        if shared := sorted(set.intersection(*reasons)):
            text = " ".join(f"{reason.split('; ')[0].rstrip('.')}." for reason in shared)
            lines.setdefault(text, []).append(code(name))
    return [f"{', '.join(names)}: {escape(reason)}" for reason, names in lines.items()]


def _cases(cells: Sequence[Cell], groups: Sequence[Group]) -> str:
    touched = list(dict.fromkeys(cell.case for cell in cells))
    if len(touched) == len(groups):
        return "every case" if len(touched) > 1 else "the only case"
    return escape(touched[0]) if len(touched) == 1 else f"{len(touched)} of {len(groups)} cases"


def _instead(cells: Iterable[Cell]) -> str:
    outcomes: Counter[str] = Counter()
    for cell in cells:
        ran, mode = cell.record.resolved, cell.record.mode
        if ran is None:
            outcomes["nothing can run"] += 1
        elif mode is None:
            outcomes[f"{code(ran)} would run"] += 1
        else:
            outcomes[f"{code(ran)} ran, mode {mode}"] += 1
    text = ", ".join(f"{outcome} ({plural(count, 'cell')})" for outcome, count in sorted(outcomes.items()))
    return f"Outcome: {text}."


def failed(groups: Sequence[Group]) -> list[str]:
    """Wrong, out of memory, timed out and crashed cells: each status and error once, with its cells."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for status in _FAILED:
        for cell in cells_of(groups):
            if cell.record.status == status:
                text = shorten(cell.record.error or "no error was recorded")
                found.setdefault((status, cell.label, text), []).append(cell.case)
    lines = []
    for (status, label, text), named in found.items():
        places = "; in ".join(map(escape, named)) if len(named) <= _FEW else plural(len(named), "case")
        lines.append(f"**{status}**, {code(label)} in {places}: {escape(text)}")
    return lines


def model_quality(groups: Sequence[Group]) -> list[str]:
    """What approximate backends lose, from the paired differences; a case that can show no loss says so."""
    sentences = []
    for group in groups:
        selected = [cell for cell in group.cells if quality.shows_quality(cell)]
        if any(quality.validity(cell) == quality.INVALID for cell in selected):
            sentences.append(
                f"**{escape(group.case)}**: INVALID, the dense model is no better than unigram frequencies, "
                "so nothing can be lost here."
            )
            continue
        sentences += [sentence for cell in selected if cell.record.exact is False for sentence in _loss(cell)]
    return sentences


def _loss(cell: Cell) -> list[str]:
    sentences = []
    for one in quality.series_of(cell):
        if one.difference is None:
            continue
        text = f"mean {escape(one.name)} differs from standard by {estimate(one.difference)}"
        if one.difference.excludes(0.0) is False:
            text = f"no measurable difference to standard in mean {escape(one.name)} ({estimate(one.difference)})"
        sentences.append(
            f"**{escape(cell.case)}**: {code(cell.label)} (approximate): {text}, "
            f"{plural(one.difference.count, 'pair')}."
        )
    return sentences
