"""Kascade's page: the gate, the loss at each kept fraction, and the cost. No figure is shown without its controls.

A row of an approximate method means something only if the test can fail. In the gate every control must be there and
fail visibly; in the tables of quality, random tiles must. Otherwise the row is withheld, and the table says why.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

from attnsuite.backends.kascade import GREEDY_RULES
from attnsuite.suite import statistics
from attnsuite.suite.errors import InputError
from attnsuite.suite.kinds import make_case, problem_of
from attnsuite.suite.kinds.kascade.methods import CONTROLS, METHODS
from attnsuite.suite.record import Record
from attnsuite.suite.reportable import is_trusted, same_rounds
from attnsuite.suite.statistics import Interval

from ..cells import Cell, Group
from ..columns import BASELINE
from ..formatting import TIMES, Value, code, estimate, number, plural
from ..plot import Panel, Picture
from ..table import MILLI, Column, Table, scaled, table

GATE, TEXT, RETRIEVAL = "kascade_gate", "kascade_text", "kascade_retrieval"
STACKS = ("kascade_prefill", "kascade_decode")
KINDS = frozenset({GATE, TEXT, RETRIEVAL, *STACKS})
WITHHELD = "WITHHELD"
TEXT_CONTROLS = ("sinks_window", "random_tiles", "wrong_anchors", "other_model")
BLIND = ("random_tiles",)  # the row that has to fail in a table of quality
_FEWEST = 3  # kept fractions that make a line


def is_kascade(group: Group) -> bool:
    """Whether all cells of a group are rows of Kascade's suite that this version knows."""
    return group.kind in KINDS and all(_is_row(cell.record) and cell.record.kind == group.kind for cell in group.cells)


def _is_row(record: Record) -> bool:
    """Whether this version could have written the record: a measured one then has the figures that this page reads."""
    try:
        case = make_case(record.problem)
    except InputError:
        return False
    if case.kind != record.kind or record.requested not in METHODS:
        return False
    return record.status != "ok" or (record.quality.get("kept_pairs", 0.0) > 0 and _has_series(record))


def _has_series(record: Record) -> bool:
    """Nats of both models per sequence of text; a hit or a miss, and its distance, per needle."""
    if record.kind in STACKS:
        return True
    pair = ("nll", "standard_nll") if record.kind == TEXT else ("hit", "distance")
    first, second = (record.series.get(name, ()) for name in pair)
    return len(first) == len(second) > 0 and (record.kind == TEXT or set(first) <= {0.0, 1.0})


def recall_of(record: Record, near: float = 0.0, far: float = float("inf")) -> Interval | None:
    """Recall with its 95% Wilson interval, over the queries from ``near`` up to, not including, ``far`` tokens back."""
    hits, distances = record.series.get("hit", ()), record.series.get("distance", ())
    found = [hit for hit, distance in zip(hits, distances, strict=True) if near <= distance < far]
    return statistics.wilson(int(sum(found)), len(found)) if found else None


def withheld(group: Group, controls: Sequence[str]) -> str | None:
    """Why a case shows no approximate rows; None if every control is there and fails visibly."""
    records = {cell.record.requested: cell.record for cell in group.cells if is_trusted(cell.record)}
    dense = records.get("dense")
    if dense is None:
        return "there is no dense row"
    missing = [name for name in controls if name not in records]
    if missing:
        return f"no {', '.join(missing)}"
    blind = [name for name in controls if not _fails(records[name], dense)]
    if blind:
        return f"{', '.join(blind)} {'does' if len(blind) == 1 else 'do'} not fail visibly"
    if group.kind != TEXT and (found := recall_of(dense)) is not None and found.value < 1.0:
        return "dense attention does not retrieve everything"
    return None


def _fails(control: Record, dense: Record) -> bool:
    """Whether a control is worse than dense beyond its interval."""
    if "hit" in control.series:
        expected, found = recall_of(dense), recall_of(control)
        return bool(
            expected and found and found.high is not None and expected.low is not None and found.high < expected.low
        )
    lost = statistics.paired_difference(control.series.get("nll", ()), control.series.get("standard_nll", ()))
    return bool(lost and lost.low is not None and lost.low > 0)


