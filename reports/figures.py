"""Tables of cells: what ran, speed, memory and accuracy, and backends beside peers.

Values stay numbers until they are shown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from attnsuite.suite import kinds
from attnsuite.suite.kinds.op_case import is_plain
from attnsuite.suite.peers import PEERS
from attnsuite.suite.record import Record
from attnsuite.suite.reportable import is_trusted, ratio_of, same_rounds, shows_memory

from .cells import Cell, Group, by_kind, cells_of
from .columns import BACKEND, BASELINE, CASE, EXACT, FIGURES, MODE, PROBLEM, further, further_column
from .formatting import Value, code, escape, plural, shorten
from .plot import PASSES
from .table import MIB, MILLI, Column, Table, scaled, table

MEMORY_METHODS: dict[str, str] = {
    "compiled_argument": "arguments, compiled (MiB)",
    "compiled_output": "output, compiled (MiB)",
    "compiled_temp": "temporary, compiled (MiB)",
    "process_high_water": "process high-water mark above baseline (MiB)",
    "device_peak": "device peak (MiB)",
}
_FEWEST_LENGTHS = 3  # to which the growth of memory is fitted
_SHORTEST = 1024  # below, buffers of constant size distort the fit


def reason_numbers(records: Iterable[Record]) -> dict[str, str]:
    """Each distinct reason with its number, ``R1`` onward in the order of the records."""
    distinct = dict.fromkeys(reason for record in records for reason in record.reasons)
    return {reason: f"R{number}" for number, reason in enumerate(distinct, start=1)}


def requested_and_run(groups: Sequence[Group], numbers: Mapping[str, str]) -> Table:
    """The backend asked for, the one that ran, and why: reasons by their number, errors in full."""

    def why(cell: Cell) -> str | None:
        reasons = ", ".join(numbers[reason] for reason in cell.record.reasons)
        return ": ".join(filter(None, (reasons, shorten(cell.record.error or "")))) or None

    columns = (
        CASE,
        Column("requested", "requested", lambda cell: cell.record.requested),
        Column("ran", "ran", lambda cell: _what_ran(cell.record)),
        MODE,
        EXACT,
        Column("status", "status", lambda cell: cell.record.status),
        Column("why", "why", why),
    )
    return table("requested_and_run", "", columns, cells_of(groups))


def _what_ran(record: Record) -> str | None:
    if record.mode is None or record.resolved is None:
        return None
    return record.resolved if record.devices == 1 else f"{record.resolved}, {record.devices} devices"


def in_one(groups: Sequence[Group]) -> Table | None:
    """A row for each cell that ran: time, ratio, share of the peak, temporary memory, the error nearest its bound."""
    baseline = " or ".join(dict.fromkeys(kinds.kind_of(group.kind).baseline for group in groups))
    figures = ("median", "time_over_standard", "share_of_matmul_peak")
    columns = (
        CASE,
        BACKEND,
        *(FIGURES[name].column(baseline=baseline) for name in figures),
        _size("compiled_temp", MEMORY_METHODS["compiled_temp"]),
        Column("error", "error / allowed", lambda cell: _nearest_error(cell.record)),
        Column("ran", "ran", lambda cell: _otherwise(cell.record)),
    )
    ran = [cell for cell in cells_of(groups) if cell.record.status != "unsupported"]
    return table("in_one", "", columns, ran) if ran else None


def _size(name: str, header: str) -> Column:
    return Column(
        name,
        header,
        lambda cell: scaled(cell.record.memory.get(name), 1 / MIB) if shows_memory(cell.record) else None,
    )


def _nearest_error(record: Record) -> Value:
    """The error of an exact backend that is nearest to its bound."""
    errors = [error for error in record.accuracy.values() if error.max_error is not None and error.allowed]
    nearest = max(errors, key=lambda error: (error.max_error or 0.0) / (error.allowed or 1.0), default=None)
    return nearest if record.exact else None


def _otherwise(record: Record) -> str | None:
    """The status, or the mode of a cell that is ok but not native."""
    if record.status != "ok":
        return record.status
    return None if record.mode == "native" else record.mode


def speed(groups: Sequence[Group]) -> tuple[Table, ...]:
    """Two tables for each kind of case that has a speed: times, then rates. One of both is wider than a page."""
    timed = ((kind, heading, [cell for cell in cells if cell.speed]) for kind, heading, cells in by_kind(groups))
    return tuple(made for kind, heading, cells in timed if cells for made in _speed_of_kind(kind, heading, cells))


def _speed_of_kind(kind: str, heading: str, timed: Sequence[Cell]) -> Iterator[Table]:
    rates = [cell.speed.flops_rate or 0.0 for cell in timed if cell.speed]
    unit, size = ("TFLOP/s", 1e12) if max(rates) >= 1e13 else ("GFLOP/s", 1e9)
    phase = f"{kinds.phase_of(kind)} " if kinds.phase_of(kind) in ("prefill", "decode") else ""
    labels = {"baseline": kinds.kind_of(kind).baseline, "phase": phase, "flops": unit}
    figures = FIGURES | {"flops_per_second": dataclasses.replace(FIGURES["flops_per_second"], scale=1 / size)}
    times, others = (
        [figure.column(**labels) for figure in figures.values() if figure.table == part] for part in ("times", "rates")
    )
    lead = (PROBLEM, BACKEND)
    yield table(f"speed_{kind}", heading, (*lead, EXACT, *times), timed)
    made = table(f"rates_{kind}", f"{heading}: rates, and the time to compile", (*lead, *others), timed)
    if len(made.columns) > len(lead):
        yield made


def overview(groups: Sequence[Group]) -> tuple[Table, ...]:
    """Median milliseconds, one row per case and one column per backend, if more than one case has a speed.

    Fallbacks are left out, because their backend has its own column. More than six backends take a second table.
    """
    medians: dict[str, dict[str, float]] = {}
    for cell in cells_of(groups):
        if cell.speed and cell.record.mode == "native":
            medians.setdefault(cell.case, {})[cell.label] = cell.speed.median.value * MILLI
    names = list(dict.fromkeys(name for timed in medians.values() for name in timed))
    if len(medians) < 2:
        return ()
    lead = Column("case", "case", lambda case: case, merge=True)
    columns = [Column(name, name, lambda case, name=name: medians[case].get(name)) for name in names]
    made = []
    for start in range(0, len(names), 6):
        heading = "All cases: median (ms)" if start == 0 else "All cases: median (ms), continued"
        made.append(table(f"overview_{start // 6 + 1}", heading, (lead, *columns[start : start + 6]), medians))
    return tuple(made)


def against_peers(groups: Sequence[Group]) -> tuple[Table, ...]:
    """One table for each kind of case: the time of each exact backend relative to each peer, paired by round."""
    made = []
    for kind, title, cells in by_kind(groups):
        timed = [cell for cell in cells if cell.is_peer and cell.speed]
        columns = [Column(peer, f"relative to {peer}", _over(peer, timed)) for peer in PEERS]
        ours = [cell for cell in cells if cell.speed is not None and cell.record.exact and not cell.is_peer]
        if compared := [cell for cell in ours if any(column.value(cell) for column in columns)]:
            made.append(table(f"peers_{kind}", title, (PROBLEM, BACKEND, *columns), compared))
    return tuple(made)


def _over(peer: str, timed: Sequence[Cell]) -> Callable[[Cell], Value]:
    """A function from a cell to its time relative to that of ``peer`` in the same case and rounds."""

    def ratio(cell: Cell) -> Value:
        found = [x.record for x in timed if x.record.requested == peer and x.case == cell.case]
        same = [record for record in found if same_rounds(cell.record, record)]
        return ratio_of(cell.record, same[-1]) if same else None

    return ratio


def memory(groups: Sequence[Group]) -> tuple[Table, ...]:
    """One table for each kind of case; every column is named after its method."""
    made = []
    for kind, heading, cells in by_kind(groups):
        selected = [cell for cell in cells if shows_memory(cell.record) and _known_sizes(cell.record)]
        if not selected:
            continue
        others = sorted({name for cell in selected for name in _known_sizes(cell.record)} - set(MEMORY_METHODS))
        columns = (
            PROBLEM,
            BACKEND,
            MODE,
            *(_size(name, header) for name, header in MEMORY_METHODS.items()),
            Column(
                "temp_ratio",
                f"temporary relative to {kinds.kind_of(kind).baseline}",
                lambda cell: BASELINE if cell.is_baseline else cell.temp_ratio,
            ),
            *(_size(name, f"{name.replace('_', ' ')} (MiB)") for name in others),
        )
        made.append(table(f"memory_{kind}", heading, columns, selected))
    return tuple(made)


def _known_sizes(record: Record) -> set[str]:
    return {name for name, size in record.memory.items() if size is not None}


def growth(groups: Sequence[Group]) -> Table | None:
    """The exponent of S in the temporary memory, a row per kind of pass, shape and backend with at least three lengths.

    None if there is none.
    """
    sizes: dict[tuple[str, str, str], dict[int, int]] = {}
    for cell in cells_of(groups):
        kind, problem, size = cell.record.kind, cell.record.problem, cell.record.memory.get("compiled_temp")
        length = problem.get("sequence")
        plain = kinds.phase_of(kind) in PASSES and is_plain(problem | {"causal": True})
        if plain and size and shows_memory(cell.record) and type(length) is int and length >= _SHORTEST:
            shape = (
                f"heads {problem.get('heads')}/{problem.get('kv_heads')}, D {problem.get('head_dim')}, "
                f"{problem.get('dtype')}"
            )
            sizes.setdefault((kind, shape, cell.label), {})[length] = size
    columns = (
        Column("kind", "pass", lambda at: kinds.title_of(at[0][0]), merge=True),
        Column("shape", "shape", lambda at: at[0][1], merge=True),
        Column("backend", "backend", lambda at: at[0][2]),
        Column("lengths", "S", lambda at: f"{min(at[1])} to {max(at[1])}"),
        Column("exponent", "temporary memory grows as S to the power", lambda at: _exponent(at[1])),
        Column("per_token", "bytes per token at the longest", lambda at: at[1][max(at[1])] / max(at[1])),
    )
    fitted = [item for item in sizes.items() if len(item[1]) >= _FEWEST_LENGTHS]
    return table("memory_growth", "Growth with the length", columns, fitted) if fitted else None


def _exponent(sizes: Mapping[int, int]) -> float:
    lengths = sorted(sizes)
    return float(np.polyfit(np.log(lengths), np.log([sizes[length] for length in lengths]), 1)[0])


def accuracy(groups: Sequence[Group]) -> tuple[Table, ...]:
    """Each tensor's error against the float64 oracle beside the allowed error, one table for each kind of case."""
    made = []
    for kind, heading, cells in by_kind(groups):
        judged = [cell for cell in cells if cell.record.accuracy]
        tensors = dict.fromkeys(name for cell in judged for name in cell.record.accuracy)
        errors = [
            Column(name, f"{name}: max error / allowed", lambda cell, name=name: _error(cell.record, name))
            for name in tensors
        ]
        columns = (PROBLEM, BACKEND, MODE, *errors, Column("verdict", "verdict", lambda cell: _verdict(cell.record)))
        if judged:
            made.append(table(f"accuracy_{kind}", heading, columns, judged))
    return tuple(made)


