"""What counts as a regression; the same on made-up runs of a machine that drifts."""

import dataclasses

import numpy as np
import pytest

from attnsuite.reports.regressions import parse_limits, regressions
from attnsuite.suite.errors import InputError
from attnsuite.suite.record import Schedule, TensorError
from command import code_of

SLOWER = parse_limits("slower:10%")


def by_key(*records):
    return {record.key: record for record in records}


def found(before, after, limits):
    return [(each.what, each.cell.split("/")[1]) for each in regressions(before, after, parse_limits(limits))]


def drifting(record, rng, *, planted=1.0, cases=2, drift=0.06, count=40):
    """A made-up run: the machine's pace drifts between runs and cases, and within a case from round to round.

    Some samples are disturbed and take longer, in one cell more than in another. The run measures the machine's rate at
    its pace, too.
    """
    made = []
    pace = np.exp(rng.normal(0, drift))
    rate = float(4e11 / pace * np.exp(rng.normal(0, 0.02)))
    facts = {**record().environment, "machine": {"matmul_flops": {"float32": rate}}}
    for case in range(cases):
        rounds = pace * np.exp(rng.normal(0, 0.02)) * np.exp(rng.normal(0, 0.03, count))
        for backend, seconds in {"standard": 0.2, "chunked": 0.1, "flash_cpu": 0.05}.items():
            own = planted if (backend, case) == ("chunked", 1) else 1.0
            disturbed = rng.exponential(0.3, count) * (rng.random(count) < rng.uniform(0, 0.7))
            noise = np.exp(rng.normal(0, 0.02, count)) * (1 + disturbed)
            samples = tuple((own * seconds * rounds * noise).tolist())
            made.append(record(backend, case=f"case-{case}", samples=samples, environment=facts))
    return by_key(*made)


def test_bundles_are_held_to_their_product_with_the_steps_of_the_grid(record):
    def scheduled(name, bundles, steps):
        counts = {"mxu_bundles": 1, "fills": 0, "spills": 0, "vector_bytes": 0}
        each = Schedule(kernel="attend.1", bundles=bundles, step_bundles=bundles, grid_steps=steps, **counts)
        return record(name, mode="compile", samples=(), schedules=(each, dataclasses.replace(each, grid_steps=8)))

    before = by_key(scheduled("splash", 100, 8), scheduled("kascade", 100, 8), scheduled("own", 100, 8))
    after = by_key(scheduled("splash", 106, 8), scheduled("kascade", 120, 4), scheduled("own", 500, None))
    assert found(before, after, "bundles:5%") == [("bundles", "splash")]
    assert found(before, after, "bundles:7%") == []


def test_planted_slowdown_is_found_and_an_unchanged_rerun_is_not_flagged(record):
    rng = np.random.default_rng(0)
    hits = alarms = naive = 0
    for _ in range(20):
        first, same, slow = (drifting(record, rng, planted=planted) for planted in (1.0, 1.0, 1.15))
        told = [each.cell for each in regressions(first, slow, SLOWER)]
        hits += any("case-1/chunked" in cell for cell in told)
        alarms += bool(regressions(first, same, SLOWER))
        naive += any(np.median(same[key].samples) > 1.1 * np.median(first[key].samples) for key in first)
    assert hits == 20
    assert alarms <= 1
    assert naive > 1  # medians alone would flag the drift: these runs can tell a rule from none


def scaled(records, factors):
    return {
        key: dataclasses.replace(each, samples=tuple(factors.get(each.requested, 1.0) * s for s in each.samples))
        for key, each in records.items()
    }


@pytest.mark.parametrize(
    ("factors", "told"),
    [
        ({"chunked": 1.15}, ["chunked"]),
        ({"standard": 1.15}, ["standard"]),
        ({"chunked": 1.15, "flash_cpu": 1.2}, ["chunked", "flash_cpu"]),
        ({"standard": 0.8}, []),  # nothing is slower because its control became faster
        ({"chunked": 1.08}, []),
        ({"chunked": 0.5}, []),
        ({"standard": 1.15, "chunked": 1.15, "flash_cpu": 1.15}, ["all cells"]),
    ],
    ids=str,
)
def test_cells_that_are_slower(record, factors, told):
    first = drifting(record, np.random.default_rng(1), cases=1)
    worse = regressions(first, scaled(first, factors), SLOWER)
    assert [each.cell.split("/")[1] if "/" in each.cell else each.cell for each in worse] == told


