"""What a model loses: perplexity, recall and similar figures, and paired differences from the standard backend.

The error of a raw figure is far larger than the difference that matters. Therefore every series that the standard cell
of the case also has is compared sequence by sequence. If the dense model of a case predicts no better than unigram
frequencies, the case can show no loss; its rows are marked INVALID.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from attnsuite.suite import statistics
from attnsuite.suite.shown import STANDARD, is_trusted
from attnsuite.suite.statistics import Interval

from . import cases
from .cells import Cell, Group
from .columns import FIGURES
from .table import Column, Table, table
from .words import Value

INVALID = "INVALID"
_PER_TABLE = 5
_PAIRED = "standard_"  # a series of this prefix holds the standard backend's values for the same sequences
_TIMES = frozenset({"ttft_seconds", "tpot_seconds"})  # of cells that did not take turns: no difference is shown
_COORDINATES = frozenset({"distance"})  # where a value was taken; not a figure
_RECOMPUTED = ("nll_difference", "sequences", "queries")  # the table of series shows them from the raw values
_LEADS = (Column("case", "case", merge=True), Column("backend", "backend"), Column("exact", "exact"))


def shows_quality(cell: Cell) -> bool:
    """Whether the cell's model figures are those of a run whose numbers are right."""
    return is_trusted(cell.record) and bool(cell.record.quality or cell.record.series)


def validity(group: Group, cell: Cell) -> str | None:
    """``valid`` if the dense model is better than unigram, ``INVALID`` if not, None if it is not known."""
    dense = group.standard if group.standard is not None else cell.record if cell.record.exact else None
    if dense is None:
        return None
    bits = dense.quality.get("bits_per_byte")
    unigram = dense.quality.get("unigram_bits_per_byte", cell.record.quality.get("unigram_bits_per_byte"))
    if bits is None or unigram is None:
        return None
    return "valid" if bits < unigram else INVALID


def figures(groups: Sequence[Group]) -> tuple[Table, ...]:
    """The recorded figures, one table for each kind of case, at most five figures wide."""
    made = []
    for kind, title in cases.titles(group.kind for group in groups):
        shown = [(g, cell) for g in groups if g.kind == kind for cell in g.cells if shows_quality(cell)]
        names = list(
            dict.fromkeys(name for _, cell in shown for name in cell.record.quality if not name.startswith(_RECOMPUTED))
        )
        for start in range(0, len(names), _PER_TABLE):
            part = names[start : start + _PER_TABLE]
            columns = [
                *_LEADS,
                *(Column(name, name.replace("_", " ")) for name in part),
                *([] if start else [FIGURES["kv_bytes_per_token"].column()]),
                Column("validity", "validity"),
            ]
            rows = [_figure_row(g, cell, part) for g, cell in shown]
            heading = title.capitalize() if start == 0 else f"{title.capitalize()}, continued"
            made.append(table(f"quality_{kind}_{start // _PER_TABLE + 1}", heading, columns, rows))
    return tuple(made)


def _figure_row(group: Group, cell: Cell, names: Sequence[str]) -> dict[str, Value]:
    quality = cell.record.quality
    row: dict[str, Value] = {name: quality.get(name) for name in names}
    leads = {"case": group.case, "backend": cell.label, "exact": cell.record.exact}
    return {**row, **leads, "kv_bytes_per_token": cell.record.kv_bytes_per_token, "validity": validity(group, cell)}


@dataclasses.dataclass(frozen=True, slots=True)
class Series:
    """The mean of one series of a cell, and its mean paired difference to standard if that can be paired."""

    name: str
    mean: Interval
    difference: Interval | None


def series_of(group: Group, cell: Cell) -> list[Series]:
    """The series of a cell, each paired with ``standard_<name>`` of the same cell, else with the standard cell's."""
    own = cell.record.series
    paired = {name.removeprefix(_PAIRED): values for name, values in own.items() if name.startswith(_PAIRED)}
    if not paired and group.standard is not None and cell.record is not group.standard:
        paired = group.standard.series
    found = []
    for name, values in own.items():
        mean = statistics.mean(values)
        if mean is not None and not name.startswith(_PAIRED) and name not in _COORDINATES:
            against = paired.get(name, ()) if cell.label != STANDARD and name not in _TIMES else ()
            found.append(Series(name.replace("_", " "), mean, statistics.paired_difference(values, against)))
    return found


def series(groups: Sequence[Group]) -> tuple[Table, ...]:
    """Means with intervals, and mean paired differences against standard, of every series behind a figure."""
    rows: list[dict[str, Value]] = []
    for group in groups:
        for cell in group.cells:
            if shows_quality(cell):
                invalid = validity(group, cell) == INVALID
                rows += [_series_row(group, cell, one, invalid=invalid) for one in series_of(group, cell)]
    if not rows:
        return ()
    columns = (
        *_LEADS,
        Column("series", "series"),
        Column("mean", "mean [95% interval]"),
        Column("difference", "mean difference to standard [95% interval]"),
        Column("count", "sequences or queries"),
        Column("reading", "reading"),
    )
    return (table("quality_series", "Means and paired differences", columns, rows),)


def _series_row(group: Group, cell: Cell, one: Series, *, invalid: bool) -> dict[str, Value]:
    words = {None: "too few pairs for an interval", False: "no measurable difference", True: "differs"}
    reading = words[one.difference.excludes(0.0)] if one.difference else None
    return {
        "case": group.case,
        "backend": cell.label,
        "exact": cell.record.exact,
        "series": one.name,
        "mean": one.mean,
        "difference": one.difference,
        "count": one.mean.count,
        "reading": INVALID if invalid else reading,
    }
