"""A device that admits one process, as a TPU does: no two processes touch it, and a fault costs one case."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from attnsuite.suite.measure import memory
from attnsuite.suite.store import RECORDS, parse_records
from command import known_machine

HERE = Path(__file__).parent
CASES = {"dies": "op_forward", "hangs": "op_forward_backward", "passes": "op_forward"}
CASE = '[[case]]\nname = "{}"\nkind = "{}"\nsequence = 64\nheads = 2\nkv_heads = 2\n'
# The control: a process for each cell.
APART = "from attnsuite.suite.grid import executors; executors._share = lambda _: False"


def start(folder, cases, backends, faults="", before=""):
    """The command on such a device, which fails so in the first process that comes to a case, and so in the next."""
    path = folder / "path"
    path.mkdir()
    shutil.copy(HERE / "lone_device.py", path / "sitecustomize.py")
    (folder / "suite.toml").write_text("".join(CASE.format(*case) for case in cases))
    given = {"PYTHONPATH": str(path), "LONE_DEVICE": str(folder / "lock"), "LONE_FAULTS": faults}
    kept = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    words = ["--suite", str(folder / "suite.toml"), "--backends", backends, "--out", str(folder / "run")]
    code = f"{before}\nfrom attnsuite.suite.command_line import main; main()"
    command = [sys.executable, "-c", code, "run", *words, "--cell-timeout", "10"]
    return subprocess.Popen(command, env=kept | given, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The records of a run with both faults, and of the control, by case and row; one waits while the other runs."""
    folders = [tmp_path_factory.mktemp(name) for name in ("shared", "apart")]
    known_machine(folders[1] / "run")
    with (
        start(folders[0], CASES.items(), "standard,chunked,splash", faults="dies hangs") as shared,
        start(folders[1], [("passes", "op_forward")], "standard,chunked", before=APART) as apart,
    ):
        for process in (shared, apart):
            _, error = process.communicate(timeout=300)
            assert process.returncode == 0, error[-2000:]
    found = [parse_records(folder / "run" / RECORDS)[0] for folder in folders]
    return folders[0], *({(record.case, record.requested): record for record in records} for records in found)


@pytest.mark.thorough
def test_suite_passes_on_a_device_that_admits_one_process(runs):
    folder, records, _ = runs
    named = {row: records["passes", row] for row in ("standard", "chunked")}
    assert {row: (record.status, record.error) for row, record in named.items()} == dict.fromkeys(named, ("ok", None))
    assert all(record.accuracy and record.samples for record in named.values())
    assert records["passes", "splash"].status == "crashed"  # its kernel is a TPU's, which takes down no other cell
    # The probe, the machine's peaks, and a process for each case.
    assert len((folder / "lock.log").read_text().split()) == 2 + len(CASES)


@pytest.mark.thorough
@pytest.mark.parametrize(("fault", "status"), [("dies", "crashed"), ("hangs", "timeout")])
def test_fault_costs_the_cells_of_its_case_and_the_next_case_has_a_new_process(runs, fault, status):
    first, *others = (record for (case, _), record in runs[1].items() if case == fault)
    assert first.status == status
    assert {record.status for record in others} == {"crashed"}
    assert all("shares with the other cells" in str(record.error) for record in others)


@pytest.mark.thorough
def test_cells_with_processes_of_their_own_would_not_pass(runs):
    """The control: without sharing, the second process finds the device in use."""
    assert any("already in use" in str(record.error) for record in runs[2].values())


def test_peak_of_a_shared_process_is_taken_by_difference():
    before = {"bytes_in_use": 100, "peak_bytes_in_use": 400}
    assert memory.by_difference({"device_peak": 900, "x": 1}, before) == {"device_peak": 800, "x": 1}
    assert memory.by_difference({"device_peak": 400}, before) == {"device_peak": None}
    assert memory.by_difference({"device_peak": None}, before) == {"device_peak": None}
