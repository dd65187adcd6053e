"""Whatever a user gets wrong: exit code 2, one sentence on stderr, no traceback."""

from __future__ import annotations

import json

import pytest

from attnsuite.suite.suites import FULL, QUICK, find_suite

TINY = '[[case]]\nkind = "op_forward"\nsequence = 64\nname = "first"\n'


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        ("", "has no cases"),
        ("case = 3", "case = 3 must be a list"),
        ("[[case", "not valid TOML"),
        ("name = 3\n" + TINY, "name = 3 must be text or nothing"),
        ('peers = "torch"\n' + TINY, "peers = 'torch' must be a list"),
        ("all_cores = 2\n" + TINY, "must be true or false"),
        ("[[case]]\nsequence = 64", "not a kind of case"),
        ('[[case]]\nkind = "op_sideways"', "not a kind of case"),
        ('[[case]]\nkind = "op_forward"\nsequence = "long"', "sequence = 'long' must be an integer from 1"),
        ('[[case]]\nkind = "op_forward"\nsequence = true', "sequence = true must be an integer"),
        ('[[case]]\nkind = "op_forward"\nsequence = 64\ndtype = "int8"', "int8"),
        ('[[case]]\nkind = "op_forward"\nsequence = 64\nwindow_size = 0', "window_size"),
        ('[[case]]\nkind = "op_forward"\nsequence = 64\ndocuments = 65', "documents=65"),
        ('[[case]]\nkind = "op_forward"\nsequence = 64\nname = "a/b"', "cannot name a case"),
        ('[[case]]\nkind = "op_forward"\nsequence = 64\nseed = -1', "seed"),
        ('[[case]]\nkind = "model_prefill"\nbatch = 0', "batch"),
        ('[[case]]\nkind = "perplexity"\ndtype = "float64"', "float64"),
        (TINY + TINY, "two cases named first"),
        (f"{TINY}seed = {'9' * 5000}", "Exceeds the limit"),
        (f"{TINY}seed = 0x{'f' * 5000}", "seed = an integer of 20000 bits must be an integer from 0"),
        (f"{TINY}soft_cap = 1e400", "soft_cap = inf must be"),
        (f"{TINY}soft_cap = nan", "soft_cap = nan must be"),
        (f"{TINY}seed = 2026-01-01", "seed = datetime.date(2026, 1, 1) must be"),
        (f"{TINY}seed = {'[' * 2000}", "nested too deeply"),
        (f"{TINY}seed{'.a' * 2000} = 1", "seed = a table must be"),
    ],
)
def test_suite_file_is_refused(tmp_path, refused, toml, expected):
    path = tmp_path / "suite.toml"
    path.write_text(toml)
    assert expected in refused("run", "--suite", path, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "expected"), [(b"", "is empty"), (b" \n\n", "is empty"), (b"\xff\xfe", "not UTF-8")]
)
def test_text_is_refused(tmp_path, refused, content, expected):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    assert expected in refused("run", "--text", path, "--out", tmp_path / "run")


def test_field_of_a_text_is_refused_without_a_file_that_has_it(tmp_path, refused):
    path = tmp_path / "text.jsonl"
    path.write_text('{"id": "1", "body": "words"}\n')
    out = ("--out", tmp_path / "run")
    assert "fields id, body; name the one" in refused("run", "--text", path, *out)
    assert "no text in a field 'text'" in refused("run", "--text", path, "--text-field", "text", *out)
    for verb in (["run"], ["perplexity", "--model", "text"], ["calibrate"], ["train"]):
        assert "--text-field body is about a file of JSON lines" in refused(*verb, "--text-field", "body")


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ('kind = "model_prefill"\nmodel = "gigantic"', "model 'gigantic' is not known"),
        ('kind = "perplexity"\nmodel = "debug"', "windows of 512 bytes"),
    ],
)
def test_what_only_the_probe_can_know_is_refused_too(tmp_path, refused, case, expected):
    (tmp_path / "suite.toml").write_text(f"[[case]]\n{case}\n")
    (tmp_path / "text.txt").write_text("too short " * 200)
    flags = ["--suite", tmp_path / "suite.toml", "--text", tmp_path / "text.txt"]
    assert expected in refused("run", *flags, "--out", tmp_path / "run")
    assert not (tmp_path / "run" / "records.jsonl").exists()


def test_out_that_is_a_file_is_refused(tmp_path, refused):
    (tmp_path / "run").write_text("")
    assert "cannot write to" in refused("run", "--out", tmp_path / "run")


def test_manifest_of_another_version_is_refused(tmp_path, refused):
    (tmp_path / "run.json").write_text(json.dumps({"suite": "tiny"}))
    assert "another version" in refused("run", "--resume", "--out", tmp_path)


@pytest.mark.parametrize("suite", [QUICK, FULL], ids=lambda suite: suite.name)
def test_named_suites_are_found(suite):
    assert find_suite(suite.name) is suite
    assert len({case.name for case in suite.cases}) == len(suite.cases)
