"""What a model loses: perplexity, recall and similar figures, and paired differences from the standard backend.

The error of a raw figure is far larger than the difference that matters. Therefore every series that the standard cell
of the case also has is compared sequence by sequence. If the dense model of a case predicts no better than unigram
frequencies, the case can show no loss; its rows are marked INVALID.

The table of one model has a row per backend, with its loss and its cost, from several cases: text, prefill and
decoding. The loss of a backend with an extension is from the extension's case, where its controls fail.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import PurePath

from attnsuite.suite import statistics
from attnsuite.suite.kinds import phase_of
from attnsuite.suite.reportable import STANDARD, is_trusted
from attnsuite.suite.statistics import Interval
from attnsuite.suite.suites import CHECKPOINT, model_suites

from .cells import Cell, Group, by_kind, cells_of
from .columns import BACKEND, CASE, EXACT, FIGURES
from .formatting import Value
from .page import pages
from .table import MIB, MILLI, Column, Table, scaled, table

INVALID = "INVALID"
_PER_TABLE = 5
_PAIRED = "standard_"  # a series of this prefix holds the standard backend's values for the same sequences
_TIMES = frozenset({"ttft_seconds", "tpot_seconds"})  # of cells that did not take turns: no difference is shown
_COORDINATES = frozenset({"distance"})  # where a value was taken; not a figure
_RECOMPUTED = ("nll_difference", "sequences", "queries")  # the table of series shows them from the raw values
_LEADS = (CASE, BACKEND, EXACT)


def shows_quality(cell: Cell) -> bool:
    """Whether the cell's model figures are those of a run whose numbers are right."""
    return is_trusted(cell.record) and bool(cell.record.quality or cell.record.series)


def validity(cell: Cell) -> str | None:
    """``valid`` if the dense model is better than unigram, ``INVALID`` if not, None if it is not known."""
    dense = cell.standard if cell.standard is not None else cell.record if cell.record.exact else None
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
    for kind, heading, cells in by_kind(groups):
        selected = [cell for cell in cells if shows_quality(cell)]
        names = list(
            dict.fromkeys(name for cell in selected for name in cell.record.quality if not name.startswith(_RECOMPUTED))
        )
        recorded = [
            Column(name, name.replace("_", " "), lambda cell, name=name: cell.record.quality.get(name))
            for name in names
        ]
        for start in range(0, len(names), _PER_TABLE):
            cache = [] if start else [FIGURES["kv_bytes_per_token"].column()]
            columns = (*_LEADS, *recorded[start : start + _PER_TABLE], *cache, Column("validity", "validity", validity))
            title = heading if start == 0 else f"{heading}, continued"
            made.append(table(f"quality_{kind}_{start // _PER_TABLE + 1}", title, columns, selected))
    return tuple(made)


@dataclasses.dataclass(frozen=True, slots=True)
class Series:
    """The mean of one series of a cell, and its mean paired difference to standard if that can be paired."""

    name: str
    mean: Interval
    difference: Interval | None


def series_of(cell: Cell) -> list[Series]:
    """The series of a cell, each paired with ``standard_<name>`` of the same cell, else with the standard cell's."""
    recorded = cell.record.series
    paired = {name.removeprefix(_PAIRED): values for name, values in recorded.items() if name.startswith(_PAIRED)}
    if not paired and cell.standard is not None and not cell.is_baseline:
        paired = cell.standard.series
    found = []
    for name, values in recorded.items():
        mean = statistics.mean(values)
        if mean is not None and not name.startswith(_PAIRED) and name not in _COORDINATES:
            against = paired.get(name, ()) if cell.label != STANDARD and name not in _TIMES else ()
            found.append(Series(name.replace("_", " "), mean, statistics.paired_difference(values, against)))
    return found


def series(groups: Sequence[Group]) -> tuple[Table, ...]:
    """Means with intervals, and mean paired differences against standard, of every series behind a figure."""
    columns = (
        *(lead.of_first() for lead in _LEADS),
        Column("series", "series", lambda at: at[1].name),
        Column("mean", "mean [95% interval]", lambda at: at[1].mean),
        Column("difference", "mean difference to standard [95% interval]", lambda at: at[1].difference),
        Column("count", "sequences or queries", lambda at: at[1].mean.count),
        Column("reading", "reading", lambda at: _reading(*at)),
    )
    found = [(cell, one) for cell in cells_of(groups) if shows_quality(cell) for one in series_of(cell)]
    return (table("quality_series", "Means and paired differences", columns, found),) if found else ()


