"""The section of the suite ``kascade-guide``: each figure of the guides beside what this run measured of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attnsuite.suite.kinds.kascade.guide import LENGTHS, NAME
from attnsuite.suite.kinds.kascade.methods import KERNELS
from attnsuite.suite.record import Record
from attnsuite.suite.shown import is_trusted

from ..cells import Group
from ..table import Column, Table, table
from ..words import Value, estimate, number
from . import tables


def figures(groups: Sequence[Group]) -> Table | None:
    """A row per figure: where it stands, what it says, what this run measured, and why the two differ."""
    members = {group.cells[0].record.case: group for group in groups if group.cells[0].record.suite == NAME}
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
        rows = _rows_of(members, f"guide-{guide}-prefill")
        if "dense" in rows and "kascade" in rows:
            yield from ((title, *row) for row in _of_text(guide, rows))
    for length in LENGTHS:
        yield "Llama-3.1-8B", "1.8 to 2.2 times as fast on a CPU", _time(members, length), _SLOW_BASELINE
    for length in LENGTHS:
        yield "A Kascade TPU kernel", f"max diff < 1e-03 at {length} tokens", _errors(members, length), _ONE_BLOCK


def _of_text(guide: str, rows: dict[str, Record]) -> Iterator[tuple[str, str, str]]:
    dense, own = rows["dense"], rows["kascade"]
    found = tables.nats_lost(own)
    better = [name for name in tables.TEXT_CONTROLS if name in rows and tables.loses_less(rows[name], own)]
    lost = f"{estimate(found) if found else '-'} nats per byte lost"
    lost += f"; {', '.join(better)} loses less at the same share" if better else ""
    kept, flops = (number(100 * own.quality[name]) for name in ("kept_pairs", "flops"))
    if guide == "1b":
        perplexity = f"dense {number(dense.quality['perplexity'])}, Kascade {number(own.quality['perplexity'])}"
        yield "perplexity 752,570.5", f"{perplexity}, per token", _BROKEN_MODEL
        yield "0% degradation", lost, _ONE_TEXT
        yield "63% sparsity", f"{kept}% of the pairs kept, {flops}% of the FLOPs", _LAYERS_COUNTED
    else:
        yield "accuracy: to be validated", lost, "The guide has no figure."
        yield "8 of 32 tiles", f"{kept}% of the pairs kept, {flops}% of the FLOPs", _OWN_TILE
    yield "its schedule", next(iter(own.notes), "none recorded"), _OWN_CALIBRATION


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
_LAYERS_COUNTED = "It counts layers that reuse. Pairs and FLOPs are other numbers."
_OWN_TILE = "Each tile of queries has its own tile besides, and the first layer is dense."
_OWN_CALIBRATION = "Made from the calibration of this model, by the guide's own rule."
_ONE_BLOCK = (
    "That kernel had no causal mask and read its first block only. Here all tiles are selected, and the reference is "
    "float64."
)
_SLOW_BASELINE = "Its dense baseline is slower than any exact backend."
_ONE_TEXT = "One text, no interval, no control. Here: paired by sequence, with a 95% interval, beside controls."


def _rows_of(members: dict[str, Group], case: str) -> dict[str, Record]:
    group = members.get(case)
    return {cell.record.requested: cell.record for cell in group.cells if is_trusted(cell.record)} if group else {}
