import pytest

from attnsuite import reports


def runs(write_run, first, second):
    return reports.compare(write_run(*first, name="a"), write_run(*second, name="b")).text


def scaled(cell, factor):
    return tuple(factor * sample for sample in cell.samples)


@pytest.mark.parametrize(
    ("factor", "reading", "count"),
    [
        *((2.0, "B slower", 10), (0.5, "B faster", 10), (1.0, "no measurable difference", 10)),
        (9.0, "too few samples", 5),
    ],
)
def test_interval_of_the_ratio_decides_the_reading(record, write_run, factor, reading, count):
    told = runs(write_run, [record()], [record(samples=scaled(record(), factor)[:count])])
    assert reading in told.split("## Speed")[1]


@pytest.mark.parametrize(
    ("sources", "told"),
    [
        (("0123", "4567"), "**Different source:** 0123 (0123abc; run A) and 4567 (89de; run B)."),
        (("0123", "0123"), "Same source in both runs (digest 0123)."),
        ((None, "0123"), "**Source not recorded** in run A: whether the code is the same is not known."),
        ((None, None), "**Source not recorded** in both runs"),
    ],
)
def test_source_is_compared_first_and_records_without_one_are_read(record, write_run, sources, told):
    made = []
    for source, revision in zip(sources, ("0123abc", "89de"), strict=True):
        facts = {**record().environment, "git_revision": revision} | ({"source": source} if source else {})
        made.append([record(environment=facts)])
    assert runs(write_run, *made).split("\n\n")[1].startswith(told)


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({}, "status, mode and what ran are the same in both"),
        ({"cpu": "Other CPU"}, "**Different devices:** Example CPU 9000, 2 cores (A) and Other CPU, 2 cores (B)."),
        ({"versions": {"jax": "0.12.0"}}, "**Different:** jax, jaxlib, python, numpy."),
        ({"flags": {"XLA_FLAGS": "--fast"}}, "**Different:** XLA_FLAGS. The ratios include"),
        ({"source_files": {"kernels.py:attend": "01"}}, "**Different:** digest of kernels.py:attend. The ratios"),
    ],
    ids=str,
)
def test_what_differs_in_the_environment_is_said_at_the_top(record, write_run, environment, told):
    facts = record().environment | environment
    compared = runs(write_run, [record()], [record(environment=facts)])
    assert told in (compared.split("## Speed")[0] if environment else compared)
    assert ("Different" in compared) is bool(environment)


@pytest.mark.parametrize(
    ("before", "told"),
    [(["standard", "chunked"], "1 cell of run A not in run B"), (["chunked"], "The runs share no cell")],
)
def test_cells_of_one_run_only_are_said(record, write_run, before, told):
    assert told in runs(write_run, [record(name) for name in before], [record()])


def test_wrong_cell_is_a_change_of_status_and_no_speed(record, write_run):
    wrong = record(status="wrong", error="out: outside", samples=(0.0123457,) * 10)
    told = runs(write_run, [record()], [wrong])
    assert "12.3" not in told
    assert "No cell has a speed in both runs." in told
    assert "out: outside" in told.split("## What ran")[1]


def test_cell_whose_name_means_another_problem_is_not_compared(record, write_run):
    """Decode cases of before ``kv_layout`` had today's names, and a cache with the heads before the slots."""
    other = record(problem={**record().problem, "kv_layout": "HND"}, samples=scaled(record(), 9.0))
    told = runs(write_run, [record(problem={**record().problem, "kv_layout": "NHD"})], [other])
    assert f"Not compared, since the name means another problem in run B: `{record().key}`." in told
    assert "slower" not in told
