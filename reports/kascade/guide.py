"""The section of the suite ``kascade-guide``: each figure of the guides beside what this run measured of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from attnsuite.suite import statistics
from attnsuite.suite.kinds import phase_of
from attnsuite.suite.kinds.kascade.extension import GUIDE_LENGTHS, MODEL_SUITE
from attnsuite.suite.kinds.kascade.methods import KERNELS
from attnsuite.suite.record import Record
from attnsuite.suite.reportable import is_trusted, same_rounds

from ..cells import Group
from ..formatting import Value, estimate, number
from ..table import Column, Table, table
from . import tables


def figures(groups: Sequence[Group]) -> Table | None:
    """A row per figure: where it stands, what it says, what this run measured, and why the two differ."""
    members = {group.cells[0].record.case: group for group in groups if group.cells[0].record.suite == MODEL_SUITE}
    if not members:
        return None
    keys = ("guide", "figure", "here", "why")
    rows: list[dict[str, Value]] = [dict(zip(keys, row, strict=True)) for row in _rows(members)]
    columns = (
        Column("guide", "guide", merge=True),
        Column("figure", "its figure"),
        Column("here", "measured here"),
        Column("why", "why they differ"),
    )
    return table("guides", "", columns, rows)


def _rows(members: dict[str, Group]) -> Iterator[tuple[str, str, str, str]]:
    for guide, title in (("1b", "Llama-3.2-1B"), ("8b", "Llama-3.1-8B")):
        rows = _rows_of(members, case := f"guide-{guide}-prefill")
        if "dense" in rows and "kascade" in rows:
            yield from ((title, *row) for row in _of_text(guide, rows, tables.withheld(members[case], tables.BLIND)))
    for length in GUIDE_LENGTHS:
        yield "Llama-3.1-8B", "1.8 to 2.2 times as fast on a CPU", _time(members, length), _SLOW_BASELINE
    yield "Llama-3.1-8B", "its dense baseline", _first_token(members), _WHICH_DENSE
    for length in GUIDE_LENGTHS:
        yield "A Kascade TPU kernel", f"max diff < 1e-03 at {length} tokens", _errors(members, length), _ONE_BLOCK
    yield "A Kascade TPU kernel", "blocks of 512 queries, 256 and 128 keys", _blocks(members), _BLOCKS_BOUND


def _of_text(guide: str, rows: dict[str, Record], why: str | None) -> Iterator[tuple[str, str, str]]:
    """The rows of one guide; ``why``: no loss of Kascade may be shown."""
    dense, kascade = rows["dense"], rows["kascade"]
    withheld = f"{tables.WITHHELD}: {why}"
    found = tables.nats_lost(kascade)
    better = [name for name in tables.TEXT_CONTROLS if name in rows and tables.loses_less(rows[name], kascade)]
    lost = f"{estimate(found) if found else '-'} nats per byte lost"
    lost += f"; {', '.join(better)} loses less at the same share" if better else ""
    lost = withheld if why else lost
    pairs, flops, reuse = (_figure(kascade, name, 100) for name in ("kept_pairs", "flops", "reuse_layers"))
    if guide == "1b":
        perplexity = withheld if why else f"{_figure(kascade, 'perplexity')}, per token"
        yield (
            "perplexity 752,570.5",
            f"dense {_figure(dense, 'perplexity')}, Kascade {perplexity}",
            _BROKEN_MODEL,
        )
        yield "0% degradation", lost, _ONE_TEXT
        shares = f"{reuse}% of the layers reuse; {pairs}% of the pairs kept, {flops}% of the FLOPs"
        yield "63% sparsity", shares, _LAYERS_COUNTED
    else:
        yield "accuracy: to be validated", lost, "The guide has no figure."
        yield "8 of 32 tiles", f"{pairs}% of the pairs kept, {flops}% of the FLOPs", _LOCAL_TILE
    yield "its schedule", next(iter(kascade.notes), "none recorded"), _CALIBRATED


def _figure(record: Record, name: str, factor: float = 1) -> str:
    """A figure of the quality of a row; a dash where its record has none of this name."""
    return number(factor * record.quality.get(name, math.nan))


def _time(members: dict[str, Group], length: int) -> str:
    """The fastest sparse row of whole stacks relative to the fastest dense one."""
    group = members.get(f"guide-stack-{length}")
    sparse = [
        (ratio, cell.record.requested)
        for cell in (group.cells if group else ())
        if cell.record.exact is False and not tables.ran_dense(cell.record)
        if group and (ratio := tables.relative(group, cell)) is not None
    ]
    if not sparse:
        return f"no time here, at {length} tokens"
    ratio, name = min(sparse, key=lambda pair: pair[0].value)
    return f"{name} takes {estimate(ratio)} times the time of the fastest dense, at {length} tokens"


def _first_token(members: dict[str, Group]) -> str:
    """Times of the model's prefill relative to its fastest exact backend."""
    group = next((group for group in members.values() if phase_of(group.kind) == "prefill"), None)
    timed = [cell for cell in (group.cells if group else ()) if cell.speed]
    best = min((x for x in timed if x.record.exact), key=lambda x: x.speed.median.value if x.speed else 0, default=None)
    if best is None:
        return "no time here"
    found = [
        f"{cell.record.requested} {estimate(ratio)}"
        for cell in timed
        if cell is not best and same_rounds(cell.record, best.record)
        if (ratio := statistics.paired_ratio(cell.record.samples, best.record.samples)) is not None
    ]
    return f"the model's prefill relative to {best.record.requested}'s: {', '.join(found) or 'nothing else is timed'}"


def _blocks(members: dict[str, Group]) -> str:
    """The blocks of the Pallas kernel, by the note of its row."""
    rows = _rows_of(members, f"guide-stack-{GUIDE_LENGTHS[-1]}")
    notes = rows["kascade_pallas"].notes if "kascade_pallas" in rows else ()
    return next((note for note in notes if "block_q" in note), "no kernel here")


def _errors(members: dict[str, Group], length: int) -> str:
    found = [
        f"{name} {number(error.max_error or 0.0)} (allowed {number(error.allowed or 0.0)})"
        for name, record in _rows_of(members, f"guide-stack-{length}").items()
        if name in ("kascade", *KERNELS) and (error := record.accuracy.get("out")) is not None
    ]
    return "; ".join(found) or "no kernel here"


_BROKEN_MODEL = (
    "exp of the loss of one token, by a model worse than chance: a uniform guess over Llama 3's 128,256 tokens has "
    "128,256. Its weights had gate and up swapped, and RoPE no scaling."
)
_LAYERS_COUNTED = "It counts the layers that reuse, 10 of 16. Pairs and FLOPs are other numbers."
_LOCAL_TILE = "Each tile of queries has its own tile besides, and the first layer is dense."
_CALIBRATED = "Made from the calibration of this model, by the guide's own rule."
_ONE_BLOCK = (
    "That kernel had no causal mask and read its first block only. Here all tiles are selected, and the reference is "
    "float64."
)
_SLOW_BASELINE = "The guide names no baseline. Here it is the fastest exact backend, in the same rounds."
_WHICH_DENSE = "A ratio to an attention that nobody would use says nothing of speed: the page times all of them."
_BLOCKS_BOUND = "Upper bounds: no block is larger than its tile. The guides' tiles have 16 keys."
_ONE_TEXT = "One text, no interval, no control. Here: paired by sequence, with a 95% interval, beside controls."


def _rows_of(members: dict[str, Group], case: str) -> dict[str, Record]:
    group = members.get(case)
    return {cell.record.requested: cell.record for cell in group.cells if is_trusted(cell.record)} if group else {}
