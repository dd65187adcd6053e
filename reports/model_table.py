"""The table of one model: the loss and the cost of each backend, one row each.

The figures of a row are from several cases of the same model: text, prefill and decoding. The loss of a backend with an
extension is from the extension's case, where its controls fail. If the dense model is no better than a unigram model,
no row shows a loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from attnsuite.suite import statistics
from attnsuite.suite.kinds import phase_of
from attnsuite.suite.model_suite import NAME, model_suites
from attnsuite.suite.reportable import STANDARD, is_trusted

from . import quality
from .cells import Cell, Group, cells_of
from .columns import FIGURES
from .formatting import Value
from .page import pages
from .table import MIB, MILLI, Column, Table, scaled, table


def model_table(groups: Sequence[Group]) -> Table | None:
    """The table; None for cells of another suite."""
    members = [g for g in groups if all(cell.record.suite in (NAME, *model_suites()) for cell in g.cells)]
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


def title(groups: Sequence[Group]) -> str:
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
    invalid = any(quality.validity(cell) == quality.INVALID for cell in cells_of(texts) if cell.record.quality)
    if name in pages() and (found := pages()[name].loss(groups)):
        texts, withheld = found
        if withheld is not None:
            return {"exact": False, "reading": quality.INVALID if invalid else withheld}
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
        row["reading"] = f"{quality.INVALID}: the dense model is no better than a unigram model"
    return row


def _cell(name: str, phase: str, groups: Sequence[Group]) -> Cell | None:
    """The cell in which the backend itself ran; a fallback does not count."""
    phases = [cell for cell in cells_of(groups) if phase_of(cell.record.kind) == phase]
    native = [cell for cell in phases if cell.record.mode == "native"]
    return next((cell for cell in native if cell.record.requested == name), None)
