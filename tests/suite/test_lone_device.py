"""A device that admits one process, as a TPU does: no two processes touch it, and a fault costs one case."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from attnsuite.suite.measure import memory
from attnsuite.suite.store import RECORDS, parse_records

HERE = Path(__file__).parent
SUITE = """
[[case]]
kind = "op_forward"
sequence = 64
heads = 2
kv_heads = 2
[[case]]
kind = "op_forward_backward"
sequence = 64
heads = 2
kv_heads = 2
"""


def run(tmp_path, fault="", timeout=60, before=""):
    path = tmp_path / "path"
    path.mkdir()
    shutil.copy(HERE / "lone_device.py", path / "sitecustomize.py")
    (tmp_path / "suite.toml").write_text(SUITE)
    given = {"PYTHONPATH": str(path), "LONE_DEVICE": str(tmp_path / "lock"), "LONE_FAULT": fault}
    kept = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    words = ["--suite", str(tmp_path / "suite.toml"), "--backends", "standard,chunked,splash"]
    words += ["--out", str(tmp_path / "run"), "--cell-timeout", str(timeout)]
    command = [sys.executable, "-c", f"{before}\nfrom attnsuite.suite.command_line import main; main()", "run", *words]
    done = subprocess.run(command, env=kept | given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {(r.kind, r.requested): r for r in parse_records(tmp_path / "run" / RECORDS)[0]}


def test_suite_passes_on_a_device_that_admits_one_process(tmp_path):
    records = run(tmp_path)
    named = {key: (record.status, record.error) for key, record in records.items() if key[1] != "splash"}
    assert Counter(status for status, _ in named.values()) == {"ok": 4}, named
    assert all(record.accuracy and record.samples for key, record in records.items() if key[1] != "splash")
    assert len((tmp_path / "lock.log").read_text().split()) >= 3  # the probe, and one process for each case


@pytest.mark.parametrize(("fault", "status"), [("dies", "crashed"), ("hangs", "timeout")])
def test_fault_costs_the_cells_of_its_case_and_the_next_case_has_a_new_process(tmp_path, fault, status):
    records = run(tmp_path, fault, timeout=15)
    first, *_ = (record for record in records.values() if record.status == status)
    others = [record for record in records.values() if record.kind == first.kind and record is not first]
    assert {record.status for record in others} == {"crashed"}
    assert all("shares with the other cells" in str(record.error) for record in others)
    after = [record for key, record in records.items() if record.kind != first.kind and key[1] != "splash"]
    assert [record.status for record in after] == ["ok", "ok"]


def test_cells_with_processes_of_their_own_would_not_pass(tmp_path):
    """The control: without sharing, the second process finds the device in use."""
    records = run(tmp_path, before="from attnsuite.suite.grid import executors; executors._share = lambda _: False")
    assert any("already in use" in str(record.error) for record in records.values())


def test_peak_of_a_shared_process_is_taken_by_difference():
    before = {"bytes_in_use": 100, "peak_bytes_in_use": 400}
    assert memory.by_difference({"device_peak": 900, "x": 1}, before) == {"device_peak": 800, "x": 1}
    assert memory.by_difference({"device_peak": 400}, before) == {"device_peak": None}
    assert memory.by_difference({"device_peak": None}, before) == {"device_peak": None}
