import csv
import dataclasses
import io
import json
import shutil
from html.parser import HTMLParser

import pytest

from attnsuite import reports
from attnsuite.suite.record import ProgramText, TensorError
from attnsuite.suite.store import Manifest, TextIdentity
from command import code_of

SECRET = 0.0123457  # seconds; shows up as 12.3 wherever a speed leaks
KVAX_REASON = "kvax: needs a CUDA device; this target is cpu."
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


def test_short_page_has_a_row_for_each_cell_that_ran_and_the_rest_is_in_details(record, write_run):
    interpreted = record("splash", mode="interpret")
    refused = record("cudnn", resolved=None, mode=None, status="unsupported", samples=(), reasons=("cudnn: no GPU.",))
    written = outputs(write_run(record(), record("chunked", status="timeout", error="stopped"), interpreted, refused))
    table = section(written["report.md"], "Speed, memory and accuracy")
    rows = [[cell.strip() for cell in line.split("|")[2:-1]] for line in table.splitlines() if line.startswith("|")]
    assert [(row[0], row[-1]) for row in rows[2:]] == [
        *(("standard", "\u2013"), ("chunked", "**timeout**"), ("splash", "interpret")),
    ]
    assert section(written["report.md"], "Did not run").strip() == "- `cudnn`: no GPU."
    for title in ("Accuracy", "Environment", "Requested and run"):
        assert f"\n## {title}\n" not in written["report.md"]
        assert f"\n## {title}\n" in written["details.md"]
        assert f">{title}</h2>" in written["report.html"]


def test_native_cell_shows_its_speed_everywhere(record, write_run):
    written = outputs(write_run(record(), record("chunked", samples=(SECRET,) * 10)))
    assert all("12.3" in written[name] for name in ("report.md", "report.html", "report.json"))
    assert "0.0123457" in written["records.csv"]


def test_wrong_cell_shows_its_error_and_no_memory(record, write_run):
    wrong = record("chunked", status="wrong", error="out: outside of what is allowed")
    written = outputs(write_run(record(), wrong))
    assert "out: outside of what is allowed" in section(written["details.md"], "Failed")
    assert "chunked" not in section(written["details.md"], "Memory")
    row = next(row for row in rows_of(written["records.csv"]) if row["requested"] == "chunked")
    assert row["compiled_temp_bytes"] == ""


def test_interpreted_cell_shows_accuracy_and_no_memory(record, write_run):
    text = outputs(write_run(record(), record("splash", mode="interpret")))["details.md"]
    assert "splash" in section(text, "Accuracy")
    assert "splash" not in section(text, "Memory")
    assert "splash" not in section(text, "Speed")


def test_fallback_goes_under_the_name_of_what_ran(record, write_run):
    fallback = record("kvax", resolved="chunked", mode="fallback", reasons=(KVAX_REASON,))
    written = outputs(write_run(record(), fallback))
    assert "chunked (for kvax)" in section(written["details.md"], "Speed")
    assert "| kvax" not in section(written["details.md"], "Speed")


def test_what_a_program_shows_stands_in_one_row(record, write_run):
    read = ProgramText(products={"bf16 x bf16 -> f32": 2, "kernel mine": 1}, score_arrays=3, copies=0)
    cells = [record(program=read, repeats=True), record("chunked", program=ProgramText(products={}), repeats=False)]
    written = outputs(write_run(*cells))
    (first, second) = json_table(written["report.json"], "programs")
    assert first["products"] == "bf16 x bf16 -> f32 (2), kernel mine (1)"
    assert (first["repeats"], first["score_arrays"], first["copies"]) == (True, 3, 0)
    assert (second["repeats"], second["products"], second["score_arrays"]) == (False, None, None)
    assert "## Programs" not in outputs(write_run(record(), name="older"))["report.md"]


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


def test_approximate_backend_says_so_and_is_not_judged(record, write_run):
    error = TensorError(max_error=0.03, rms_error=0.01, standard_error=4e-7, allowed=1e-6, passed=False)
    kascade = record("kascade", exact=False, accuracy={"out": error})
    written = outputs(write_run(record(), kascade))
    row = next(r for r in json_table(written["report.json"], "speed_op_forward") if r["backend"] == "kascade")
    assert row["exact"] is False
    judged = json_table(written["report.json"], "accuracy_op_forward")
    assert [r["verdict"] for r in judged] == ["within", "not judged: approximate"]


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


def test_record_notes_and_command_are_told(record, write_run):
    run = write_run(record(notes=("accuracy was judged at S=2048",)))
    (run / "run.json").write_text(json.dumps(dataclasses.asdict(MANIFEST)), encoding="utf-8")
    text = outputs(run)["details.md"]
    assert "causal: accuracy was judged at S=2048" in section(text, "Notes on cells")
    command = "    attnsuite run --suite 'my  suite.toml' --backends standard,chunked --cases a,b --tile-size 64\n"
    at = "The run does not hold `my suite.toml`; `cases` in `run.json` has the keys of every case."
    assert at in section(text, "Reproduce")
    assert command in section(text, "Reproduce")


def test_command_of_the_guides_run_names_suite_model_and_text(record, write_run):
    run = write_run(record())
    of = {
        "checkpoint": {"model": "DIR", "sequence": 512, "suite": "kascade-guide"},
        "text": TextIdentity(path="my.txt", sha256=""),
    }
    manifest = dataclasses.replace(MANIFEST, suite="kascade-guide", file=None, options={}, **of)
    (run / "run.json").write_text(json.dumps(dataclasses.asdict(manifest)), encoding="utf-8")
    command = (
        "    attnsuite run --suite kascade-guide --model DIR --seq-len 512 --backends standard,chunked --cases a,b "
        "--text my.txt\n"
    )
    assert command in section(outputs(run)["details.md"], "Reproduce")