def gate(groups: Sequence[Group]) -> tuple[Table, ...]:
    """One table per phase: dense, Kascade, and every control. If a control passes, Kascade's row is withheld."""
    made = []
    for group in groups:
        if group.kind != GATE:
            continue
        why = withheld(group, CONTROLS)
        rows = [_gate_row(cell, why) for cell in _ordered(group)]
        columns = (
            Column("method", "row"),
            Column("told", "what it attends to"),
            Column("recall", "recall [95% Wilson interval]"),
            Column("kept", "pairs kept (%)"),
            Column("mass_mean", "attention kept, mean"),
            Column("mass_min", "least, per head and tile"),
            Column("reading", "reading"),
        )
        made.append(
            table(f"kascade_gate_{_phase(group)}", f"{_phase(group).capitalize()}, {_described(group)}", columns, rows)
        )
    return tuple(made)


def _gate_row(cell: Cell, why: str | None) -> dict[str, Value]:
    record, method = cell.record, METHODS[cell.record.requested]
    lead: dict[str, Value] = {"method": method.name, "told": method.about}
    if not is_trusted(record):
        return {**lead, "reading": record.error or record.status}
    if why is not None and not method.exact and not method.control:
        return {**lead, "reading": f"{WITHHELD}: {why}"}
    found = recall_of(record)
    if method.control:
        dense_recall = record.quality.get("dense_recall")
        word = "control: " + ("fails" if found and found.value < (dense_recall or 0.0) else "PASSES")
    else:
        word = "all found" if found and found.value == 1.0 else "loses"
    return {**lead, "recall": found, **_retained(record), "reading": word}


def _retained(record: Record) -> dict[str, Value]:
    figures = record.quality
    return {
        "kept": scaled(figures.get("kept_pairs"), 100),
        "mass_mean": figures.get("mass_mean"),
        "mass_min": figures.get("mass_min"),
    }


def quality(groups: Sequence[Group]) -> tuple[Table, ...]:
    """The loss at each kept fraction: a table each for text and retrieval, prefill and decoding."""
    made = []
    for kind in (TEXT, RETRIEVAL):
        for phase in ("prefill", "decode"):
            members = sorted((g for g in groups if g.kind == kind and _phase(g) == phase), key=_selection_order)
            if not members:
                continue
            rows = [_quality_row(group, cell, why) for group in members for why in (withheld(group, BLIND),)
                    for cell in _ordered(group) if cell.record.status != "unsupported"]  # fmt: skip
            lead = (
                Column("top_k", "share asked for (%)", merge=True),
                *([Column("schedule", "schedule", merge=True)] if is_sweep(members) else ()),
                Column("method", "row"),
            )
            lost = (
                Column("kept", "pairs kept (%)"),
                Column("perplexity", "perplexity"),
                Column("lost", "nats per byte lost [95% paired interval]"),
                Column("recall", "recall [95% Wilson interval]"),
                *(Column(f"recall_{i}", f"recall, {name}") for i, (name, _, _) in enumerate(_bins(members[0]))),
                Column("reading", "reading"),
            )
            near = (
                Column("flops", "FLOPs of the whole model's attention, selection included (%)"),
                Column("kl_mean", "KL to dense, mean (nats)"),
                Column("kl_p99", "KL, 99th percentile"),
                Column("top1", "same likeliest token (%)"),
                Column("mass_mean", "attention kept, mean"),
                Column("mass_min", "least, per head and tile"),
            )
            key = f"{kind}_{phase}"
            title = f"{'Text' if kind == TEXT else 'Retrieval'}, {phase}, {_described(members[0])}"
            made.append(table(key, title, (*lead, *lost), rows))
            made += _further(f"{key}_near", f"{title}: cost, and how near to dense", lead, near, rows)
    return tuple(made)


