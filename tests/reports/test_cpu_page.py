"""The pictures of the CPU page; its tables are on the published pages: ``test_published.py``."""

import pytest

from attnsuite import reports
from attnsuite.reports import plot
from attnsuite.reports.cells import group

pytestmark = pytest.mark.report

TIMES = tuple(0.1 + 0.001 * i for i in range(10))


@pytest.fixture
def over_lengths(record):
    """Forward cases at three lengths: the baseline and what is compared with it, as times relative to 0.1 s."""
    factors = {"standard": 1.0, "chunked": 0.4, "jax_nn": 1.2}
    return [
        record(
            name,
            suite="cpu-speed",
            case=f"s{length}",
            problem=record().problem | {"sequence": length},
            samples=tuple(factor * t for t in TIMES),
        )
        for length in (512, 1024, 2048)
        for name, factor in factors.items()
    ]


def test_picture_holds_a_line_per_backend_and_the_roof(over_lengths):
    (picture,) = plot.pictures(group(over_lengths))
    (panel,) = picture.panels
    assert [name for name, _ in panel.lines] == ["standard", "chunked", "jax_nn"]
    assert [length for length, _ in panel.lines[0][1]] == [512, 1024, 2048]
    assert panel.roof == 400.0
    assert picture.file == "speed-h8k8-d64.svg"


def test_two_lengths_are_no_line(over_lengths):
    assert plot.pictures(group([r for r in over_lengths if r.problem["sequence"] > 512])) == ()


def test_picture_is_drawn_the_same_each_time_and_shown_in_both_pages(over_lengths, write_run):
    reports.render(folder := write_run(*over_lengths))
    drawn = (folder / "speed-h8k8-d64.svg").read_bytes()
    reports.render(folder)
    assert (folder / "speed-h8k8-d64.svg").read_bytes() == drawn
    assert b"measured matmul rate" in drawn
    assert "![heads 8/8, D 64, causal](speed-h8k8-d64.svg)" in (folder / "report.md").read_text(encoding="utf-8")
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert 'src="data:image/svg+xml;base64,' in page
    assert "speed-h8k8-d64.svg" not in page
