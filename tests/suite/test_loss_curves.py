"""Loss curves held to the standard backend's noise: real backends follow, wrong gradients are found out."""

from __future__ import annotations

import dataclasses
import math
from unittest import mock

import numpy as np
import pytest

from attnsuite import reports
from attnsuite.models import ModelConfig, Transformer
from attnsuite.reports import ReportError
from attnsuite.reports.pages.curves import page, verdicts
from attnsuite.suite.cell import Request
from attnsuite.suite.command_line import main
from attnsuite.suite.errors import InputError
from attnsuite.suite.grid.executors import here
from attnsuite.suite.grid.running import Limits, RunContext
from attnsuite.suite.kinds import loss_curve, training
from attnsuite.suite.kinds.loss_curve import (
    LOSS_CURVE,
    LossCurve,
    TrainingCase,
    judge,
    losses_of,
    own_runs,
    role_of,
    settings_of,
)
from attnsuite.suite.record import Record
from attnsuite.suite.store import RECORDS, parse_records
from command import code_of

CONFIG = ModelConfig.from_preset(
    "debug", hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2, num_kv_heads=1, max_length=256
)
CASE = TrainingCase(preset="nano", setting="interpreted", steps=4, batch=1, length=256)


def trained(case, *rows):
    """The records of these rows, of a small model."""
    environment = {"cpu": "a CPU", "git_revision": "abc", "versions": {"python": "3.11", "jax": "1", "optax": "2"}}
    limits = Limits(math.inf, 2**40)
    context = RunContext(suite="curves", limits=limits, environment=environment, text=None, watcher=mock.Mock())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "config_of", lambda _: CONFIG)
        return list(here(LOSS_CURVE.cells(case, Request(rows=rows, cases=(case,))), context))


@pytest.fixture(scope="module")
def curves():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_curve, "CONTROLS", {"dv 1% large": (1.0, 1.0, 1.01)})  # the subtlest of them
        # One device on the mesh here; eight in test_sharded_training.py.
        return trained(CASE, *own_runs(), "chunked", "splash", "cudnn", "standard@data=1")


def curve(case, role, name, losses, mode="native"):
    """A record of a curve that was made up."""
    return Record(
        key=f"{case.name}/{name}/cpu/{mode}",
        suite="curves",
        case=case.name,
        kind=case.kind,
        problem=dataclasses.asdict(case),
        requested=name,
        resolved=name,
        mode=mode,
        exact=True,
        target="cpu",
        status="ok",
        facts=LossCurve(role=role, losses=losses),
        started="2026-01-01",
    )


def test_backends_follow_standard_and_a_gradient_of_one_percent_too_much_does_not(curves):
    found = {record.requested: (record, verdict) for record, verdict in verdicts(curves)}
    assert found["chunked"][1].is_ready
    assert found["splash"][1].is_ready
    assert found["splash"][0].mode == "interpret"
    assert found["standard@data=1"][1].is_ready
    assert found["standard@data=1"][0].resolved == "standard@data=1"
    assert not found["dv 1% large"][1].is_ready
    # Held to the spread over batches, which is what "over seeds" is, it would pass.
    (standard,) = (losses_of(record) for record in curves if role_of(record) == "standard")
    others = [losses_of(record) for record in curves if role_of(record) == "batches"]
    assert judge(losses_of(found["dv 1% large"][0]), standard, others).is_ready


def test_a_mesh_of_more_devices_than_there_are_is_refused():
    with pytest.raises(InputError, match="--mesh heads=4096 needs 4096 devices; there are"):
        trained(CASE, "standard@heads=4096")


def test_noise_is_other_sums_of_the_same_loss(curves):
    (standard,) = (losses_of(record) for record in curves if role_of(record) == "standard")
    noise = np.array([losses_of(record) for record in curves if role_of(record) == "noise"])
    distance = np.abs(noise - standard)
    assert len(noise) == loss_curve.NOISE_RUNS
    assert 0 < distance.max() < 1e-4
    params = Transformer(CONFIG).arrays()
    moved = training.reordered(params, np.random.default_rng(1).permutation(32))
    for matrix in ("q_proj", "o_proj", "down_proj", "input_layernorm"):
        a, b = params["layers"][0][matrix], moved["layers"][0][matrix]
        assert a.shape == b.shape
        assert sorted(a.ravel().tolist()) == sorted(b.ravel().tolist())


