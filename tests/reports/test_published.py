"""The published pages are what their records say."""

import shutil
from pathlib import Path

import pytest

from attnsuite import reports
from attnsuite.reports import loss_curves, plot
from attnsuite.suite.loss_curves import CURVES, MANIFEST, read_training

pytestmark = pytest.mark.report

PUBLISHED = Path(__file__).parents[2] / "reports" / "published"
TRAINING = PUBLISHED / "training-cpu-intel-xeon"
PAGES = {
    "cpu-amd-epyc": (),
    "cpu-amd-epyc-speed": (),
    "cpu-intel-xeon": (),
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
    assert folders == {*PAGES, "compiled", "compiled-kascade", "compiled-v5e", "compiled-v5e-4x4"}


@pytest.mark.skipif(not plot.is_available(), reason="pictures need matplotlib, which is in the env report")
def test_page_of_loss_curves_is_rendered_again_the_same(tmp_path):
    for name in (CURVES, MANIFEST):
        shutil.copy(TRAINING / name, tmp_path)
    reports.render_curves(tmp_path)
    assert (tmp_path / loss_curves.PAGE).read_bytes() == (TRAINING / loss_curves.PAGE).read_bytes()
    assert (TRAINING / loss_curves.PICTURE).is_file()


def test_backends_are_ready_to_train_with_and_controls_are_found_out():
    training, curves = read_training(TRAINING)
    for setting in training.settings:
        found = loss_curves.verdicts([curve for curve in curves if curve.setting == setting.name])
        ready = {curve.name for curve, verdict in found if curve.role == "backend" and verdict.is_ready}
        assert ready == ({"chunked"} if setting.name == "native" else {"chunked", "splash", "kvax"})
        controls = [verdict for curve, verdict in found if curve.role == "control"]
        assert len(controls) == 3
        assert not any(verdict.is_ready for verdict in controls)
