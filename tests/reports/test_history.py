"""A store of runs, and the runs at which a level changed."""

import importlib.util
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
def store(tmp_path, record, write_run):
    """A store of twelve made-up runs: the machine drifts by 5%, and ``chunked`` is slower by 12% from run 7 on."""

    def make(planted=1.12, drift=0.05, count=12):
        rng = np.random.default_rng(0)
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
            history.add(tmp_path / "store", write_run(*cells, name=f"run-{number}"))
        return tmp_path / "store"

    return make


def test_first_bad_run_is_named_with_its_source_and_nothing_else_is(store):
    (machine,) = history.machines(store())
    text, (change,) = reports.history_page(history.entries(machine), 0.05)
    assert (change.series.backend, change.run) == ("chunked", 7)
    assert change.ratio == pytest.approx(1.12, abs=0.02)
    assert "2026-11-08T12:00:00" in text
    assert "source bad (revision r7)" in text


def test_unchanged_runs_change_no_level_although_the_machine_drifts(store):
    (machine,) = history.machines(store(planted=1.0))
    runs = history.entries(machine)
    assert [change for each in series(runs) if each.relative for change in changes(each)] == []
    assert reports.history_page(runs, 0.05)[1] == ()


def test_store_is_only_added_to_and_takes_a_run_once(store, record, write_run):
    kept = store(count=2)
    before = {path: path.read_bytes() for path in kept.rglob("records.jsonl")}
    assert len(before) == 2
    moved = (kept.parent / "run-0").rename(kept.parent / "moved")
    assert history.add(kept, moved) in {path.parent for path in before}
    elsewhere = {**record().environment, "cpu": "Another CPU"}
    history.add(kept, write_run(record(environment=elsewhere), name="elsewhere"))
    after = {path: path.read_bytes() for path in kept.rglob("records.jsonl")}
    assert before.items() < after.items()
    assert len(after) == 3
    assert len(history.machines(kept)) == 2


def test_directory_of_runs_is_no_store(write_run, record, tmp_path):
    write_run(record()).rename(tmp_path / "runs")
    with pytest.raises(InputError, match="holds no run; add one"):
        history.machines(tmp_path.parent)


def test_cells_of_two_machines_are_not_one_run(record, write_run, tmp_path):
    elsewhere = {**record().environment, "cores": 64}
    with pytest.raises(InputError, match="has cells of 2 machines"):
        history.add(tmp_path / "store", write_run(record(), record("chunked", environment=elsewhere)))
    assert not (tmp_path / "store").exists()


def test_command_line_adds_a_run_and_writes_the_page(record, write_run, tmp_path, capsys, monkeypatch):
    words = ["history", str(tmp_path / "store")]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "holds no run; add one with attnsuite history" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main([*words, "--add", str(write_run(record(), record("chunked")))])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    (page,) = (tmp_path / "store").rglob("history.md")
    assert page.read_text() in out
    assert "No cell changed its level." in out
    monkeypatch.setitem(sys.modules, "ruptures", None)
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "change points need ruptures; pip install '.[history]'" in capsys.readouterr().err
