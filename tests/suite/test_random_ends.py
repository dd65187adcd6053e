"""Runs that end at a random moment, in an odd environment, or under a clock that goes backwards."""

from __future__ import annotations

import json
import os
import resource
import time
from pathlib import Path

import pytest

from attnsuite.suite.grid.running import Running
from attnsuite.suite.kinds.op_case import OpCase
from attnsuite.suite.store import RECORDS, parse_records
from command import cell_of
from script import python

TESTS = Path(__file__).parents[1]
TRIALS = int(os.environ.get("ATTNSUITE_FAULT_TRIALS", "3"))  # tests/faults.py asks for 200


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_run_that_ends_at_a_random_moment_loses_no_cell_and_doubles_none(name, record_property):
    done = python(TESTS / "random_ends.py", "--trials", TRIALS, "--signal", name, first=TESTS)
    assert done.returncode == 0, done.stderr
    tally = json.loads(done.stdout)
    record_property("trials", tally.pop("trials"))
    record_property("told", f"{tally.pop('with records')} of them between the first record and the last")
    assert not any(tally.values()), tally


@pytest.mark.thorough
def test_run_without_home_and_tmpdir_and_with_few_file_handles_is_whole(
    tiny, new_run, tmp_path, attnsuite, monkeypatch
):
    monkeypatch.delenv("HOME")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))  # the command inherits it
    try:
        flags = ("--suite", tiny, "--cases", "first", "--backends", "standard", "--out", new_run)
        process = attnsuite.start("run", *flags)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    code, _, err = attnsuite.finish(process)
    assert code == 0, err
    assert [record.status for record in parse_records(new_run / RECORDS)[0]] == ["ok"]


def test_clock_that_goes_backwards_changes_no_duration(monkeypatch):
    clock = iter(range(2_000_000_000, 0, -3600))
    monkeypatch.setattr(time, "time", lambda: next(clock))
    case = OpCase(kind="op_forward", sequence=8)
    running = Running(cell_of(case))
    with running.timed():
        time.sleep(1e-3)
    assert 1e-3 <= running.wall < 60
