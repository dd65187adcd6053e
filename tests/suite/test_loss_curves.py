"""Loss curves held to the standard backend's noise: real backends follow, wrong gradients are found out."""

from __future__ import annotations

import contextlib
import dataclasses
from unittest import mock

import numpy as np
import pytest

from attnsuite import reports
from attnsuite.models import ModelConfig, Transformer
from attnsuite.reports import ReportError
from attnsuite.reports.pages.curves import page, verdicts
from attnsuite.suite.cell import Request
from attnsuite.suite.errors import InputError
from attnsuite.suite.grid.executors import one_after_another, refused
from attnsuite.suite.grid.references import References
from attnsuite.suite.grid.running import Limits, Running
from attnsuite.suite.kinds import curve_training, loss_curve_case
from attnsuite.suite.kinds.loss_curve_case import (
    LossCurve,
    TrainingCase,
    judge,
    losses_of,
    role_of,
    run_of,
    settings_of,
)
from attnsuite.suite.kinds.loss_curve_kind import LOSS_CURVE
from attnsuite.suite.store import RECORDS, parse_records
from attnsuite.suite.suites import find_suite
from command import code_of, context_of, record_of
from landing import is_landing

CONFIG = ModelConfig.from_preset(
    "debug", hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2, num_kv_heads=1, max_length=256
)
INTERPRETED = () if is_landing() else ("splash",)
CASE = TrainingCase(preset="nano", setting="interpreted", steps=4, batch=1, length=256, mesh="data=1")


def context(**changes):
    """What the cells share."""
    environment = {"cpu": "a CPU", "git_revision": "abc", "versions": {"python": "3.11", "jax": "1", "optax": "2"}}
    return context_of(suite="curves", limits=Limits(600.0, 2**40), environment=environment, **changes)


