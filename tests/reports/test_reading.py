"""What is read of a run directory, and the sentences of a page that no published page has."""

import dataclasses

import pytest

from attnsuite import reports
from attnsuite.reports import reading
from attnsuite.reports.cells import group
from attnsuite.reports.figures import reason_numbers


def test_failures_stand_with_their_error_and_up_to_three_cases_by_name(record):
    cells = [
        record("splash", case=f"c{i}", problem={"sequence": i + 1}, status="timeout", error="stopped", samples=())
        for i in range(4)
    ]
    assert reading.failed(group(cells)) == ["**timeout**, `splash` in 4 cases: stopped"]
    found = reading.failed(group(cells[:2]))
    assert found == ["**timeout**, `splash` in forward, T 1, S 1; in forward, T 2, S 2: stopped"]


def test_refusal_says_what_ran_instead(record):
    fallback = record("kvax", resolved="chunked", mode="fallback", reasons=("kvax: needs CUDA.",))
    refused = record("cudnn", resolved=None, mode=None, status="unsupported", reasons=("needs CUDA.",), samples=())
    covered = record(
        "splash", resolved="chunked", mode=None, status="unsupported", reasons=("splash: needs a TPU.",), samples=()
    )
    groups = group([fallback, refused, covered])
    told = reading.refused(groups, reason_numbers([fallback, refused, covered]))
    assert told[0].endswith("needs CUDA. *Outcome: `chunked` ran, mode fallback (1 cell).*")
    assert told[1].endswith("needs CUDA. *Outcome: nothing can run (1 cell).*")
    assert told[2].endswith("needs a TPU. *Outcome: `chunked` would run (1 cell).*")


def quality_pair(record):
    values = tuple(1.4 + 0.01 * i for i in range(16))
    figures = {"bits_per_byte": 2.1, "unigram_bits_per_byte": 4.61}
    kind = {"kind": "perplexity", "case": "text", "problem": {"model": "text", "sequence": 512}, "samples": ()}
    standard = record(quality=figures, series={"nll": values}, **kind)
    ours = {"nll": tuple(value + 0.01 * (1 + 0.1 * (i % 3)) for i, value in enumerate(values))}
    return standard, record("kascade", exact=False, quality=figures, series=ours, **kind)


def test_loss_is_a_paired_difference(record):
    (told,) = reading.model_quality(group(quality_pair(record)))
    assert "`kascade` (approximate): mean nll differs from standard by 0.0109 [0.0106, 0.0114], 16 pairs." in told


def test_standard_series_of_the_same_cell_is_preferred(record):
    standard, kascade = quality_pair(record)
    own = {**kascade.series, "standard_nll": kascade.series["nll"]}
    (told,) = reading.model_quality(group([standard, dataclasses.replace(kascade, series=own)]))
    assert "no measurable difference to standard in mean nll" in told


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
