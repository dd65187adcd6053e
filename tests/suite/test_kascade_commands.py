"""calibrate, and run with Kascade's flags: what is written, and what is refused with exit code 2 and a sentence."""

from __future__ import annotations

import json

import pytest

from attnsuite.backends.kascade import greedy_by_loss, load_calibration
from attnsuite.suite.kinds.kascade import calibration_run
from command import code_of

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


def test_calibrate_writes_what_was_measured_and_prints_the_schedule(tmp_path, capsys, monkeypatch):
    out, asked = tmp_path / "c.safetensors", []

    def by_loss(model, prompts, calibration, anchors, *, progress):  # the search itself: tests/models/test_kascade.py
        asked.append((prompts.shape, anchors))
        return greedy_by_loss(calibration, anchors, lambda schedules: [-s.anchors[-1] for s in schedules])

    monkeypatch.setattr(calibration_run, "schedule_by_loss", by_loss)
    words = "calibrate --prompts 2 --length 96 --schedule greedy-loss --anchors 3"
    assert code_of(*words.split(), "--out", out) == 0
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


@pytest.mark.usefixtures("in_this_process")
def test_small_run_ends_in_a_page_with_the_gate_and_the_speed(new_run, tmp_path, capsys):
    suite = tmp_path / "small.toml"
    suite.write_text(SMALL)
    rows = "dense,kascade,stale_indices,reuse_layer"  # of all controls: test_kascade.py
    assert code_of("run", "--suite", suite, "--backends", rows, "--out", new_run, "--sample-seconds", "0.01") == 0
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
    assert "recall" in capsys.readouterr().out


MINE = """
import jax

def layers_of(prompt):
    for layer in range(4):
        draw = jax.random.normal(jax.random.key(layer), (2, 256, 2, 8))
        yield draw[0][prompt, :1], draw[1][prompt, :1]
"""


def test_a_function_that_gives_queries_and_keys_of_each_layer_is_calibrated(tmp_path, capsys, monkeypatch):
    """Of somebody's own model, whose file changes the directory."""
    (tmp_path / "mine.py").write_text(f"import os\n{MINE}\nos.chdir('/')\n")
    (tmp_path / "words.txt").write_text("some words of a text. " * 200)
    monkeypatch.chdir(tmp_path)
    words = "--model mine.py:layers_of --text words.txt --out c.safetensors --prompts 2 --length 256 --anchors 2"
    assert code_of("calibrate", *words.split()) == 0
    assert "schedule dp, anchors 0, " in capsys.readouterr().out
    assert load_calibration(tmp_path / "c.safetensors").num_layers == 4
