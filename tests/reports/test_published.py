"""The published pages are what their records say."""

from pathlib import Path

import pytest

import reports
from reports import plot

PUBLISHED = Path(__file__).parents[2] / "reports" / "published"
PAGES = {
    "cpu-amd-epyc": (),
    "cpu-amd-epyc-speed": (),
    "cpu-intel-xeon-speed": (),
    "cpu-intel-xeon-kascade": ("compiled-kascade",),
}


@pytest.mark.skipif(not plot.is_available(), reason="pictures need matplotlib, which is in the env report")
@pytest.mark.parametrize("name", PAGES)
def test_page_is_rendered_again_the_same(name, tmp_path):
    reports.render(PUBLISHED / name, *(PUBLISHED / other for other in PAGES[name]), out=tmp_path)
    fresh = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert fresh == (PUBLISHED / name / "report.md").read_text(encoding="utf-8")
    assert {p.name for p in tmp_path.glob("*.svg")} == {p.name for p in (PUBLISHED / name).glob("*.svg")}


def test_every_folder_with_records_has_its_page():
    folders = {path.parent.name for path in PUBLISHED.glob("*/records.jsonl")}
    assert folders == {*PAGES, *(other for others in PAGES.values() for other in others), "compiled"}