def trained(case, *rows):
    """The records of these backends and of the standard's own runs, of a small model, trained in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curve_training, "config_of", lambda _: CONFIG)
        cells = LOSS_CURVE.cells(case, Request(rows=rows, cases=(case,)))
        return [
            Running(cell, outcome=LOSS_CURVE.prepare(cell, case, mock.Mock()).outcome).record(context())
            if cell.is_measured
            else refused(cell, "curves", {})
            for cell in cells
        ]


@pytest.fixture(scope="module")
def curves():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_curve_case, "CONTROLS", {"dv 1% large": (1.0, 1.0, 1.01)})  # the subtlest of them
        # One device on the mesh here; two below, eight in test_sharded_training.py.
        return trained(CASE, "chunked", *INTERPRETED, "cudnn")


def curve(case, role, name, losses, mode="native"):
    """A record of a curve that was made up."""
    return record_of(case, name, mode=mode, facts=LossCurve(role=role, losses=losses))


def test_backends_follow_standard_and_a_gradient_of_one_percent_too_much_does_not(curves):
    found = {record.requested: (record, verdict) for record, verdict in verdicts(curves)}
    assert found["chunked"][1].is_ready
    assert all(found[name][1].is_ready and found[name][0].mode == "interpret" for name in INTERPRETED)
    assert found["standard@data=1"][1].is_ready
    assert not found["dv 1% large"][1].is_ready
    # Held to the spread over batches, which is what "over seeds" is, it would pass.
    (standard,) = (losses_of(record) for record in curves if role_of(record) == "standard")
    others = [losses_of(record) for record in curves if role_of(record) == "batches"]
    assert judge(losses_of(found["dv 1% large"][0]), standard, others).is_ready


def test_a_mesh_of_more_devices_than_there_are_is_refused():
    with pytest.raises(InputError, match="mesh heads=4096 needs 4096 devices; there are"):
        curve_training.trained(dataclasses.replace(CASE, name="", preset="debug"), run_of("standard@heads=4096"))


def test_noise_is_other_sums_of_the_same_loss(curves):
    (standard,) = (losses_of(record) for record in curves if role_of(record) == "standard")
    noise = np.array([losses_of(record) for record in curves if role_of(record) == "noise"])
    distance = np.abs(noise - standard)
    assert len(noise) == loss_curve_case.NOISE_RUNS
    assert 0 < distance.max() < 1e-4
    params = Transformer(CONFIG).arrays()
    moved = curve_training.reordered(params, np.random.default_rng(1).permutation(32))
    for matrix in ("q_proj", "o_proj", "down_proj", "input_layernorm"):
        a, b = params["layers"][0][matrix], moved["layers"][0][matrix]
        assert a.shape == b.shape
        assert sorted(a.ravel().tolist()) == sorted(b.ravel().tolist())


def test_a_refused_backend_says_why_and_has_no_curve(curves):
    found = {record.requested: record for record in curves if record.facts is None}
    assert list(found) == [
        "cudnn",
        *(f"{name}@data=1" for name in (*INTERPRETED, "cudnn")),
    ]  # a mesh trains what runs natively
    assert {(record.status, record.mode, bool(record.reasons)) for record in found.values()} == {
        ("unsupported", None, True)
    }


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_not_near(loss):
    assert judge([1.0, loss], [1.0, 1.0], [[1.0, 2.0]]).ratio == float("inf")


def write(directory, curves):
    (directory / RECORDS).write_text("".join(f"{record.to_json()}\n" for record in curves))


def test_the_page_says_who_is_ready_and_is_a_function_of_the_curves(curves, tmp_path, capsys):
    write(tmp_path, curves)
    assert list(parse_records(tmp_path / RECORDS)[0]) == curves
    assert code_of("report", tmp_path) == 0
    assert str(tmp_path / "report.md") in capsys.readouterr().out
    text = (tmp_path / "report.md").read_text()
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("|")}
    assert all("not ready" not in rows[name] for name in ("`chunked`", *(f"`{name}`" for name in INTERPRETED)))
    assert all("| interpret |" in rows[f"`{name}`"] for name in INTERPRETED)
    assert rows["dv 1% large"].endswith("found out |")
    assert "refused" in rows["cudnn"]
    assert (tmp_path / "loss-curves.svg").exists()
    (tmp_path / "other").mkdir()
    write(tmp_path / "other", curves)
    assert code_of("report", tmp_path, tmp_path / "other") == 2
    assert "holds records of kind 'loss curve', whose page stands alone; give it by itself." in capsys.readouterr().err
    before = (tmp_path / "report.md").read_bytes()
    reports.render(tmp_path)
    assert (tmp_path / "report.md").read_bytes() == before


def test_a_blind_test_and_a_bad_backend_are_called_so():
    case = TrainingCase(preset="nano", setting="s", steps=2, batch=1, length=8)
    curves = [
        curve(case, "standard", "standard", (2.0, 1.0)),
        curve(case, "noise", "order 1", (2.0, 1.25)),
        curve(case, "noise", "order 2", (2.0, 0.875)),
        curve(case, "control", "weak", (2.0, 1.125)),
        curve(case, "backend", "same", (2.0, 1.0)),
        curve(case, "backend", "bad", (2.0, 1.75)),
    ]
    text = page(settings_of(curves))
    assert "**passes: the test is blind**" in text
    assert "| **not ready** |" in text
    assert "| **equals standard in every bit: shows nothing** |" in text


def test_a_curve_that_is_not_finite_or_crashed_has_a_row_that_says_so(curves, tmp_path):
    infinite = curve(CASE, "backend", "infinite", (2.0, None, None, 1.0))
    fields = {"status": "crashed", "error": "RuntimeError: no memory", "facts": None}
    write(tmp_path, [*curves, infinite, dataclasses.replace(curve(CASE, "backend", "lost", ()), **fields)])
    text = reports.render(tmp_path).read_text()
    assert next(row for row in text.splitlines() if "`infinite`" in row).endswith("| nan | inf (2) | **not ready** |")
    assert "| lost | crashed | | | | RuntimeError: no memory |" in text


@pytest.mark.thorough
def test_mesh_of_a_case_is_made_in_a_process_beside_the_others():
    """On two devices the losses are those of one; a row that the mesh cannot divide says so."""
    case = TrainingCase(preset="debug", setting="native", steps=2, batch=1, length=32, mesh="heads=2")
    cells = {cell.row: cell for cell in LOSS_CURVE.cells(case, Request(rows=(), cases=(case,)))}
    alone, divided = cells["standard"], cells["standard@heads=2"]
    assert (alone.devices, divided.devices) == (1, 2)
    thirds = dataclasses.replace(case, name="", mesh="context=3")
    (other,) = [cell for cell in LOSS_CURVE.cells(thirds, Request(rows=(), cases=(thirds,))) if "@" in cell.row]
    with contextlib.closing(References(60.0)) as references:
        one, two, three = one_after_another((alone, divided, other), context(references=references))
    assert len(two.facts.losses) == 2
    assert np.allclose(losses_of(one), losses_of(two), atol=1e-4)
    assert three.status == "unsupported"
    assert "cannot train this" in three.reasons[0]


def test_suite_names_the_backends_of_its_rows():
    suite = find_suite("curves")
    assert suite.default_backends() == ("chunked", "splash", "kvax")
    assert [(case.setting, case.steps) for case in suite.cases] == [("native", 60), ("interpreted", 8)]
    assert LOSS_CURVE.patience(CASE) == CASE.steps  # the limit of time is that of an update


def test_curves_that_cannot_be_read_are_a_sentence(curves, tmp_path):
    write(tmp_path, curves[1:])
    with pytest.raises(ReportError, match="lacks the standard backend's"):
        reports.render(tmp_path)
    write(tmp_path, [*curves, curve(CASE, "backend", "short", (1.0,))])
    with pytest.raises(ReportError, match="'short' has not the 4 losses"):
        reports.render(tmp_path)
    write(tmp_path, [dataclasses.replace(curve(CASE, "backend", "other", (1.0,) * 4), problem={"steps": 4})])
    with pytest.raises(ReportError, match=r"the problem of .* is no training: it lacks the key preset"):
        reports.render(tmp_path)