def test_noise_beyond_the_limit_is_no_regression_without_an_interval_above_one(record):
    wild = tuple(0.2 * factor for factor in (0.5, 1.6, 0.6, 1.5, 0.7, 1.4, 0.55, 1.7, 1.3, 1.25))
    first, second = by_key(record(samples=(0.2,) * 10)), by_key(record(samples=wild))
    assert np.median(wild) > 1.1 * 0.2
    assert regressions(first, second, SLOWER) == ()
    assert found(first, by_key(record(samples=(0.23,) * 10)), "slower:10%") == [("slower", "standard")]


def test_whole_run_is_not_slower_where_the_machine_is(record):
    first = drifting(record, np.random.default_rng(1), cases=1)
    facts = record().environment
    slow = {**facts, "machine": {"matmul_flops": {"float32": facts["machine"]["matmul_flops"]["float32"] / 1.3}}}
    every = scaled(first, dict.fromkeys(("standard", "chunked", "flash_cpu"), 1.3))
    assert [each.cell for each in regressions(first, every, SLOWER)] == ["all cells"]
    assert not regressions(first, {k: dataclasses.replace(each, environment=slow) for k, each in every.items()}, SLOWER)


def test_wrong_failed_and_memory(record):
    outside = {"out": TensorError(max_error=1.0, rms_error=None, standard_error=None, allowed=1e-6, passed=False)}
    ok = [record(name) for name in ("standard", "chunked", "flash_cpu", "splash", "kvax")]
    after = by_key(
        record("standard"),
        record("chunked", status="wrong", error="out: outside", accuracy=outside),
        record("flash_cpu", status="crashed", error="SIGSEGV", samples=()),
        record("kvax", memory={**record().memory, "compiled_temp": int(1.2 * 2**30)}),
    )
    worse = found(by_key(*ok), after, "wrong,failed,memory:10%")
    assert worse == [("wrong", "chunked"), ("failed", "flash_cpu"), ("failed", "splash"), ("memory", "kvax")]
    assert found(by_key(*ok), after, "memory:25%") == []
    assert found(after, after, "wrong,failed,memory:10%") == []  # what was wrong before is no regression


@pytest.mark.parametrize(
    "text", ["", "slow", "slower", "wrong:10%", "slower:10", "slower:-1%", "wrong,wrong", "wrong,"]
)
def test_other_words_are_refused(text):
    with pytest.raises(InputError, match="is not accepted; give each of wrong, failed, slower:P%, memory:P%"):
        parse_limits(text)


@pytest.mark.parametrize(
    ("fields", "limits", "sentence"),
    [
        ({"case": "another"}, "wrong", "share no cell"),
        ({"samples": ()}, "slower:10%", "no cell has a speed in both runs"),
        ({"samples": (5e-324,) * 10}, "slower:10%", "no cell has a speed in both runs"),
        ({"samples": (0.2,) * 5}, "slower:10%", "fewer than 6 samples"),
        ({"memory": {}}, "memory:10%", "no cell has its program's sizes"),
        ({}, "bundles:5%", "no cell has schedules in both runs; compile both with --schedule"),
    ],
)
def test_limit_with_nothing_to_hold_is_refused_and_never_passes(record, fields, limits, sentence):
    with pytest.raises(InputError, match=sentence):
        found(by_key(record()), by_key(record(**fields)), limits)


def test_command_line_exits_with_3_and_writes_githubs_summary(record, write_run, capsys, tmp_path, monkeypatch):
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    folders = {
        name: write_run(record(samples=(seconds,) * 10), name=name) for name, seconds in (("a", 0.2), ("b", 0.3))
    }
    for pair, code in ((("a", "b"), 3), (("b", "a"), 0)):
        assert code_of("compare", *(folders[name] for name in pair), "--fail-on", "wrong,slower:10%") == code
    out, err = capsys.readouterr()
    assert "slower: forward-s4096-h8k8-d64-f32/standard/cpu/native: its time 1.50" in err
    told = summary.read_text()
    held = "Held to wrong: 1 cell; slower by more than 10%: 1 cell."
    assert told.startswith(f"before\n# Run B against run A\n\n**1 regression.** {held}")
    assert f"**No regression.** {held}" in told
    assert (
        told.removeprefix("before\n").replace("\n\n# Run", "\n# Run").strip()
        == out.replace("\n\n# Run", "\n# Run").strip()
    )


def test_only_cells_with_a_figure_in_both_runs_count_as_held_to_a_limit(record):
    one, few, gone = (record(requested=name) for name in ("standard", "chunked", "flash_cpu"))
    after = by_key(one, dataclasses.replace(few, samples=(0.2,) * 5), dataclasses.replace(gone, status="oom"))
    limits = parse_limits("wrong,failed,slower:10%,memory:5%")
    assert limits.held(by_key(one, few, gone), after) == (
        "wrong: 3 cells; failed: 3 cells; slower by more than 10%: 1 cell; memory by more than 5%: 2 cells"
    )
