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


IN_A, IN_B = ({"environment": {"session": session}} for session in "ab")
STANDS_IN = {"resolved": "standard", "mode": "fallback", "samples": tuple(FAST)}


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (
            {"standard": {"status": "oom", "samples": ()}, "kascade": {"exact": False}},
            {"use": "None", "sure": "no exact backend has a speed here"},
        ),
        (
            {"standard": IN_A, "chunked": IN_B},
            {
                "time_over_standard": "standard was measured in another session",
                "sure": "the next was measured in another session",
            },
        ),
        (
            {"standard": {"samples": tuple(SLOW[:5])}, "chunked": {"samples": tuple(MIDDLE[:5])}},
            {"sure": "5 rounds: too few to tell", "others": "standard 10.0"},
        ),
        ({"chunked": {}}, {"time_over_standard": "None"}),
        (
            {"standard": {"status": "wrong"}, "chunked": {}},
            {"time_over_standard": "standard has no speed here", "sure": "nothing else that is exact was timed"},
        ),
        ({"standard": {"samples": tuple(SLOW)}, "kvax": STANDS_IN}, {"use": "standard", "median_ms": "100"}),
        ({"kvax": STANDS_IN}, {"use": "standard (for kvax)"}),
    ],
    ids="-".join,
)
def test_what_a_row_says_beside_what_published_pages_have(record, cells, expected):
    found = row(*(record(name, **fields) for name, fields in cells.items()))
    said = {key: str(found.get(key)) for key in expected}
    assert all(said[key].startswith(words) for key, words in expected.items()), said


def test_ratio_uses_the_rounds_that_both_have(record):
    (found,) = group([record(samples=tuple(SLOW[:7])), record("chunked", samples=tuple(MIDDLE))])
    assert [cell.speed.ratio.count for cell in found.cells if cell.label == "chunked"] == [7]


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
