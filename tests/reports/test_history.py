"""Many runs of a machine, and the runs at which a level changed."""

import importlib.util
import shutil
import sys

import numpy as np
import pytest

from attnsuite import reports
from attnsuite.reports.history import changes, series
from attnsuite.suite import history
from attnsuite.suite.command_line import main
from attnsuite.suite.errors import InputError

# Not imported here: it takes two seconds, and every environment collects this file.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ruptures") is None, reason="needs the extra history; tox -e py313 has it"
)


@pytest.fixture
def store(record, write_run):
    """Directories of twelve made-up runs: the machine drifts by 5%, and ``chunked`` is slower by 12% from run 7 on."""

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


def test_first_bad_run_is_named_with_its_source_and_nothing_else_is(store):
    (runs,) = history.machines(store())
    text, (change,) = reports.history_page(runs, 0.05)
    assert (change.series.backend, change.run) == ("chunked", 7)
    assert change.ratio == pytest.approx(1.12, abs=0.02)
    assert "2026-11-08T12:00:00" in text
    assert "source bad (revision r7)" in text


def test_unchanged_runs_change_no_level_although_the_machine_drifts(store):
    (runs,) = history.machines(store(planted=1.0))
    assert [change for each in series(runs) if each.relative for change in changes(each)] == []
    assert reports.history_page(runs, 0.05)[1] == ()


def test_run_counts_once_by_date_under_its_machine(store, record, write_run, tmp_path):
    first, second = store(count=2)
    copy = shutil.copytree(first, tmp_path / "copy")
    other = write_run(record(environment={**record().environment, "cpu": "Another CPU"}), name="elsewhere")
    found = history.machines([second, other, first, copy])
    assert sorted([entry.directory for entry in entries] for entries in found) == sorted([[first, second], [other]])


def test_what_is_no_run_of_one_machine_is_a_sentence(record, write_run, tmp_path):
    with pytest.raises(InputError, match=r"holds no records\.jsonl"):
        history.machines([tmp_path])
    elsewhere = {**record().environment, "cores": 64}
    with pytest.raises(InputError, match="has cells of 2 machines"):
        history.machines([write_run(record(), record("chunked", environment=elsewhere))])


def test_compare_shows_the_trend_of_runs(record, write_run, capsys, monkeypatch):
    words = ["compare", str(write_run(record(), record("chunked"))), "--trend"]

    def command(*more):
        with pytest.raises(SystemExit) as ended:
            main([*words, *more])
        return ended.value.code, "".join(capsys.readouterr())

    code, told = command()
    assert (code, "No cell changed its level." in told) == (0, True)
    assert command("--share", "0") == (2, "attnsuite: --share 0 must be above 0 and at most 1000 percent.\n")
    assert command("--fail-on", "wrong")[0] == 2
    monkeypatch.setitem(sys.modules, "ruptures", None)
    code, told = command()
    assert (code, "change points need ruptures; pip install '.[history]'" in told) == (2, True)
