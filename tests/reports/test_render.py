import csv
import dataclasses
import io
import json
import shutil
from html.parser import HTMLParser

import pytest

from attnsuite import reports
from attnsuite.suite.store import Manifest
from command import code_of

SECRET = 0.0123457  # seconds; shows up as 12.3 wherever a speed leaks
FILES = ("report.md", "details.md", "report.html", "records.csv", "report.json")


def outputs(folder):
    reports.render(folder)
    return {name: (folder / name).read_text(encoding="utf-8") for name in FILES}


def rows_of(text):
    return list(csv.DictReader(io.StringIO(text)))


def section(markdown, title):
    return markdown.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def json_table(text, key):
    tables = [t for page in json.loads(text)["pages"] for part in page["sections"] for t in part["tables"]]
    return next((t["rows"] for t in tables if t["key"] == key), [])


@pytest.mark.parametrize(
    "fields",
    [
        {"status": "wrong", "error": "out: outside of what is allowed"},
        {"mode": "interpret"},
        {"mode": "compile"},
        {"status": "timeout", "error": "stopped"},
    ],
    ids=["wrong", "interpret", "compile", "timeout"],
)
def test_cell_without_a_right_native_result_shows_no_speed_anywhere(record, write_run, fields):
    hidden = record("chunked", samples=(SECRET,) * 10, compile_seconds=12.3123, **fields)
    written = outputs(write_run(record(), hidden))
    for name, text in written.items():
        assert "12.3" not in text, name
        assert "0.0123" not in text, name
    row = next(row for row in rows_of(written["records.csv"]) if row["requested"] == "chunked")
    speed = ("samples", "median_seconds", "time_over_standard", "flops_per_second", "compile_seconds")
    assert [row[name] for name in speed] == [""] * len(speed)
    assert [row["backend"] for row in json_table(written["report.json"], "speed_op_forward")] == ["standard"]
    memory = section(written["details.md"], "Memory")
    if fields != {"mode": "compile"}:
        assert "chunked" not in memory
        assert row["compiled_temp_bytes"] == ""
    assert fields.get("error", "") in written["details.md"]


def test_the_control_shows_its_speed_everywhere(record, write_run):
    """As what ran, not as what was asked for."""
    fallback = record("kvax", resolved="chunked", mode="fallback", samples=(SECRET,) * 10)
    written = outputs(write_run(record(), fallback))
    assert all("12.3" in written[name] for name in ("report.md", "report.html", "report.json"))
    assert "0.0123457" in written["records.csv"]
    assert "chunked (for kvax)" in section(written["details.md"], "Speed")


def test_same_bytes_twice(record, write_run):
    cells = [record(), record("chunked"), record("kascade", exact=False), record("splash", mode="interpret")]
    first = outputs(write_run(*cells, name="a"))
    second = outputs(write_run(*reversed(cells), name="b"))
    assert first == second


def test_pipe_newline_and_html_in_foreign_text_stay_text(record, write_run):
    evil = "needs a | b\nand <script>alert(1)</script> `tick` *star* [link](http://example.com)"
    odd = record("kvax", resolved=None, mode=None, status="unsupported", reasons=(evil,), error=evil, samples=())
    written = outputs(write_run(record(), odd))
    table = [line for line in section(written["details.md"], "Requested and run").splitlines() if line.startswith("|")]
    bars = {line.replace("\\|", "").count("|") for line in table}
    assert len(bars) == 1
    assert "<script>alert" not in written["report.html"]
    assert "needs a | b and &lt;script&gt;alert(1)&lt;/script&gt; `tick` *star* [link]" in written["report.html"]
    assert 'href="http' not in written["report.html"]


def test_page_fetches_nothing_and_closes_its_tags(record, write_run):
    page = outputs(write_run(record(), record("chunked")))["report.html"]

    class Checker(HTMLParser):
        open_tags: list[str] = []  # noqa: RUF012
        seen: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag, attrs):
            assert tag not in {"link", "iframe"}
            assert tag != "script" or (not attrs and "body" in self.open_tags and "script" not in self.seen)
            self.seen.append(tag)
            assert "onclick" not in dict(attrs)
            assert dict(attrs).get("src", "data:").startswith("data:")
            if tag not in {"meta", "br", "hr"}:
                self.open_tags.append(tag)

        def handle_endtag(self, tag):
            assert self.open_tags.pop() == tag

    checker = Checker()
    checker.feed(page)
    assert checker.open_tags == []
    assert "http" not in page.replace('http-equiv="', "")


def test_files_go_to_the_folder_that_was_named(record, write_run, tmp_path):
    run = write_run(record())
    path = reports.render(run, out=tmp_path / "out" / "page")
    assert path == tmp_path / "out" / "page" / "report.md"
    assert sorted(p.name for p in path.parent.iterdir()) == sorted(FILES)
    assert [p.name for p in run.iterdir()] == ["records.jsonl"]


def test_several_runs_make_one_page(record, write_run, tmp_path, capsys):
    first = write_run(record())
    second = tmp_path / "second"
    second.mkdir()
    shutil.copy(first / "records.jsonl", second)
    command = ("attnsuite", "compile")
    manifest = dataclasses.replace(MANIFEST, verb="compile", targets=("tpu:v5e",), command=command)
    (second / "run.json").write_text(json.dumps(dataclasses.asdict(manifest)))
    assert code_of("report", first, second) == 0
    text = (first / "report.md").read_text(encoding="utf-8")
    assert [line.partition(",")[0] for line in text.splitlines() if line.startswith("# ")] == [
        "# Attention on Example CPU 9000",
        "# Compiled for 1 device that is not here",
    ]
    assert "attnsuite run --suite" in text
    assert "attnsuite compile" in text
    assert [p.name for p in second.iterdir() if p.suffix == ".md"] == []
    assert f"records: {second / 'records.jsonl'}" in capsys.readouterr().out


def test_each_device_has_its_page(record, write_run):
    other = record("chunked", environment={"device_kind": "NVIDIA H200", "device_count": 2})
    data = json.loads(outputs(write_run(record(), other))["report.json"])
    assert [page["device"] for page in data["pages"]] == ["2 \u00d7 NVIDIA H200", "Example CPU 9000, 2 cores"]


MANIFEST = Manifest(
    suite="its name",
    file="my  suite.toml",
    cases=({"name": "a"}, {"name": "b"}),
    backends=("standard", "chunked"),
    versions={},
    source="",
    git_revision=None,
    target="cpu",
    flags={},
    options={"tile_size": 64},
)
