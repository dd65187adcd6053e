"""Kascade's page: no row without controls that fail, ratios against the fastest dense, dense runs named."""

from __future__ import annotations

import dataclasses

import pytest

from attnsuite.reports.cells import group
from attnsuite.reports.kascade import tables as kascade
from attnsuite.reports.pages.measurements import build
from attnsuite.reports.plot import draw
from attnsuite.reports.read import load
from attnsuite.suite.kinds import kind_of, problem_of
from attnsuite.suite.kinds.kascade.methods import CONTROLS
from attnsuite.suite.kinds.kascade.selection_case import SelectionCase
from attnsuite.suite.kinds.kascade.stack_case import StackCase

GATE = SelectionCase(kind="kascade_gate", sequence=1024, tile_size=32, top_k=0.25)
STACK = StackCase(kind="kascade_prefill", sequence=8192, heads=8, kv_heads=2)
QUERIES = 64


def fields(case, **others):
    return {"case": case.name, "kind": case.kind, "problem": problem_of(case), "suite": "kascade", "accuracy": {},
            "memory": {}, "samples": (), "flops": None} | others  # fmt: skip


@pytest.fixture
def gate_records(record):
    """All rows of the gate; ``recall`` changes some."""

    def make(case=GATE, recall=None, leave_out=()):
        made = []
        for name in kind_of(case.kind).rows(case):
            share = (recall or {}).get(name, 0.4 if name in CONTROLS else 1.0)
            hits = int(share * QUERIES)
            hit = (1.0,) * hits + (0.0,) * (QUERIES - hits)
            series = {"hit": hit, "standard_hit": (1.0,) * QUERIES, "distance": (600.0,) * QUERIES}
            figures = {"recall": share, "dense_recall": 1.0, "kept_pairs": 0.3, "mass_mean": 0.8, "mass_min": 0.2}
            extra = {"series": series, "quality": figures, "exact": name == "dense"}
            if name not in leave_out:
                made.append(record(name, **fields(case, **extra)))
        return made

    return make


def kascade_row(records):
    (table,) = kascade.gate(group(records))
    (row,) = [row for row in table.rows if row["method"] == "kascade"]
    return row


@pytest.mark.parametrize(
    ("changes", "reading"),
    [
        *(({"leave_out": (name,)}, f"WITHHELD: no {name}") for name in CONTROLS),
        # Below dense, but not beyond the intervals.
        *(({"recall": {name: 0.95}}, f"WITHHELD: {name} does not fail visibly") for name in CONTROLS),
        ({"recall": {"dense": 0.9}}, "does not retrieve everything"),
        ({"leave_out": ("dense",)}, "no dense row"),
    ],
    ids=str,
)
def test_row_is_withheld_unless_dense_finds_all_and_every_control_fails(gate_records, changes, reading):
    row = kascade_row(gate_records(**changes))
    assert row.get("recall") is None
    assert reading in row["reading"]


def test_row_that_loses_is_shown_as_such(gate_records):
    row = kascade_row(gate_records(recall={"kascade": 0.7}))
    assert (row["recall"].value, row["reading"]) == (pytest.approx(0.69, abs=0.01), "loses")


def test_withheld_row_is_in_no_sentence_and_no_figure_of_the_page(gate_records, write_run):
    (page,) = build(load(write_run(*gate_records(leave_out=("stale_indices",)))))
    sentences = next(section for section in page.sections if section.key == "in_short").items
    assert sentences == ("**Gate, prefill**: Kascade's row is withheld: no stale_indices.",)


