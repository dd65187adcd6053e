"""attnsuite run --suite device: which backends it takes, in what order, and how it goes on."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest

from attnsuite.backends import names
from attnsuite.reports.pages.conformance import reproducer
from attnsuite.suite import device_run
from attnsuite.suite.errors import InputError
from attnsuite.suite.grid import executors, run_grid
from attnsuite.suite.grid.run_grid import new_request
from attnsuite.suite.grid.running import Limits
from attnsuite.suite.kinds.conformance_case import ConformanceCase
from attnsuite.suite.kinds.quality_case import RetrievalCase
from attnsuite.suite.store import CONFORMANCE, MANIFEST, RECORDS, parse_records
from attnsuite.suite.suites import DEVICE, QUICK
from attnsuite.suite.verbs import run as run_verb
from attnsuite.suite.verbs.flags import resuming
from attnsuite.suite.verbs.run import Run
from attnsuite.testing.problems import CASES
from command import cell_of, code_of

LIMITS = Limits(60, 2**33)


def found(monkeypatch, tmp_path, target, native, **changes):
    backends = [
        {"name": name, "problems": {"p": {"mode": "native" if name in native else "interpret"}}} for name in names()
    ]
    monkeypatch.setattr(device_run, "examine_here", lambda: {"environment": {"target": target}, "backends": backends})
    return device_run.device_run(**{"backends": None, "out": tmp_path, "limits": LIMITS, "resume": False} | changes)


def test_accelerator_has_its_native_backends_alone_and_kvax_first_on_nvidia(monkeypatch, tmp_path):
    made = found(monkeypatch, tmp_path, "cuda:h100", {"standard", "chunked", "kvax", "kascade"})
    assert made.judgement.backends == made.suite.backends == ("kvax", "standard", "chunked")
    assert found(monkeypatch, tmp_path, "tpu:v6e", {"standard", "splash"}).suite.backends == ("splash", "standard")
    assert set(found(monkeypatch, tmp_path, "cpu:x", {"standard"}).suite.backends) == set(names()) - {"kascade"}
    with pytest.raises(InputError, match="no backend runs natively"):
        found(monkeypatch, tmp_path, "cuda:h100", set())
    assert found(monkeypatch, tmp_path, "cuda:h100", set(), backends=("kvax",)).suite.backends == ("kvax",)


def test_what_matters_most_is_first_and_is_said_first(monkeypatch, tmp_path):
    made = found(monkeypatch, tmp_path, "cuda:h100", {"kvax", "standard"})
    assert [case.problem for case in made.judgement.cases] == [name for name in CASES if name in device_run.PROBLEMS]
    assert {case.dtype or CASES[case.problem].dtype for case in made.judgement.cases} == {"bfloat16"}
    assert {case.dtype for case in found(monkeypatch, tmp_path, "tpu:v6e", {"standard"}).judgement.cases} == {None}
    timed = [(case.kind[:3] == "op_", case.dtype == "bfloat16") for case in made.suite.cases if hasattr(case, "dtype")]
    assert timed == sorted(timed, reverse=True)  # calls come first, and of them those that Kvax takes
    assert {case.name for case in QUICK.cases} <= {case.name for case in DEVICE.cases}
    device, contract, calls, models, _ = made.plan()
    assert device == "device:  cuda:h100; backends: kvax, standard"
    assert "16 problems" in contract
    assert "decode-s32768" in calls
    assert "prefill-text" in models


@pytest.mark.parametrize("target", ["cuda:h100", "cpu:x"])
@pytest.mark.parametrize("others", ["2 other processes", None])
@pytest.mark.parametrize("busy", [False, True])
def test_gpu_that_others_use_is_refused_unless_asked_for(monkeypatch, tmp_path, target, others, busy):
    for module in (device_run, run_grid):
        monkeypatch.setattr(module, "used_by_others", lambda: others)
    monkeypatch.setattr(run_grid, "probe", lambda _: ({"target": target}, []))
    quick = dataclasses.replace(new_request("quick", "standard", None, None, tmp_path, LIMITS), busy=busy)
    for start in (quick.look, lambda: found(monkeypatch, tmp_path, target, {"standard"}, busy=busy)):
        refused = target.startswith("cuda") and others and not busy
        with pytest.raises(InputError, match="used by 2 other processes") if refused else contextlib.nullcontext():
            start()


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.thorough
def test_run_that_was_cut_in_the_contract_goes_on_with_its_backends(new_run, capsys, monkeypatch):
    monkeypatch.setattr(device_run, "PROBLEMS", ("causal",))
    monkeypatch.setattr(device_run, "_suite", _small)
    out = new_run
    words = ["run", "--suite", "device", "--out", str(out)]
    assert code_of(*words, "--backends", "standard") == 0
    said = capsys.readouterr().out
    assert said.startswith("device:  cpu:")
    assert "to send: attnsuite report" in said
    (out / MANIFEST).unlink()
    (out / RECORDS).unlink()
    told = resuming(
        Run(suite="device", cell_timeout=9.0), out, ("suite", "cell_timeout")
    )  # interrupted before the first cell that is timed
    assert (
        told
        == f"what is done is kept; go on with: attnsuite run --suite device --cell-timeout 9.0 --resume --out {out}"
    )
    assert resuming(Run(), out, (), ("mine.py:f",)) == f"what was computed stays in {out}; start again"
    assert code_of(*words, "--resume") == 0
    assert (out / RECORDS).read_text().count("\n") == (out / CONFORMANCE / RECORDS).read_text().count("\n") == 1


@pytest.mark.parametrize(
    ("target", "memory", "processes"),
    [("cuda:h100", 80, 3), ("cuda:t4", 4, 2), ("cuda:h100", 1, 1), ("tpu:v6e", 16, 1), ("cpu:x", 80, 1)],
)
def test_contract_is_dealt_to_processes_on_a_gpu_alone_case_by_case(monkeypatch, target, memory, processes):
    monkeypatch.setattr(executors, "usable_cores", lambda: 3)
    assert executors._PROCESSES == 4  # more cores than that change nothing
    cells = [
        cell_of(ConformanceCase(name=name), row, target)
        for name in ("causal", "plain", "mqa", "scale")
        for row in ("kvax", "standard")
    ]
    context = SimpleNamespace(environment={"device_memory": memory * 2**30})
    parts = executors._parts(cells, context)
    assert len(parts) == processes
    assert sorted(cell.key for part in parts for cell in part) == sorted(cell.key for cell in cells)
    assert all(len({cell.case.name for cell in part}) * 2 == len(part) for part in parts)
    timed = [dataclasses.replace(cell, case=RetrievalCase()) for cell in cells]
    assert len(executors._parts(timed, context)) == 1  # a kind whose cases do not share a process


@pytest.mark.thorough
def test_what_several_processes_judge_is_one_run(monkeypatch, tmp_path):
    monkeypatch.setattr(executors, "_parts", lambda cells, _: [[cell] for cell in cells])
    words = ["judge", "standard", "--cases", "causal,big-logits-bfloat16", "--dtype", "bfloat16", "--random", "0"]
    assert code_of(*words, "--out", tmp_path / "run") == 0
    records, _, _ = parse_records(tmp_path / "run" / RECORDS)
    assert {(record.case, record.status) for record in records} == {
        ("causal in bfloat16", "ok"),
        ("big-logits-bfloat16", "ok"),  # as it is
    }
    (line,) = [each for each in reproducer(min(records, key=lambda r: len(r.case))) if "judge_case" in each]
    assert "judge_case(backend, 'causal', Target.here(), 'native', dtype='bfloat16')" in line


def test_cases_choose_what_is_timed_and_leave_the_contract_whole(monkeypatch, tmp_path):
    made = found(monkeypatch, tmp_path, "cuda:h100", {"standard"}, cases="forward-s16384*")
    assert [case.name for case in made.suite.cases] == ["forward-s16384-h8k2-d128-bf16"]
    assert len(made.judgement.cases) == len(device_run.PROBLEMS)
    with pytest.raises(InputError, match="no case matches"):
        found(monkeypatch, tmp_path, "cuda:h100", {"standard"}, cases="nothing")
    assert run_verb._device_flags(tmp_path) == ("suite", "cases", "sample_seconds")  # interrupted in the contract
    (tmp_path / MANIFEST).touch()
    assert run_verb._device_flags(tmp_path) == ("suite",)


def _small(backends, out, limits, cases):
    return device_run.new_request("device", ",".join(backends), "forward-s1024-h8k2-d64-f32", None, out, limits)
