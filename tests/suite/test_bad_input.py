"""Whatever a user gets wrong: exit code 2, one sentence on stderr, no traceback."""

from __future__ import annotations

import json

import pytest


def test_suite_file_is_refused(tmp_path, refused):
    path = tmp_path / "suite.toml"
    path.write_text("case = 3")
    assert "case = 3 must be a list" in refused("run", "--suite", path, "--out", tmp_path / "run")
    path.write_bytes(b"name = '\xff'")
    assert "is not UTF-8 (byte 8); save it as UTF-8." in refused("run", "--suite", path, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("words", ["report LINK", "compare LINK run", "convert --input=LINK", "run --model LINK"])
def test_link_that_leads_to_itself_is_refused(tmp_path, refused, words):
    link = tmp_path / "link"
    link.symlink_to(link)
    assert f"{link}: Too many levels of symbolic links; give another path." in refused(
        *words.replace("LINK", str(link)).split()
    )


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


def test_manifest_of_another_version_is_refused(tmp_path, refused):
    (tmp_path / "run.json").write_text(json.dumps({"suite": "tiny"}))
    assert "another version" in refused("run", "--resume", "--out", tmp_path)