def text_records(record, random_loss, top_k=0.125, **schedule):
    case = SelectionCase(kind="kascade_text", top_k=top_k, **schedule)
    made = []
    for name in kind_of(case.kind).rows(case):
        loss = {"dense": 0.0, "random_tiles": random_loss}.get(name, 0.01)
        nll = tuple(1.0 + 0.1 * i for i in range(8))
        series = {"nll": tuple(x + loss * (1 + i % 3) for i, x in enumerate(nll)), "standard_nll": nll}
        figures = {"perplexity": 3.0, "kl_mean": loss + 1e-6, "kl_p99": loss, "top1_agreement": 0.9,
                   "kept_pairs": top_k + 0.05, "mass_mean": 0.8, "mass_min": 0.2}  # fmt: skip
        made.append(record(name, **fields(case, series=series, quality=figures, exact=name == "dense")))
    return made


def test_plot_has_a_line_from_three_shares_on_and_none_of_withheld_rows(record):
    shares = (0.1, 0.2, 0.4)
    records = [r for share in shares for r in text_records(record, 0.3, share)]
    found = kascade.picture(group(records))
    assert found is not None
    (panel,) = found.panels
    lines = dict(panel.lines)
    assert [x for x, _ in lines["kascade"]] == pytest.approx([15.0, 25.0, 45.0])
    assert "dense" not in lines
    assert draw(found).startswith("<?xml")
    assert kascade.picture(group(records[: len(records) // 3])) is None
    assert kascade.picture(group([r for share in shares for r in text_records(record, 0.0, share)])) is None


def test_sweep_has_a_line_and_a_row_for_each_schedule(record):
    records = []
    for share in (0.1, 0.2, 0.4):
        for threshold in (0.5, 0.9):
            name = f"s{share:g}-th{threshold:g}"
            schedule = {"schedule": "greedy", "threshold": threshold, "name": name}
            records += text_records(record, 0.3, share, **schedule)
    (panel,) = kascade.picture(group(records)).panels
    lines = dict(panel.lines)
    for threshold in (0.5, 0.9):
        assert len(lines[f"kascade, greedy, threshold {threshold}, distance 4"]) == 3
    assert "kascade" not in lines
    table, *_ = kascade.quality(group(records))
    told = {row["schedule"] for row in table.rows if row["method"] == "kascade"}
    assert told == {"greedy, threshold 0.5, distance 4", "greedy, threshold 0.9, distance 4"}
    assert "schedule" in [column.key for column in table.columns]
    without, *_ = kascade.quality(group(text_records(record, 0.3)))
    assert "schedule" not in [column.key for column in without.columns]


def test_wrong_row_has_no_figures(record):
    """Times of stacks, and rows that ran dense: on the published page."""
    dense = record("dense", **fields(STACK, exact=True, samples=(2.0,) * 10))
    wrong = record("kascade", **fields(STACK, exact=False, status="wrong", error="out is off"))
    table, *_ = kascade.speed(group([dense, wrong]))
    (row,) = [row for row in table.rows if row["method"] == "kascade"]
    assert (row["ran"], row.get("relative")) == ("out is off", None)


@pytest.mark.parametrize(
    "without",
    [
        {"quality": {}},
        {"series": {}},
        {"series": {"hit": (1.0, 0.0), "distance": (600.0,)}},
        {"series": {"hit": (0.5,), "distance": (600.0,)}},
        {"problem": {"kind": "kascade_gate", "sequence": "long"}},
    ],
    ids=str,
)
def test_rows_without_the_figures_that_the_page_reads_are_no_rows_of_it(gate_records, write_run, without):
    whole, *others = gate_records()
    assert all(kascade.is_kascade(each) for each in group([whole, *others]))
    spoilt = dataclasses.replace(whole, **without)
    assert not any(kascade.is_kascade(each) for each in group([spoilt, *others]))
    build(load(write_run(spoilt, *(dataclasses.replace(each, problem=spoilt.problem) for each in others))))


def test_what_an_older_record_leaves_out_of_its_problem_has_its_default(gate_records):
    older = [
        dataclasses.replace(each, problem={k: v for k, v in each.problem.items() if k != "phase"})
        for each in gate_records()
    ]
    assert kascade.gate(group(older))[0].title.startswith("Prefill")