def _quality_row(group: Group, cell: Cell, why: str | None) -> dict[str, Value]:
    record, method = cell.record, METHODS[cell.record.requested]
    share = number(100 * _problem(group)["top_k"])
    lead: dict[str, Value] = {"top_k": share, "schedule": _schedule_name(group), "method": method.name}
    if not is_trusted(record):
        return {**lead, "reading": record.error or record.status}
    if why is not None and not method.exact and method.name not in BLIND:
        return {**lead, "reading": f"{WITHHELD}: {why}"}
    figures = record.quality
    row: dict[str, Value] = {**lead, **_retained(record), "flops": scaled(figures.get("flops"), 100)}
    row |= {name: figures.get(name) for name in ("perplexity", "kl_mean", "kl_p99")}
    row["top1"] = scaled(figures.get("top1_agreement"), 100)
    if group.kind == TEXT and not method.exact:
        row["lost"] = statistics.paired_difference(record.series["nll"], record.series["standard_nll"])
    if group.kind != TEXT:
        row["recall"] = recall_of(record)
        row |= {f"recall_{i}": recall_of(record, near, far) for i, (_, near, far) in enumerate(_bins(group))}
    return row


def _bins(group: Group) -> list[tuple[str, float, float]]:
    """Distances of needle and query: up to a quarter, a half, all of the sequence."""
    length = int(_problem(group)["sequence"])
    if group.kind == TEXT:
        return []
    edges = [0, length // 4, length // 2, length]
    return [(f"{low} to {high - 1} back", low, high) for low, high in itertools.pairwise(edges)]


def is_sweep(groups: Sequence[Group]) -> bool:
    """Whether the cases of quality differ in their schedule's rule, threshold or distance."""
    return len({_schedule_name(group) for group in groups if group.kind in (TEXT, RETRIEVAL)}) > 1


def _schedule_name(group: Group) -> str:
    p = _problem(group)
    if p["schedule"] not in GREEDY_RULES:
        return str(p["schedule"])
    return f"{p['schedule']}, threshold {p['threshold']:g}, distance {p['max_reuse_dist']}"


def _selection_order(group: Group) -> tuple[Any, ...]:
    p = _problem(group)
    return p["top_k"], p["schedule"], p["threshold"], p["max_reuse_dist"]


def picture(groups: Sequence[Group]) -> Picture | None:
    """Quality against kept fraction: KL of text and recall of needles, by phase; None without three fractions.

    In a sweep every schedule has its own line of Kascade.
    """
    panels, swept = [], is_sweep(groups)
    for kind, label in ((TEXT, "KL to dense (nats per byte)"), (RETRIEVAL, "recall")):
        for phase in ("prefill", "decode"):
            lines: dict[str, list[tuple[float, float]]] = {}
            for group in groups:
                if group.kind != kind or _phase(group) != phase or withheld(group, BLIND) is not None:
                    continue
                for cell in _ordered(group):
                    figures = cell.record.quality
                    value = figures.get("kl_mean" if kind == TEXT else "recall")
                    if is_trusted(cell.record) and cell.record.exact is False and value is not None:
                        at = 100 * figures["kept_pairs"]
                        name = cell.record.requested
                        name = f"{name}, {_schedule_name(group)}" if swept and name == "kascade" else name
                        lines.setdefault(name, []).append((at, value))
            curves = tuple((name, tuple(sorted(points))) for name, points in lines.items() if len(points) >= _FEWEST)
            if curves:
                title = f"{'text' if kind == TEXT else 'retrieval'}, {phase}"
                panels.append(
                    Panel(title, curves, None, x_label="pairs kept, % of causal", y_label=label, log_y=kind == TEXT)
                )
    return Picture("kascade-quality.svg", "Quality against kept fraction", tuple(panels)) if panels else None


def speed(groups: Sequence[Group]) -> tuple[Table, ...]:
    """Whole stacks, and one layer of each kind, relative to the fastest dense row of the same rounds."""
    made = []
    for kind in STACKS:
        members = sorted((g for g in groups if g.kind == kind), key=_stack_order)
        rows = [
            _speed_row(group, cell)
            for group in members
            for cell in _ordered(group)
            if cell.record.status != "unsupported"
        ]
        lead = (Column("case", "stack", merge=True), Column("method", "row"), Column("devices", "devices"))
        times = (
            Column("median_ms", "median (ms) [95% interval]"),
            Column("relative", "time relative to the fastest dense [95% interval]"),
            Column("faster", "times as fast"),
            Column("samples", "samples"),
            Column("ran", "ran"),
        )
        shares = (
            Column("kept", "pairs kept (%)"),
            Column("flops", "FLOPs, selection included (%)"),
            Column("per_share", "time relative to its share of pairs"),
            Column("error", "all selected: error / allowed"),
        )
        if rows:
            title = "Prefill" if kind == "kascade_prefill" else "Decoding one token"
            made.append(table(f"{kind}_speed", title, (*lead, *times), rows))
            made += _further(f"{kind}_shares", f"{title}: what is computed", lead, shares, rows)
    return tuple(made)


def _further(
    key: str, title: str, lead: Sequence[Column], columns: Sequence[Column], rows: Sequence[dict[str, Value]]
) -> list[Table]:
    """A second table of the rows that have a value in any of these columns."""
    filled = [row for row in rows if any(row.get(column.key) is not None for column in columns)]
    return [table(key, title, (*lead, *columns), filled)] if filled else []


def _speed_row(group: Group, cell: Cell) -> dict[str, Value]:
    record = cell.record
    lead: dict[str, Value] = {"case": _stack_name(group), "method": record.requested, "devices": record.devices}
    if is_trusted(record) and record.mode == "interpret":
        return {**lead, "error": record.accuracy.get("out"), "ran": "interpreted: accuracy only"}
    if cell.speed is None:
        return {**lead, "ran": record.error or record.status}
    median = cell.speed.median
    ratio = relative(group, cell)
    share = record.quality.get("kept_pairs")
    return {
        **lead,
        "median_ms": scaled(median, MILLI),
        "relative": ratio if cell is not fastest_dense(group) else BASELINE,
        "faster": 1 / ratio.value if ratio and not record.exact else None,
        "kept": scaled(share, 100),
        "flops": scaled(record.quality.get("flops"), 100),
        "per_share": ratio.value / share if ratio and share and record.requested == "reuse_layer" else None,
        "error": record.accuracy.get("out"),
        "samples": median.count,
        "ran": "DENSE" if ran_dense(record) else record.resolved if record.exact else "sparse",
    }


def ran_dense(record: Record) -> bool:
    """Whether a sparse row decided to run dense; its notes say so."""
    return any("profitable" in note for note in record.notes)


def fastest_dense(group: Group) -> Cell | None:
    """The dense row with the lowest median, on however many devices."""
    rows = [cell for cell in group.cells if cell.speed and cell.record.requested == "dense"]
    return min(rows, key=lambda cell: cell.speed.median.value if cell.speed else 0.0, default=None)


def relative(group: Group, cell: Cell) -> Interval | None:
    """Time of a row relative to the fastest dense one, by rounds."""
    dense = fastest_dense(group)
    if dense is None or not cell.speed or not same_rounds(cell.record, dense.record):
        return None
    return statistics.paired_ratio(cell.record.samples, dense.record.samples)


def sentences(groups: Sequence[Group]) -> list[str]:
    """The gate's outcome, what Kascade loses on text, and how fast whole stacks are, in words."""
    return [sentence for group in groups for sentence in _sentences(group)]


def _sentences(group: Group) -> Iterator[str]:
    rows = {cell.record.requested: cell for cell in group.cells if is_trusted(cell.record)}
    kascade = rows.get("kascade")
    if group.kind == GATE:
        why = withheld(group, CONTROLS)
        lead = f"**Gate, {_phase(group)}**: "
        if why is not None:
            yield f"{lead}Kascade's row is withheld: {why}."
        elif kascade is not None and (mine := recall_of(kascade.record)) is not None:
            failed = [found.value for name in CONTROLS if (found := recall_of(rows[name].record))]
            share = 100 * kascade.record.quality["kept_pairs"]
            yield (
                f"{lead}dense 1, {code('kascade')} (approximate) {estimate(mine)} at "
                f"{number(share)}% of the pairs; {plural(len(failed), 'control')} at {number(min(failed))} to "
                f"{number(max(failed))}."
            )
    elif group.kind == TEXT and kascade is not None and withheld(group, BLIND) is None:
        if (lost := nats_lost(kascade.record)) is not None:
            others = [
                (name, found) for name in TEXT_CONTROLS if name in rows and (found := nats_lost(rows[name].record))
            ]
            better = [name for name, _ in others if loses_less(rows[name].record, kascade.record)]
            yield (
                f"**{_text_lead(group)}**: {code('kascade')} (approximate) at "
                f"{number(100 * kascade.record.quality['kept_pairs'])}% of the pairs loses {estimate(lost)} "
                "nats per byte"
                + (f"; at the same share {_listed(others)}" if others else "")
                + (f". **{', '.join(map(code, better))} loses less than it.**" if better else ".")
            )
    elif group.kind in STACKS and _problem(group)["layers"] > 1:
        for name in ("kascade", "kascade_token"):
            cell = rows.get(name)
            ratio = relative(group, cell) if cell else None
            dense = fastest_dense(group)
            if ratio and dense:
                yield (
                    f"**{_stack_name(group)}**: {code(name)} (approximate) takes {estimate(ratio)} {TIMES} the time "
                    f"of the fastest dense, {code(dense.label)}."
                )


def nats_lost(record: Record) -> Interval | None:
    """Nats per byte above dense attention, sequence by sequence."""
    return statistics.paired_difference(record.series["nll"], record.series["standard_nll"])


def loses_less(control: Record, record: Record) -> bool:
    """Whether a control has the lower loss, beyond the interval of the paired difference."""
    apart = statistics.paired_difference(control.series["nll"], record.series["nll"])
    return bool(apart and apart.high is not None and apart.high < 0)


def _listed(others: Sequence[tuple[str, Interval]]) -> str:
    return ", ".join(f"{code(name)} loses {estimate(found)}" for name, found in others)


def _text_lead(group: Group) -> str:
    steps = _problem(group)["training_steps"]
    rule = _problem(group)["schedule"]
    lead = f"Text, {_phase(group)}" + ("" if rule == "dp" else f", schedule {rule}")
    return lead + (f", each row trained for {steps} updates" if steps else "")


def _problem(group: Group) -> dict[str, Any]:
    """The fields of the case, including those that an older record lacks."""
    return problem_of(make_case(group.cells[0].record.problem))


def _phase(group: Group) -> str:
    return str(_problem(group)["phase"])


def _ordered(group: Group) -> list[Cell]:
    """Rows in the order of the suite."""
    names = list(METHODS)
    return sorted(group.cells, key=lambda cell: (names.index(cell.record.requested), cell.record.devices))


def _described(group: Group) -> str:
    """The problem of a case of quality, in words."""
    p = _problem(group)
    share = f", {number(100 * p['top_k'])}% of the earlier keys" if group.kind == GATE else ""
    model = "constructed checkpoint" if group.kind != TEXT else f"model {PurePath(p['model']).name}"
    units = f"tiles of {p['tile_size']} keys" if p["granularity"] == "tile" else "single keys"
    trained = f", each row trained for {p['training_steps']} updates" if p.get("training_steps") else ""
    return f"{model}, S {p['sequence']}, {p['sequences']} sequences, {units}{share}{trained}"


def _stack_name(group: Group) -> str:
    p = _problem(group)
    kind = "prefill" if group.kind == "kascade_prefill" else "decode"
    layers = "one layer" if p["layers"] == 1 else f"{p['layers']} layers, {p['anchors']} of them select"
    return (
        f"{kind}, S {p['sequence']}, {layers}, heads {p['heads']}/{p['kv_heads']}, D {p['head_dim']}, {p['dtype']}, "
        f"{number(100 * p['top_k'])}% in tiles of {p['tile_size']}" + (f", kernel {p['kernel']}" if p["kernel"] else "")
    )


def _stack_order(group: Group) -> tuple[Any, ...]:
    p = _problem(group)
    return p["layers"] == 1, p["sequence"], p["top_k"], p["anchors"]
