import pytest

from attnsuite import reports


def test_file_without_a_whole_record_is_an_error(write_run):
    with pytest.raises(reports.ReportError, match="holds no whole record"):
        reports.render(write_run())


def test_cut_off_last_line_is_left_out_with_a_note(record, write_run):
    run = write_run(record())
    with (run / "records.jsonl").open("a", encoding="utf-8") as file:
        file.write(record("chunked").to_json()[:200])
    text = reports.render(run).read_text(encoding="utf-8")
    assert "The last line of records.jsonl is cut off or damaged and was left out." in text
    assert "1 cell: 1 ran natively." in text


def test_records_beyond_those_of_the_run_are_noted(record, write_run):
    run = write_run(record(), record("chunked"))
    (run / "run.json").write_text(
        '{"suite":"s","target":"cpu","versions":{},"source":"","git_revision":null,"flags":{},"cells":1}'
    )
    assert reports.load(run).notes == (
        "records.jsonl has 2 records, and run.json says 1 cell: some records are of another run.",
    )


def test_damaged_manifest_is_an_error(record, write_run):
    run = write_run(record())
    (run / "run.json").write_text("{", encoding="utf-8")
    with pytest.raises(reports.ReportError, match=r"run\.json is damaged .*it is not JSON.*; without this"):
        reports.render(run)
