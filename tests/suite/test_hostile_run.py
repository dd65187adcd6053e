"""A run directory may be somebody else's data: links, control characters, formulas, and what a killed run left."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from attnsuite.reports.data_files import to_csv
from attnsuite.reports.pages import measurements as page
from attnsuite.reports.read import Run
from attnsuite.suite.grid import folders
from attnsuite.suite.store import RunStore
from command import code_of

ESCAPE = "\x1b[2J\x1b]0;gone\x07\u202e\x9b31m"


def test_no_file_of_a_report_is_written_through_a_link(run, tmp_path):
    target = tmp_path / "target"
    target.write_text("mine")
    assert code_of("report", run) == 0
    names = [path.name for path in run.iterdir() if path.name not in ("records.jsonl", "run.json", "lock")]
    assert {"report.md", "report.html", "records.csv", "report.json"} <= set(names)
    for name in names:
        for link in (name, f"{name}.partial"):
            (run / link).unlink(missing_ok=True)
            (run / link).symlink_to(target)
    assert code_of("report", run) == 0
    assert target.read_text() == "mine"
    assert not (run / "report.md").is_symlink()


@pytest.mark.parametrize("name", ["records.jsonl", "lock"])
def test_a_run_is_not_resumed_through_a_link(run, tmp_path, capsys, name):
    """Its identity is of another run, too, and nothing is cut off before that is known."""
    (run / "run.json").write_text("{}")
    target = tmp_path / "target"
    target.write_text("not a record")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(target)
    assert code_of("run", "--resume", "--out", run, "--cases", "decode*") == 2
    assert target.read_text() == "not a record"
    assert capsys.readouterr().err.count("\n") == 1


def test_a_damaged_line_is_cut_off_only_when_the_run_is_known_to_be_the_same(run, tmp_path):
    (run / "run.json").write_text("{}")
    with (run / "records.jsonl").open("a") as file:
        file.write("half a li")
    with RunStore(run, resume=True) as store:
        assert store.warnings
    assert (run / "records.jsonl").read_text().endswith("half a li")


def test_what_controls_a_terminal_is_spelled(run, example_record, capsys):
    spoilt = dataclasses.replace(example_record, status="crashed", error=ESCAPE, notes=(ESCAPE,), reasons=(ESCAPE,))
    (run / "records.jsonl").write_text(json.dumps(dataclasses.asdict(spoilt)) + "\n")
    assert code_of("report", run) == 0
    assert code_of("compare", run, run) == 0
    assert code_of("run", "--suite", ESCAPE) == 2
    told = capsys.readouterr()
    pages = "".join(path.read_text() for path in run.iterdir() if path.name not in ("records.jsonl", "lock"))
    for text in (told.out, told.err, pages):
        assert not set(ESCAPE) & set(text) - set("[]2J0;gone31m")
    assert r"\x1b[2J" in told.err
    assert r"\x1b[2J" in pages


MANIFEST = {"suite": "s", "target": "", "versions": {}, "source": "", "git_revision": None, "flags": {}}


@pytest.mark.parametrize(
    ("verb", "changed", "sentence"),
    [
        ("compile", {"status": "unsupported", "reasons": ()}, ""),
        ("judge", {"kind": "conformance", "problem": {}}, "has a problem that attnsuite judge does not write: name is"),
        ("tune", {"kind": "tuning", "facts": {"tried": []}}, "holds no whole record"),
        ("tune", {"kind": "tuning", "facts": {"tried": [{"options": {}}]}, "requested": "splash", "mode": "compile",
                  "target": "tpu:v5p", "key": "c/splash/tpu:v5p/compile", "problem": {}},
         "kind = nothing is not a kind of case"),
    ],
)  # fmt: skip
def test_a_record_that_no_version_wrote_gives_a_page_or_a_sentence(
    run, example_record, capsys, verb, changed, sentence
):
    facts = {"gradients": True, "share": None} if verb == "judge" else None
    record = dataclasses.asdict(example_record) | {"facts": facts} | changed
    (run / "records.jsonl").write_text(json.dumps(record) + "\n")
    (run / "run.json").write_text(json.dumps(MANIFEST | {"verb": verb}))
    assert code_of("report", run) == (2 if sentence else 0)
    assert sentence in capsys.readouterr().err


def test_a_manifest_whose_cases_have_no_names_is_refused_where_runs_are_put_together(run, tmp_path, capsys):
    (run / "run.json").write_text(json.dumps(MANIFEST | {"cases": [{}], "cells": 1}))
    shutil.copytree(run, tmp_path / "other")
    assert code_of("report", run, tmp_path / "other", "--out", tmp_path / "whole") == 2
    assert "has a case without a name in run.json" in capsys.readouterr().err


def test_a_cell_of_a_csv_file_is_no_formula(example_record):
    text = '=HYPERLINK("http://example.org")'
    record = dataclasses.replace(example_record, status="crashed", error=text, reasons=("@SUM(1)",))
    pages = page.build(Run(records=(record,)))
    (row,) = csv.DictReader(to_csv(pages).splitlines())
    assert row["error"] == f"'{text}"
    assert row["reasons"] == "'@SUM(1)"


def test_what_a_killed_process_left_goes_at_the_next_start(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "import os, signal; from attnsuite.suite.grid import folders; made = folders.make(); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code], check=False, env={**os.environ, "TMPDIR": str(tmp_path)})
    (left,) = tmp_path.iterdir()
    gone = left.name.split("-")[1]
    assert not psutil.pid_exists(int(gone))
    (tmp_path / f"attnsuite-{gone}-link").symlink_to("/etc")
    (tmp_path / "attnsuite-notes").mkdir()
    with folders.make() as mine:
        folders.sweep()
        kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {Path(mine).name, f"attnsuite-{gone}-link", "attnsuite-notes"}


def test_a_folder_that_another_process_removes_meanwhile_ends_no_command(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (left := tmp_path / "attnsuite-1-left").mkdir()
    monkeypatch.setattr(psutil, "pid_exists", lambda _: left.rmdir())
    folders.sweep()
    assert not left.exists()
