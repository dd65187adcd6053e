import dataclasses

import pytest

from attnsuite.reports import reading
from attnsuite.reports.cells import group
from attnsuite.reports.figures import reason_numbers

FAST, MIDDLE, SLOW = ([scale * (1 + 0.001 * i) for i in range(10)] for scale in (0.001, 0.01, 0.1))


def sentences(*records):
    return reading.fastest(group(records))


def test_fastest_is_exact_and_right(record):
    told = sentences(
        record(samples=tuple(SLOW)),
        record("kascade", exact=False, samples=tuple(FAST)),
        record("cudnn", status="wrong", samples=tuple(FAST)),
        record("splash", mode="interpret", samples=tuple(FAST)),
        record("unknown", exact=None, samples=tuple(FAST)),
        record("chunked", samples=tuple(MIDDLE)),
    )
    assert len(told) == 1
    assert "fastest exact is `chunked`" in told[0]


def test_case_with_only_approximate_speeds_says_so(record):
    (told,) = sentences(record(status="oom", samples=()), record("kascade", exact=False, samples=tuple(FAST)))
    assert "no exact backend has a speed here" in told


def test_ratio_is_taken_round_by_round(record):
    drift = [0.1 * 1.3**i for i in range(10)]  # the machine slows down by a factor of ten during the run
    standard = record(samples=tuple(drift))
    chunked = record("chunked", samples=tuple(0.5 * value for value in drift))
    speed = next(cell.speed for cell in group([standard, chunked])[0].cells if cell.label == "chunked")
    assert speed.ratio.value == pytest.approx(0.5)
    assert (speed.ratio.low, speed.ratio.high) == pytest.approx((0.5, 0.5))


def test_ratio_uses_the_rounds_that_both_have(record):
    standard = record(samples=tuple(SLOW[:7]))
    chunked = record("chunked", samples=tuple(MIDDLE))
    speed = next(cell.speed for cell in group([standard, chunked])[0].cells if cell.label == "chunked")
    assert speed.ratio.count == 7


def test_cells_of_different_sessions_share_no_rounds_and_have_no_ratio(record):
    here = {**record().environment, "session": "a"}
    standard = record(samples=tuple(SLOW), environment=here)
    chunked = record("chunked", samples=tuple(MIDDLE), environment={**here, "session": "b"})
    cells = group([standard, chunked])[0].cells
    assert all(cell.speed and cell.speed.ratio is None for cell in cells)
    assert "measured in another session" in sentences(standard, chunked)[0]


def test_interval_that_includes_one_is_no_measurable_difference(record):
    noise = (1.02, 0.97, 1.01, 0.99, 1.03, 0.98, 1.0, 0.985, 1.015, 0.995)
    (told,) = sentences(record(), record("chunked", samples=tuple(0.2 * value for value in noise)))
    assert "no measurable difference to `standard`" in told


def test_fewer_than_six_samples_give_no_interval(record):
    (told,) = sentences(record(samples=tuple(SLOW[:5])), record("chunked", samples=tuple(MIDDLE[:5])))
    assert "10.0 ms (5 samples, too few for an interval)" in told
    assert "[" not in told


def test_wrong_standard_is_no_baseline(record):
    (told,) = sentences(record(status="wrong"), record("chunked"))
    assert "standard has no speed in this case" in told


def test_fallback_stands_in_only_where_its_backend_has_no_cell_of_its_own(record):
    fallback = record("kvax", resolved="standard", mode="fallback", samples=tuple(FAST))
    (told,) = sentences(record(samples=tuple(SLOW)), fallback)
    assert "fastest exact is `standard`, 100" in told
    (told,) = sentences(fallback)
    assert "fastest exact is `standard (for kvax)`" in told


def test_temporary_memory_is_told_relative_to_standard(record):
    (told,) = sentences(record(), record("chunked", samples=tuple(MIDDLE), memory={"compiled_temp": 2**28}))
    assert "temporary memory 0.250 \u00d7 standard's" in told


def test_failures_are_counted_with_their_error(record):
    cells = [
        record("splash", case=f"c{i}", problem={"sequence": i + 1}, status="timeout", error="stopped", samples=())
        for i in range(2)
    ]
    assert reading.failed(group(cells)) == ["**timeout**, `splash` in 2 cases: stopped"]


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
    assert told[2].endswith("needs a TPU. *Outcome: `chunked` would run, and is a cell of its own (1 cell).*")


def test_headline_counts_wins_and_only_measurable_differences(record):
    steady = [1.0 + 0.001 * i for i in range(10)]
    cells = [
        record("standard", case="a", problem={"sequence": 1}, samples=tuple(steady)),
        record("chunked", case="a", problem={"sequence": 1}, samples=tuple(s / 4 for s in steady)),
        record("standard", case="b", problem={"sequence": 2}, samples=tuple(steady)),
        record("chunked", case="b", problem={"sequence": 2}, samples=tuple(steady[::-1])),
    ]
    told = reading.headline(group(cells))
    assert "in 1 of them measurably, at 0.250" in " ".join(told)
    assert "of 2 timed cases" in told[0]


def quality_pair(record, unigram=4.61, shift=0.01):
    values = tuple(1.4 + 0.01 * i for i in range(16))
    figures = {"bits_per_byte": 2.1, "unigram_bits_per_byte": unigram}
    kind = {"kind": "perplexity", "case": "text", "problem": {"model": "text", "sequence": 512}, "samples": ()}
    standard = record(quality=figures, series={"nll": values}, **kind)
    ours = {"nll": tuple(value + shift * (1 + 0.1 * (i % 3)) for i, value in enumerate(values))}
    return standard, record("kascade", exact=False, quality=figures, series=ours, **kind)


def test_loss_is_a_paired_difference(record):
    (told,) = reading.model_quality(group(quality_pair(record)))
    assert "`kascade` (approximate): mean nll differs from standard by 0.0109 [0.0106, 0.0114], 16 pairs." in told


def test_standard_series_of_the_same_cell_is_preferred(record):
    standard, kascade = quality_pair(record)
    own = {**kascade.series, "standard_nll": kascade.series["nll"]}
    (told,) = reading.model_quality(group([standard, dataclasses.replace(kascade, series=own)]))
    assert "no measurable difference to standard in mean nll" in told


def test_dense_model_no_better_than_unigram_is_invalid(record):
    (told,) = reading.model_quality(group(quality_pair(record, unigram=2.1)))
    assert "INVALID" in told
    assert "differs" not in told