def _reading(cell: Cell, one: Series) -> str | None:
    labels = {None: "too few pairs for an interval", False: "no measurable difference", True: "differs"}
    if validity(cell) == INVALID:
        return INVALID
    return labels[one.difference.excludes(0.0)] if one.difference else None


def model_table(groups: Sequence[Group]) -> Table | None:
    """The table; None for cells of another suite."""
    members = [g for g in groups if all(cell.record.suite in (CHECKPOINT, *model_suites()) for cell in g.cells)]
    names = dict.fromkeys(
        cell.record.requested
        for cell in cells_of(members)
        if phase_of(cell.record.kind) in ("text", "prefill", "decode")
        and (cell.record.status != "unsupported" or cell.record.requested in pages())
    )
    rows = [row for name in sorted(names, key=lambda name: name != STANDARD) if (row := _row(name, members))]
    columns = (
        Column("backend", "backend"),
        Column("exact", "exact"),
        Column("perplexity", "perplexity per token"),
        Column("lost", "nats per token lost [95% paired interval]"),
        Column("kl", "KL to standard, mean (nats)"),
        Column("top1", "same likeliest token (%)"),
        Column("ttft", "TTFT (ms)"),
        Column("prefill", "prefill tokens/s"),
        Column("tpot", "TPOT (ms)"),
        Column("decode", "decode tokens/s"),
        Column("memory", "prefill, temporary (MiB)"),
        Column("kv_bytes_per_token", FIGURES["kv_bytes_per_token"].header),
        Column("reading", "reading"),
    )
    return table("checkpoint", "", columns, rows) if rows else None


def model_name(groups: Sequence[Group]) -> str:
    """The model's name."""
    return PurePath(str(groups[0].problem.get("model"))).name


def _row(name: str, groups: Sequence[Group]) -> dict[str, Value]:
    prefill, decode = _cell(name, "prefill", groups), _cell(name, "decode", groups)
    row: dict[str, Value] = {"backend": name}
    if prefill is not None and prefill.speed and prefill.speed.step:
        row |= {"ttft": prefill.speed.step.value * MILLI, "prefill": prefill.speed.tokens_rate}
        row["memory"] = scaled(prefill.record.memory.get("compiled_temp"), 1 / MIB)
    if decode is not None and decode.speed and decode.speed.step:
        row |= {"tpot": decode.speed.step.value * MILLI, "decode": decode.speed.tokens_rate}
        row["kv_bytes_per_token"] = decode.record.figures.get("kv_bytes_per_token")
    row |= _loss(name, groups)
    ran = [cell for cell in (prefill, decode) if cell is not None]
    return row if len(row) > 1 or ran else {}


def _loss(name: str, groups: Sequence[Group]) -> dict[str, Value]:
    """Figures on text: from the case of the backend's extension, else from its case of text."""
    texts: Sequence[Group] = [member for member in groups if phase_of(member.kind) == "text"]
    invalid = any(validity(cell) == INVALID for cell in cells_of(texts) if cell.record.quality)
    if name in pages() and (found := pages()[name].loss(groups)):
        texts, withheld = found
        if withheld is not None:
            return {"exact": False, "reading": INVALID if invalid else withheld}
    for cell in cells_of(texts):
        if cell.record.requested == name and is_trusted(cell.record) and cell.record.quality:
            return _figures(cell, invalid=invalid)
    return {}


def _figures(cell: Cell, *, invalid: bool) -> dict[str, Value]:
    figures, series = cell.record.quality, cell.record.series
    lost = statistics.paired_difference(series.get("nll", ()), series.get("standard_nll", ()))
    row: dict[str, Value] = {
        "exact": cell.record.exact,
        "perplexity": figures.get("perplexity"),
        "lost": "0 (baseline)" if cell.label == STANDARD else lost,
        "kl": figures.get("kl_mean"),
        "top1": scaled(figures.get("top1_agreement"), 100),
    }
    if invalid:
        row["reading"] = f"{INVALID}: the dense model is no better than a unigram model"
    return row


def _cell(name: str, phase: str, groups: Sequence[Group]) -> Cell | None:
    """The cell in which the backend itself ran; a fallback does not count."""
    phases = [cell for cell in cells_of(groups) if phase_of(cell.record.kind) == phase]
    native = [cell for cell in phases if cell.record.mode == "native"]
    return next((cell for cell in native if cell.record.requested == name), None)
