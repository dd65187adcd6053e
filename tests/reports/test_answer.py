"""The table "use this": one exact backend per case, what it gains, and how sure that is."""

from pathlib import Path

import pytest

from attnsuite import reports
from attnsuite.reports.answer import answer, answer_lines, installs, unmeasured
from attnsuite.reports.cells import group
from attnsuite.reports.read import load

FAST, MIDDLE, SLOW = ([scale * (1 + 0.001 * i) for i in range(10)] for scale in (0.001, 0.01, 0.1))


def row(*records):
    (found,) = answer(group(records)).rows
    return found


def test_fastest_is_exact_and_right(record):
    found = row(
        record(samples=tuple(SLOW)),
        record("kascade", exact=False, samples=tuple(FAST)),
        record("cudnn", status="wrong", samples=tuple(FAST)),
        record("splash", mode="interpret", samples=tuple(FAST)),
        record("unknown", exact=None, samples=tuple(FAST)),
        record("chunked", samples=tuple(MIDDLE)),
    )
    assert (found["use"], found["sure"]) == ("chunked", "measurably faster")
    assert found["time_over_standard"].value == pytest.approx(0.1)
    assert found["others"].startswith("standard 10.0")


def test_case_with_only_approximate_speeds_says_so(record):
    found = row(record(status="oom", samples=()), record("kascade", exact=False, samples=tuple(FAST)))
    assert found["use"] is None
    assert "no exact backend has a speed here" in found["sure"]


def test_ratio_uses_the_rounds_that_both_have(record):
    standard = record(samples=tuple(SLOW[:7]))
    chunked = record("chunked", samples=tuple(MIDDLE))
    speed = next(cell.speed for cell in group([standard, chunked])[0].cells if cell.label == "chunked")
    assert speed.ratio.count == 7


def test_cells_of_different_sessions_share_no_rounds_and_have_no_ratio(record):
    here = {**record().environment, "session": "a"}
    standard = record(samples=tuple(SLOW), environment=here)
    chunked = record("chunked", samples=tuple(MIDDLE), environment={**here, "session": "b"})
    cells = group([standard, chunked])[0].cells
    assert all(cell.speed and cell.speed.ratio is None for cell in cells)
    found = row(standard, chunked)
    assert found["time_over_standard"] == "standard was measured in another session"
    assert found["sure"] == "the next was measured in another session"


def test_interval_that_includes_one_is_no_measurable_difference(record):
    noise = (1.02, 0.97, 1.01, 0.99, 1.03, 0.98, 1.0, 0.985, 1.015, 0.995)
    found = row(record(), record("chunked", samples=tuple(0.2 * value for value in noise)))
    assert found["sure"] == "no measurable difference to the next"


def test_fewer_than_six_samples_tell_nothing(record):
    found = row(record(samples=tuple(SLOW[:5])), record("chunked", samples=tuple(MIDDLE[:5])))
    assert found["sure"] == "5 rounds: too few to tell"
    assert found["others"] == "standard 10.0"


def test_nothing_is_relative_to_standard_where_it_was_not_asked_for(record, write_run):
    assert row(record("chunked")).get("time_over_standard") is None
    lines = answer_lines(load(write_run(record("chunked"))))
    assert lines[0].split() == ["case", "use", "this"]


def test_wrong_standard_is_no_baseline(record):
    found = row(record(status="wrong"), record("chunked"))
    assert found["time_over_standard"] == "standard has no speed here"
    assert found["sure"] == "nothing else that is exact was timed"


def test_fallback_stands_in_only_where_its_backend_has_no_cell_of_its_own(record):
    fallback = record("kvax", resolved="standard", mode="fallback", samples=tuple(FAST))
    found = row(record(samples=tuple(SLOW)), fallback)
    assert (found["use"], found["time_over_standard"]) == ("standard", "1 (baseline)")
    assert found["median_ms"] == pytest.approx(100, rel=0.01)
    assert row(fallback)["use"] == "standard (for kvax)"


def test_answer_comes_first_and_refusals_last_and_folded(record, write_run):
    reasons = ("cudnn: cuDNN runs on NVIDIA GPUs, not here; buy one.", "chunked: <details> is taken.")
    refused = record("cudnn", resolved=None, mode=None, status="unsupported", samples=(), reasons=reasons)
    reports.render(folder := write_run(record(), record("chunked", samples=tuple(MIDDLE)), refused))
    text = (folder / "report.md").read_text(encoding="utf-8")
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings == [
        *("## Use this", "## In short", "## Speed, memory and accuracy", "## Did not run", "## Reproduce", "## More"),
    ]
    assert "\n- `cudnn`: cuDNN runs on NVIDIA GPUs, not here.\n" in text
    page = (folder / "report.html").read_text(encoding="utf-8")
    folded = page[page.index("<details><summary>") :]
    assert page.count("<details><summary>") == page.count("</details>")
    assert "buy one" in folded
    assert "buy one" not in page.removesuffix(folded)
    assert "&lt;details&gt; is taken" in page


def test_backend_that_one_install_keeps_from_running_is_named_with_the_command(record):
    lacking = "kvax: kvax is not installed; install it with: pip install '.[kvax]'."
    device = "kvax: Kvax runs on NVIDIA GPUs, not on cpu; use backend='chunked'."
    cells = [
        record("standard", samples=(1.0,) * 6),
        record("kvax", status="unsupported", mode=None, resolved=None, samples=(), reasons=(lacking,)),
    ]
    (sentence,) = installs(cells)
    assert sentence.endswith("to have it: pip install '.[kvax]'")
    elsewhere = record("kvax", status="unsupported", mode=None, resolved=None, samples=(), reasons=(device, lacking))
    assert installs([elsewhere]) == []


def test_function_that_was_not_measured_is_named_at_the_top_with_the_reason(record):
    reason = "my.py:attend: it is not causal."
    left_out = {"status": "unsupported", "mode": None, "resolved": None, "samples": (), "reasons": (reason,)}
    cells = [record("standard"), record("my.py:attend", **left_out), record("kvax", **left_out)]
    assert unmeasured(cells) == [f"my.py:attend is unsupported in 1 of 1 case: {reason}"]


PUBLISHED = Path(__file__).parents[2] / "reports" / "published"


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="a source distribution has no published pages")
@pytest.mark.parametrize(
    "name", ["cpu-amd-epyc", "cpu-amd-epyc-caller", pytest.param("cpu-amd-epyc-speed", marks=pytest.mark.thorough)]
)
def test_the_answer_fits_a_terminal_of_80_columns(name):
    run = load(PUBLISHED / name)
    header, *lines = answer_lines(run)
    assert header.split() == ["case", "use", "this", "time,", "x", "library" if "caller" in name else "standard"]
    rows = [line for line in lines if ": " not in line]
    assert max(map(len, [header, *rows])) <= 80
    unsure = [line for line in lines if line not in rows]
    assert all("no measurable difference to the next" in line for line in unsure)
    assert bool(unsure) == ("caller" in name)
