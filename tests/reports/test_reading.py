import dataclasses

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