def _error(record: Record, tensor: str) -> Value:
    error = record.accuracy.get(tensor)
    if error is None or record.exact is not False:
        return error
    return "not finite" if error.max_error is None else error.max_error


def _verdict(record: Record) -> str:
    if record.exact is False:
        return "not judged: approximate"
    outside = [name for name, error in record.accuracy.items() if not error.passed]
    return f"OUTSIDE: {', '.join(outside)}" if outside else "within"


def further_figures(groups: Sequence[Group]) -> tuple[Table, ...]:
    """The figures that only one kind of case has, a table for each such kind."""
    made = []
    for kind, heading, cells in by_kind(groups):
        measured = [cell for cell in cells if further(cell)]
        names = dict.fromkeys(name for cell in measured for name in further(cell))
        if names:
            columns = (PROBLEM, BACKEND, MODE, *(further_column(kind, name) for name in names))
            made.append(table(f"figures_{kind}", heading, columns, measured))
    return tuple(made)


def cell_notes(groups: Sequence[Group]) -> tuple[str, ...]:
    """The notes of the records with the cells that they are about, each once, in the order of the cells."""
    found: dict[str, list[str]] = {}
    for cell in cells_of(groups):
        for note in cell.record.notes:
            found.setdefault(note, []).append(f"{code(cell.label)} in {escape(cell.case)}")
    return tuple(
        f"{noted[0] if len(noted) == 1 else plural(len(noted), 'cell')}: {escape(note)}"
        for note, noted in found.items()
    )


def untimed(groups: Sequence[Group]) -> list[Cell]:
    """Trusted native cells with samples that are no valid times (zero, negative, not finite)."""
    return [
        cell
        for cell in cells_of(groups)
        if cell.speed is None
        and cell.record.samples
        and is_trusted(cell.record)
        and cell.record.mode in ("native", "fallback")
    ]
