"""calibrate, and run with Kascade's flags: what is written, and what is refused with exit code 2 and a sentence."""

from __future__ import annotations

import json

import pytest

from attnsuite.backends.kascade import greedy_by_loss, load_calibration
from attnsuite.suite.command_line import main
from attnsuite.suite.kinds.kascade import calibrate

SMALL = """
name = "kascade"

[[case]]
kind = "kascade_gate"
sequence = 256
sequences = 3
tile_size = 16
top_k = 0.3

[[case]]
kind = "kascade_prefill"
sequence = 256
layers = 1
anchors = 1
heads = 4
kv_heads = 2
head_dim = 16
tile_size = 32
"""


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_info:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert exit_info.value.code == 2
    assert "Traceback" not in captured.err
    return " ".join(captured.err.split())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--top-k", "0"], "top_k = 0.0 must be a number above 0"),
        (["--tile-size", "0"], "tile_size = 0 must be an integer from 1"),
        (["--schedule", "best"], "must be one of dp, greedy, greedy-guide"),
        (["--schedule", "manual"], "needs anchors, such as 0,2"),
        (["--schedule", "greedy", "--anchors", "2"], "no place in a greedy schedule"),
        (["--anchors", "one"], "must be one number of layers for schedule dp"),
        (["--threshold", "1.5"], "threshold = 1.5 must be a number from 0 to 1"),
        (
            ["--threshold", "0.5,0.7"],
            "several values of --threshold are a sweep of a greedy rule; add --schedule greedy",
        ),
        (["--max-reuse-dist", "2,4.5"], "--max-reuse-dist '2,4.5' must be whole numbers separated by commas"),
        (["--max-reuse-dist", "0"], "max_reuse_dist = 0 must be an integer from 1"),
        (["--granularity", "block"], "granularity = 'block' must be one of tile, token"),
        (["--suite", "quick", "--top-k", "0.5"], "no case of this suite is about Kascade"),
        (["--resume", "--out", "nowhere", "--top-k", "0.5"], "cannot change a run that was begun"),
        (["--backends", "oracle"], "'oracle' is not registered"),
    ],
)
def test_run_refuses(tmp_path, capsys, arguments, expected):
    where = [] if "--suite" in arguments else ["--suite", "kascade"]
    out = [] if "--out" in arguments else ["--out", tmp_path / "run"]
    assert expected in refused(capsys, "run", *where, *arguments, *out)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--out", "."], "--out . must end in .safetensors"),
        (["--model", "nowhere"], "--model 'nowhere' is not known; use text, or a checkpoint's directory"),
        (["--model", "tiny"], "a preset has no trained weights"),
        (["--text", "nowhere.txt"], "cannot be read"),
        (["--prompts", "0"], "--prompts 0 must be at least 1"),
        (["--prompts", "100000"], "fewer than the 100000 asked for"),
        (["--length", "1"], "fewer than the 8 asked for"),
        (["--top-k", "2"], "top_k=2.0 is not accepted"),
        (["--length", "32", "--prompts", "1"], "leaves no choice"),
        (["--schedule", "best"], "must be one of dp, greedy, greedy-guide"),
        (["--anchors", "9"], "must be one number from 1 to 4 for schedule dp"),
        (["--schedule", "greedy-loss", "--anchors", "9"], "must be one number from 1 to 4 for schedule greedy-loss"),
        (["--anchors", "0,x"], "must be a number of layers"),
        (["--schedule", "manual", "--anchors", "1"], "layer 0 must be one of them"),
        (["--schedule", "greedy", "--threshold", "2"], "--threshold 2 must be from 0 to 1"),
        (["--out", "nowhere/c.safetensors"], "does not exist; make it first"),
        (["--out", "c.npz"], "must end in .safetensors"),
        (["--random-tokens", "--text", "t.txt"], "--random-tokens takes the place of --text"),
    ],
)
def test_calibrate_refuses(tmp_path, monkeypatch, capsys, arguments, expected):
    monkeypatch.chdir(tmp_path)
    assert expected in refused(capsys, "calibrate", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_calibrate_writes_what_was_measured_and_prints_the_schedule(tmp_path, capsys, monkeypatch):
    out, asked = tmp_path / "c.safetensors", []

    def by_loss(model, prompts, calibration, anchors, *, progress):  # the search itself: tests/models/test_kascade.py
        asked.append((prompts.shape, anchors))
        return greedy_by_loss(calibration, anchors, lambda schedules: [-s.anchors[-1] for s in schedules])

    monkeypatch.setattr(calibrate, "schedule_by_loss", by_loss)
    with pytest.raises(SystemExit) as exit_info:
        main(["calibrate", "--out", str(out), "--prompts", "2", "--length", "96", "--schedule", "greedy-loss",
              "--anchors", "3"])  # fmt: skip
    assert exit_info.value.code == 0
    printed = capsys.readouterr().out
    assert "similarity" in printed
    assert "dense" in printed
    (use,) = [line for line in printed.splitlines() if line.startswith("to use it: ")]
    assert use == f"to use it: --calibration {out} --schedule manual --anchors 0,2,3"
    assert asked == [((2, 96), 3)]
    found = load_calibration(out)
    assert found.mass_similarity.shape == (4, 4, 2, 2)
    about = json.loads(out.with_suffix(".json").read_text())
    assert about["text"] == {"name": "pydoc_data.topics", "length": 96, "prompts": 2}
    assert about["settings"]["tile_size"] == 16


def test_small_run_ends_in_a_page_with_the_gate_and_the_speed(attnsuite, new_run, tmp_path):
    suite = tmp_path / "small.toml"
    suite.write_text(SMALL)
    rows = "dense,kascade,stale_indices,reuse_layer"  # of all controls: test_kascade.py
    code, out, err = attnsuite.finish(attnsuite.start("run", "--suite", suite, "--backends", rows, "--out", new_run))
    assert code == 0, err
    records = [json.loads(line) for line in (new_run / "records.jsonl").read_text().splitlines()]
    by_row = {(record["kind"], record["requested"]): record for record in records}
    assert {record["status"] for record in records} == {"ok"}, [r["error"] for r in records]
    assert by_row["kascade_gate", "kascade"]["quality"]["recall"] == 1.0
    assert by_row["kascade_gate", "kascade"]["exact"] is False
    assert by_row["kascade_gate", "dense"]["exact"] is True
    reuse = by_row["kascade_prefill", "reuse_layer"]
    assert len(reuse["samples"]) >= 6
    assert reuse["accuracy"]["out"]["passed"]
    page = (new_run / "report.md").read_text()
    assert "## The retrieval gate" in page
    assert "stale_indices" in page
    assert "## Speed of whole stacks" in page
    assert "recall" in out


class TestCalibrateAFunction:
    """Of somebody's own model a function of a prompt that gives queries and keys of each layer."""

    FILE = """
import jax

def layers_of(prompt):
    for layer in range(4):
        draw = jax.random.normal(jax.random.key(layer), (2, 256, 2, 8))
        yield draw[0][prompt, :1], draw[1][prompt, :1]
"""

    def test_writes_a_calibration_and_shows_a_schedule(self, tmp_path, capsys):
        (tmp_path / "mine.py").write_text(self.FILE)
        out = tmp_path / "c.safetensors"
        command = [
            "calibrate",
            "--model",
            f"{tmp_path}/mine.py:layers_of",
            "--out",
            out,
            "--prompts",
            2,
            "--length",
            256,
        ]
        with pytest.raises(SystemExit) as exit_info:
            main([*map(str, command), "--anchors", "2"])
        assert exit_info.value.code == 0
        assert "schedule dp, anchors 0, " in capsys.readouterr().out
        assert load_calibration(out).num_layers == 4

    @pytest.mark.parametrize(
        ("name", "flags", "sentence"),
        [
            ("absent", [], "absent in"),
            ("layers_of", ["--schedule", "greedy-loss"], "needs a model that can be run"),
            ("layers_of", ["--anchors", "9"], "must be one number from 1 to 4"),
        ],
    )
    def test_what_cannot_be_done_is_refused(self, tmp_path, capsys, name, flags, sentence):
        (tmp_path / "mine.py").write_text(self.FILE)
        where = ["--model", f"{tmp_path}/mine.py:{name}", "--out", tmp_path / "c", "--prompts", 1, "--length", 256]
        assert sentence in refused(capsys, "calibrate", *where, *flags)
