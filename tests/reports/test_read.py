import pytest

from attnsuite import reports


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_directory_without_records_is_an_error_that_says_what_to_give(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(reports.ReportError, match=r"holds no records\.jsonl; give the directory"):
        reports.render(tmp_path / name)


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


def test_bad_line_in_the_middle_is_an_error_with_its_number(record, write_run):
    run = write_run(record(), record("chunked"))
    lines = (run / "records.jsonl").read_text(encoding="utf-8").splitlines()
    (run / "records.jsonl").write_text("\n".join([lines[0], "{broken", lines[1], ""]), encoding="utf-8")
    with pytest.raises(reports.ReportError, match="line 2 of"):
        reports.render(run)


def test_damaged_manifest_is_an_error(record, write_run):
    run = write_run(record())
    (run / "run.json").write_text("{", encoding="utf-8")
    with pytest.raises(reports.ReportError, match=r"run\.json is damaged .*it is not JSON.*; without this"):
        reports.render(run)
