"""Kascade on the page of a run: the sections of its own cases, each none where it has no content."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attnsuite.suite.kinds.kascade.methods import METHODS

from ..cells import Group
from ..formatting import code, escape
from ..page import Section, section
from . import guide, tables


def quality(groups: Sequence[Group]) -> Iterator[Section]:
    """The loss at each kept fraction."""
    if made := tables.quality(groups):
        intro = (
            "All rows of one share keep the same number of units (layer 0 dense in all of them); “pairs "
            "kept” is measured: query-key pairs that were computed, of all causal ones, in the other layers. "
            "Shares of units are rounded up, and every query tile has its own region besides, so the measured share "
            "is the larger. “FLOPs” are of the whole model's attention, dense layers and the anchors' selection "
            "included. “Attention kept” is the part of dense attention, of the row's own queries and keys, that "
            "lies on computed pairs. A row is withheld where random tiles do not fail."
        )
        drawn = tables.picture(groups)
        pictures = () if drawn is None else (drawn,)
        measured = [group for group in groups if group.kind in (tables.TEXT, tables.RETRIEVAL)]
        rows = {cell.record.requested for group in measured for cell in group.cells}
        if rows & {"omnikv", "lessismore"}:
            intro += (
                " `omnikv` and `lessismore` are dense in every layer that selects, as in their papers, and keep more "
                "pairs."
            )
        yield Section("kascade_quality", "Quality at the same kept fraction", (intro,),
                      tuple(f"{code(m.name)}: {escape(m.about)}." for m in METHODS.values() if m.name in rows),
                      tables=made, pictures=pictures, short=True)  # fmt: skip


def loss(groups: Sequence[Group]) -> tuple[Sequence[Group], str | None] | None:
    """The prefill cases on text, withheld where random tiles do not fail."""
    prefills = [member for member in groups if member.kind == tables.TEXT and member.problem.get("phase") == "prefill"]
    if not prefills:
        return None
    why = tables.withheld(prefills[0], tables.BLIND)
    return prefills, None if why is None else f"{tables.WITHHELD}: {why}"


has_group, sentences = tables.is_kascade, tables.sentences
OPENING = (section("guides", "The guides' figures", "tables", guide.figures, short=True),)
PARTS = (
    section(
        "kascade_gate",
        "The retrieval gate",
        "tables",
        tables.gate,
        "A hand-built model with a known circuit: an anchor layer can fetch one half of an answer, a reuse layer "
        "the other, so that an answer is right only where both attend to the needle. Chance is 1 in 16 where both "
        "look elsewhere, 1 in 4 where one does. Kascade's row stands only where dense finds everything and "
        "every control is there and fails beyond its interval.",
        short=True,
    ),
    quality,
    section(
        "kascade_speed",
        "Speed of whole stacks",
        "tables",
        tables.speed,
        "Attention only, of all layers, what the anchors cost included, relative to the fastest dense row of the "
        "case: dense is timed on one device and on one per core. “Time relative to its share of pairs” is 1 "
        "where a reuse layer is as much faster as it computes less. Before it is timed, a row has to equal dense "
        "with everything selected. DENSE: the row decided by itself not to run sparse.",
        short=True,
    ),
)
LOSS_NOTE = "Kascade's losses are those of its own case, beside its controls."
