"""The trend over runs, and the runs at which a level changed."""

import dataclasses
import importlib.util
import sys

import numpy as np
import pytest

from attnsuite import reports
from attnsuite.reports import load
from attnsuite.reports.trend import by_machine, changes, series
from attnsuite.suite.errors import InputError
from command import code_of

# Not imported here: it takes two seconds, and every environment collects this file.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ruptures") is None, reason="needs the extra history; tox -e py313 has it"
)


@pytest.fixture
def runs(record, write_run):
    """Twelve made-up runs: the machine drifts by 5%, and ``chunked`` is slower by 12% from run 7 on."""

    def make(planted=1.12, drift=0.05, count=12):
        rng, made = np.random.default_rng(0), []
        for number in range(count):
            rounds = np.exp(rng.normal(0, drift)) * np.exp(rng.normal(0, 0.02, 10))
            source = {"source": "bad" if number >= 7 else "good", "git_revision": f"r{number}"}
            own = {"standard": 0.2, "chunked": 0.1 * (planted if number >= 7 else 1.0)}
            cells = [
                record(
                    backend,
                    samples=tuple((seconds * rounds * np.exp(rng.normal(0, 0.01, 10))).tolist()),
                    started=f"2026-11-{number + 1:02}T12:00:00+00:00",
                    environment={**record().environment, **source},
                )
                for backend, seconds in own.items()
            ]
            made.append(write_run(*cells, name=f"run-{number}"))
        return made

    return make


def test_first_bad_run_is_named_with_its_source_and_nothing_else_is(runs):
    (machine,) = by_machine(runs())
    text, (change,) = reports.trend_page(machine, 0.05)
    assert (change.series.backend, change.run) == ("chunked", 7)
    assert change.ratio == pytest.approx(1.12, abs=0.02)
    assert "2026-11-08T12:00:00" in text
    assert "source bad (revision r7)" in text


def test_unchanged_runs_change_no_level_although_the_machine_drifts(runs):
    (machine,) = by_machine(runs(planted=1.0))
    assert [change for each in series(machine) if each.relative for change in changes(each)] == []
    assert reports.trend_page(machine, 0.05)[1] == ()


def test_a_run_counts_once_and_machines_are_told_apart(runs, record, write_run):
    two = runs(count=2)
    copied = write_run(*load(two[0]).records, name="copied")
    elsewhere = {**record().environment, "cpu": "Another CPU"}
    other = write_run(record(environment=elsewhere), name="elsewhere")
    found = by_machine([*reversed(two), copied, other])
    assert [[run.directory for run in machine] for machine in found] == [[copied, two[1]], [other]]


def test_cells_of_two_machines_are_not_one_run(record, write_run):
    elsewhere = {**record().environment, "cores": 64}
    with pytest.raises(InputError, match="has cells of 2 machines"):
        by_machine([write_run(record(), record("chunked", environment=elsewhere))])


def test_the_same_name_of_another_problem_is_not_the_same_cell(runs, record, write_run):
    """Decode cells kept their name when their layout changed: the older ones leave the trend."""
    (machine,) = by_machine(runs(count=3))
    older = [dataclasses.replace(r, problem={**r.problem, "sequence": 7}) for r in machine[0].records]
    mixed = [dataclasses.replace(machine[0], records=tuple(older)), *machine[1:]]
    assert {each.runs for each in series(mixed)} == {(1, 2)}


def test_command_line_prints_the_page_of_each_machine(runs, capsys, monkeypatch, tmp_path):
    def compare(*words):
        return code_of("compare", *words), capsys.readouterr()

    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    made = runs()
    code, output = compare(*made, "--trend")
    assert code == 0
    assert "2026-11-08T12:00:00" in output.out
    assert (tmp_path / "summary.md").read_text() == output.out
    code, output = compare(*made, "--trend", "--share", "20")
    assert "No cell changed its level." in output.out
    monkeypatch.setitem(sys.modules, "ruptures", None)
    code, output = compare(*made, "--trend")
    assert code == 2
    assert "change points need ruptures; pip install '.[history]'" in output.err
