"""Results that cannot be written: one sentence, exit code 2, what was there before is there still."""

from __future__ import annotations

import dataclasses
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from attnsuite.suite import compile_run, files, layerwise_perplexity
from attnsuite.suite.compile.compilation import NO_COMPILER
from attnsuite.suite.errors import InputError
from attnsuite.suite.grid import execute
from attnsuite.suite.store import RunStore
from command import code_of


@pytest.fixture(autouse=True)
def no_bytecode(monkeypatch):
    """A module that is first imported under a limit would leave half of its bytecode to the next process."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")


@pytest.fixture
def small_files(monkeypatch):
    """A disk on which no file grows beyond 512 bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_file_that_cannot_be_written_whole_is_left_as_it_was(tmp_path, small_files):
    path = tmp_path / "file"
    files.write_text(path, "old")
    with pytest.raises(InputError, match=f"cannot write to {path}: File too large"):
        files.write_text(path, "x" * 513)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_report_that_cannot_be_written_leaves_the_old_one(run, refused, small_files):
    (run / "report.md").write_text("old")
    assert "report.md: File too large" in refused("report", run)
    assert (run / "report.md").read_text() == "old"
    assert not list(run.glob("*.partial"))


def test_record_that_cannot_be_written_is_a_sentence_and_the_others_are_kept(run, example_record, small_files):
    whole = (run / "records.jsonl").read_bytes()
    (run / "run.json").write_text("{}")
    other = dataclasses.replace(example_record, key="other")
    with RunStore(run, resume=True) as store, pytest.raises(InputError, match="What is done is kept"):
        store.append([other])
    assert (run / "records.jsonl").read_bytes().startswith(whole)


def test_records_that_are_gone_are_not_said_to_be_kept(run, example_record):
    (run / "run.json").write_text("{}")
    with RunStore(run, resume=True) as store:
        (run / "records.jsonl").unlink()
        with pytest.raises(InputError, match=r"records\.jsonl is gone, and the records that were in it are lost"):
            store.append([dataclasses.replace(example_record, requested="chunked", key="c/chunked/cpu/native")])
    assert not (run / "records.jsonl").exists()


def test_directory_that_is_gone_is_a_sentence(tmp_path, example_record, refused, monkeypatch):
    with RunStore(tmp_path / "run", resume=False) as store:
        (tmp_path / "run" / "lock").unlink()
        (tmp_path / "run").rmdir()
        with pytest.raises(InputError, match=r"No such file or directory\.$"):
            store.append([example_record])
        with pytest.raises(InputError, match="cannot write to"):
            files.write_json(store.directory / "run.json", {})
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    assert "the current directory was removed; change to one" in refused("report", "run")


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--suite", "quick", "--out", "{file}"],
        ["compile", "--targets", "v5e", "--out", "{file}"],
        ["run", "--suite", "sharded", "--out", "{file}"],
        ["run", "--suite", "curves", "--out", "{file}"],
        ["train", "--steps", "1", "--out", "{file}"],
        ["perplexity", "--model", "text", "--out", "{file}"],
        ["calibrate", "--out", "{file}/calibration.safetensors"],
        ["tune", "--out", "{file}/tuned"],
        ["tune", "--out", "{file}"],
        ["convert", "--input", "tiny", "--output", "{file}"],
    ],
    ids=" ".join,
)
def test_long_work_finds_out_at_the_start_that_it_cannot_write(tmp_path, refused, monkeypatch, arguments):
    def begins(*_, **__):
        raise AssertionError("the work began")

    monkeypatch.setattr(execute, "References", begins)  # of every grid, before its first cell
    monkeypatch.setattr(layerwise_perplexity, "streamed_nats", begins)
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_text("kept")
    folder.mkdir()
    refused(*(word.format(file=file, folder=folder) for word in arguments))
    assert file.read_text() == "kept"
    assert list(folder.iterdir()) == []


def compare(run, shell="", **streams):
    """``attnsuite compare`` of a run with itself, as a process, redirected by the ``shell``."""
    shown = ["/bin/sh", "-c", f'"$@" {shell}', "sh"]
    command = [*shown, sys.executable, "-P", "-m", "attnsuite", "compare", str(run), str(run)]
    there = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=there, stderr=subprocess.PIPE, text=True, timeout=120, check=False, **streams)
    return done.returncode, done.stderr


def test_full_disk_behind_stdout_is_a_sentence(run):
    with Path("/dev/full").open("w") as full:
        assert compare(run, stdout=full) == (2, "attnsuite: the output cannot be written: No space left on device.\n")


def test_reader_that_went_away_is_a_sentence(run):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert compare(run, stdout=writing) == (2, "attnsuite: stdout was closed before all of it was written.\n")
    finally:
        os.close(writing)


def test_no_stdout_at_all_is_no_traceback(run):
    assert compare(run, ">&-") == (0, "")


@pytest.mark.parametrize(("errors", "code"), [([NO_COMPILER, NO_COMPILER], 1), ([NO_COMPILER, None], 0)])
def test_compiling_nothing_for_want_of_a_compiler_is_no_success(
    tmp_path, capsys, monkeypatch, example_record, errors, code
):
    def compile_all(request, *_):
        with RunStore(request.out, resume=False) as store:
            for number, error in enumerate(errors):
                status = {"status": "ok"} if error is None else {"status": "unsupported", "error": error}
                fields = {"key": f"c/{number}/cpu/compile", "requested": str(number), "mode": "compile"}
                store.append([dataclasses.replace(example_record, **fields, **status)])
            return store.records

    monkeypatch.setattr(compile_run, "compile_all", compile_all)
    assert code_of("compile", "--targets", "v5e", "--out", tmp_path / "run") == code
    assert ("nothing was compiled, for want of a compiler" in capsys.readouterr().err) == bool(code)