def test_a_refused_backend_says_why_and_has_no_curve(curves):
    (refused,) = [record for record in curves if record.facts is None]
    assert (refused.requested, refused.status, refused.mode) == ("cudnn", "unsupported", None)
    assert refused.reasons


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
    assert all("not ready" not in rows[name] for name in ("`chunked`", "`splash`"))
    assert "| interpret |" in rows["`splash`"]
    assert rows["dv 1% large"].endswith("found out |")
    assert "refused" in rows["cudnn"]
    assert (tmp_path / "loss-curves.svg").exists()
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(tmp_path), str(tmp_path)])
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


def test_a_loss_that_is_not_finite_is_kept_and_shown(curves, tmp_path):
    write(tmp_path, [*curves, curve(CASE, "backend", "lost", (2.0, None, None, 1.0))])
    rows = reports.render(tmp_path).read_text().splitlines()
    assert next(row for row in rows if "`lost`" in row).endswith("| nan | inf (2) | **not ready** |")


def test_a_backend_that_raises_has_a_record_and_the_others_go_on(curves, tmp_path, monkeypatch):
    whole = training.losses

    def losses(case, run):
        if run.name == "standard":
            raise RuntimeError("no\nmemory")
        return whole(case, run)

    monkeypatch.setattr(training, "losses", losses)
    broken, chunked = trained(dataclasses.replace(CASE, name="", steps=1), "standard", "chunked")
    assert (broken.status, broken.error, broken.facts) == ("crashed", "RuntimeError: no memory", None)
    assert (chunked.requested, chunked.status, len(chunked.facts.losses)) == ("chunked", "ok", 1)
    write(tmp_path, [*curves, dataclasses.replace(broken, key="x", case=CASE.name, problem=dataclasses.asdict(CASE))])
    assert "| standard | crashed | | | | RuntimeError: no memory |" in reports.render(tmp_path).read_text()


def test_curves_that_cannot_be_read_are_a_sentence(curves, tmp_path):
    with pytest.raises(ReportError, match=r"holds no records\.jsonl"):
        reports.render(tmp_path)
    write(tmp_path, curves[1:])
    with pytest.raises(ReportError, match="lacks the standard backend's"):
        reports.render(tmp_path)
    write(tmp_path, [*curves, curve(CASE, "backend", "short", (1.0,))])
    with pytest.raises(ReportError, match="'short' has not the 4 losses"):
        reports.render(tmp_path)
    other = dataclasses.replace(curve(CASE, "backend", "other", (1.0,) * 4), problem={"steps": 4})
    write(tmp_path, [*curves, other])
    with pytest.raises(ReportError, match=r"other/cpu/native' trains otherwise than .*standard/cpu.*/native'"):
        reports.render(tmp_path)
    write(tmp_path, [other])
    with pytest.raises(ReportError, match=r"the problem of .* is no training: it lacks the key preset"):
        reports.render(tmp_path)
    (tmp_path / RECORDS).write_text('{"setting": "x"}\n' * 2)
    with pytest.raises(ReportError, match=r"line 1 of .* is not a record"):
        reports.render(tmp_path)


def test_curves_are_kept_as_they_end_and_resumed(tmp_path, monkeypatch, capsys):
    """An interrupted command has each finished curve once, and goes on with the others in the same words alone."""
    for name, value in (("CONTROLS", {}), ("NOISE_RUNS", 3), ("SEED_RUNS", 0)):
        monkeypatch.setattr(loss_curve, name, value)
    begun = []

    def losses(case, run):
        if len(begun) == 3:
            raise KeyboardInterrupt
        begun.append(run.name)
        return (2.0,) * case.steps

    def command(*words):
        with pytest.raises(SystemExit) as exit_info:
            main(
                [
                    "run",
                    "--suite",
                    "curves",
                    "--steps",
                    "2",
                    "--backends",
                    "standard",
                    "--out",
                    str(tmp_path / "out"),
                    *words,
                ]
            )
        return exit_info.value.code, "".join(capsys.readouterr())

    monkeypatch.setattr(training, "losses", losses)
    code, said = command()
    assert (code, "go on with: attnsuite run --suite curves --resume --out" in said) == (130, True)
    before = (tmp_path / "out" / RECORDS).read_bytes()
    assert before.count(b"\n") == 3
    code, said = command("--resume", "--interpreted-steps", "3")
    assert (code, '"interpreted_steps": 8' in said, "cannot be resumed" in said) == (2, True, True)
    begun[:] = [""] * 4
    assert command("--resume")[0] == 0
    assert (tmp_path / "out" / RECORDS).read_bytes().startswith(before)
    assert begun[4:] == [
        "standard, order 3",
        "standard",
        "standard, order 1",
        "standard, order 2",
        "standard, order 3",
    ]
