"""The terminal's summary follows the rules of the tables."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console
from rich.text import Text

from attnsuite.reports.cells import group
from attnsuite.suite.grid.progress import ProgressDisplay
from attnsuite.suite.summary import record_line, summary_lines


def columns(records, name):
    """The figures of the row that begins with ``name``."""
    (line,) = [line for line in summary_lines(records) if line.strip().startswith(name)]
    return line.strip().removeprefix(name).split()


@pytest.mark.parametrize(("dtype", "share"), [("float32", True), ("bfloat16", True), ("float16", False)])
def test_share_of_the_peak_is_the_tables_own(record, dtype, share):
    """The machine's peak was measured in float32 and bfloat16, and the one is not the other's."""
    standard = record(problem=record().problem | {"dtype": dtype})
    (cell,) = group([standard])[0].cells
    assert (cell.speed.peak_share is not None) == share
    shown = [f"{100 * cell.speed.peak_share:.1f}%"] if share else []
    assert [figure for figure in columns([standard], "standard") if figure.endswith("%")] == shown


@pytest.mark.parametrize("change", [{"status": "wrong"}, {"mode": "interpret"}, {"mode": "compile"}])
def test_what_may_show_no_speed_shows_none(record, change):
    line = " ".join(columns([record(), record("chunked", **change)], "chunked"))
    assert " ms" not in line
    assert " ms" not in record_line(record("chunked", **change)).plain
    assert ("MiB" in line) == (change == {"mode": "compile"})
    (cell,) = [cell for cell in group([record(), record("chunked", **change)])[0].cells if "chunked" in cell.label]
    assert cell.speed is None


def test_ratio_is_to_a_standard_with_right_numbers_in_the_same_rounds(record):
    def ratio(standard, **change):
        found = columns([standard, record("chunked", **change)], "chunked")
        return found[3:5] if found[1].startswith("(") else found[2:4]

    assert ratio(record())[0] == "1.00"
    assert ratio(record(environment=record().environment | {"session": "another"})) == ["not", "paired"]
    assert not ratio(record(status="wrong"))[0].startswith("1.00")
    assert not ratio(dataclasses.replace(record(), resolved="chunked", mode="fallback"))[0].startswith("1.00")


def test_a_case_of_two_devices_is_two_cases_with_a_baseline_each(record):
    fast = [record(name, target="cuda:h100", samples=(0.002,) * 10) for name in ("standard", "chunked")]
    lines = list(summary_lines([record(), record("chunked"), *fast]))
    case = record().case
    assert [line for line in lines if line.startswith(case)] == [
        f"{case}, for {target}" for target in ("cpu", "cuda:h100")
    ]
    assert [" 1.00" in line for line in lines if line.strip().startswith("chunked")] == [True, True]


def test_the_summary_fits_80_columns(record):
    """The log has the whole names; the table cuts the middle of a long one."""
    long = record("ragged_paged_attention", mode="interpret", resolved="ragged_paged_attention")
    slow = record("transformers_unthrottled", samples=tuple(12.345 + i / 7 for i in range(10)))
    lines = list(summary_lines([record(), record("flash_cpu", devices=2), long, slow]))
    assert max(map(len, lines)) <= 80
    assert any(line.split()[:2] == ["ragged_\u2026tention", "interpreted"] for line in lines)
    assert any(line.split()[:3] == ["flash_cpu", "on", "2"] for line in lines)


@pytest.mark.parametrize(
    ("kind", "quality", "line", "column"),
    [
        ("retrieval", {"recall": 0.5, "standard_recall": 1.0}, "recall 0.500", "recall 0.500"),
        ("perplexity", {"bits_per_byte": 2.0, "kl_mean": 1e-3}, "2.0000 bits/byte, KL 1.0e-03", "2.0000 bits/byte"),
        ("perplexity", {"bits_per_byte": 2.0}, "2.0000 bits/byte", "2.0000 bits/byte"),  # of attnsuite perplexity
        ("kascade_gate", {"kept_pairs": 0.25, "recall": 1.0}, "recall 1.000", "recall 1.000"),
    ],
)
def test_what_is_not_timed_shows_the_figures_that_its_kind_names(record, kind, quality, line, column):
    found = record(kind=kind, samples=(), quality=quality)
    assert record_line(found).plain.endswith(f"  {line}")
    assert " ".join(columns([found], "standard")).startswith(column)


def test_a_refusal_is_told_once_for_each_reason_and_device(record):
    refused = record("cudnn", mode=None, status="unsupported", samples=(), reasons=("cudnn: needs a GPU; buy one.",))
    again = dataclasses.replace(refused, key="again", case="another")
    other = dataclasses.replace(refused, key="other", reasons=("cudnn: takes no mask.",))
    elsewhere = dataclasses.replace(refused, key="elsewhere", target="tpu:v5e")
    console = Console(file=io.StringIO(), width=200)
    display = ProgressDisplay(console)
    for each in (refused, again, other, elsewhere):
        display.done(each)
    lines = console.file.getvalue().splitlines()
    assert [line.rsplit("  ", 1)[1] for line in lines] == ["needs a GPU.", "takes no mask.", "needs a GPU."]


def test_bar_counts_cells_that_are_measured_and_not_those_that_are_unsupported(record):
    """Those that are known before, and one that turns out to be."""
    display = ProgressDisplay(Console(file=io.StringIO()))
    refused = record("kvax", mode=None, status="unsupported", samples=(), reasons=("kvax runs on GPUs.",))
    display.begin(3, 0)
    for each in (refused, record(), refused):
        display.done(each)
    display.fewer(1)
    (task,) = display._progress.tasks
    assert (task.completed, task.total, task.fields["left"]) == (1, 2, 1)


@pytest.mark.parametrize("terminal", [True, False])
def test_long_line_breaks_between_words_on_a_terminal_alone(monkeypatch, record, terminal):
    sentence = "unsupported forward-s1024-h8k2-d64-bf16 / kvax  " + "query_length=1024 is not supported by kvax " * 4
    monkeypatch.setattr("attnsuite.suite.grid.progress.record_line", lambda _: Text(sentence))
    file = io.StringIO()
    display = ProgressDisplay(Console(file=file, force_terminal=terminal, width=80, color_system=None))
    display.done(record())
    display.warn(sentence)
    first, *rest = file.getvalue().splitlines()
    assert file.getvalue().split() == [*sentence.split(), "warning:", *sentence.split()]
    assert max(map(len, (first, *rest))) <= 80 or not terminal
    assert len(rest) == (7 if terminal else 1)


@pytest.mark.parametrize("width", [60, 72, 80, 200])
def test_the_summary_fits_the_terminal_and_tells_two_functions_of_a_file_apart(record, width):
    names = ("kernels.py:first_attention", "kernels.py:fifth_attention", "flash_cpu")
    records = [record(name, samples=tuple(12.345 + i / 7 for i in range(10))) for name in names]
    lines = list(summary_lines([record(), *records], width))
    assert max(map(len, lines)) <= width
    rows = [line.split()[0] for line in lines if line.startswith("  ") and line.split()[0] != "time"]
    assert len(set(rows)) == 4
    assert set(names) <= set(rows) if width == 200 else "flash_cpu" in rows
