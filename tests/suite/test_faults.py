"""Backends that hang, eat memory, die, raise or compute nonsense: each becomes a record, and the run goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import warnings

import pytest

from attnsuite.backends import BackendFallbackWarning, Target, resolve
from attnsuite.suite.errors import InputError
from attnsuite.suite.grid import run_grid as grid
from attnsuite.suite.grid.executors import in_turns
from attnsuite.suite.grid.references import References
from attnsuite.suite.grid.running import Limits
from attnsuite.suite.kinds.attention_call import INTERPRETED_LENGTH, Attention, OpCase, spec_of
from attnsuite.suite.store import RECORDS, parse_records
from command import bring_workers_here, cell_of, code_of, context_of, installed, known_machine
from landing import is_landing

SUITE = """
[[case]]
kind = "op_forward"
sequence = 64
heads = 2
kv_heads = 2
name = "faults"
"""
# What a refused kernel falls back to on a CPU: depends on whether llvmlite is installed.
CASE = OpCase(kind="op_forward", sequence=64, heads=2, kv_heads=2)
SPEC = spec_of(CASE)
FALLBACK = resolve("auto", SPEC, Target("cpu")).backend.name


@pytest.fixture(scope="module")
def begun(tmp_path_factory, foreign, faulty_names, attnsuite):
    """The run of all faulty backends but the one that hangs, and its directory. It runs beside the first tests."""
    folder = tmp_path_factory.mktemp("faults")
    (folder / "suite.toml").write_text(SUITE)
    out = known_machine(folder / "run")
    left_out = ("hanging", *(["raising"] if is_landing() else []))  # surrogate raises too
    backends = ",".join((*(name for name in faulty_names if name not in left_out), "standard"))
    limits = ("--cell-memory", "1GiB", "--sample-seconds", 0.1)
    flags = ("--suite", folder / "suite.toml", "--backends", backends, "--out", out, *limits)
    with attnsuite.start("run", *flags, path=foreign) as process:
        yield process, out
        process.kill()


@pytest.fixture(scope="module")
def run(begun, attnsuite):
    process, out = begun
    code, stdout, stderr = attnsuite.finish(process)
    assert code == 0, stderr
    found = parse_records(out / RECORDS)[0]
    records = {record.requested: record for record in found}
    assert len(found) == len(records)
    return records, stdout, stderr


def own_reasons(record):
    """Those of the backend that was asked for; beside them stands why a better one than the fallback is not here."""
    return tuple(reason for reason in record.reasons if reason.startswith(f"{record.requested}: "))


@pytest.fixture(scope="module")
def lengths(begun, tmp_path_factory, foreign):
    """The records of a case that cannot be judged, and of one slow and one too long for an interpreter."""
    folder = tmp_path_factory.mktemp("lengths")
    lost, slow, long = (
        SUITE.replace("64", str(length)).replace("heads = 2", f"heads = {heads}").replace("faults", name)
        for length, heads, name in (
            (64, 2, "lost"),
            (INTERPRETED_LENGTH, 8, "slow"),
            (INTERPRETED_LENGTH + 1, 2, "long"),
        )
    )
    (folder / "suite.toml").write_text(lost + slow + long)
    out = known_machine(folder / "run")
    write = Attention.write_reference

    def fails(kind, case, *rest):
        if case.name == "lost":
            raise InputError("nothing judges it.")
        write(kind, case, *rest)

    silent = warnings.catch_warnings(action="ignore", category=BackendFallbackWarning)  # as in the worker
    with pytest.MonkeyPatch.context() as patch, silent:
        patch.syspath_prepend(foreign)
        patch.setattr(Attention, "write_reference", fails)
        bring_workers_here(patch, tmp_path_factory.mktemp("worker"))
        flags = ("--suite", folder / "suite.toml", "--backends", "standard,elsewhere", "--out", out)
        assert code_of("run", *flags) == 0
    return {(record.case, record.requested): record for record in parse_records(out / RECORDS)[0]}


SILENT = """
import time
from attnsuite.backends.standard import STANDARD

class Silent:
    name, exact = "silent", True

    def takes(self, target, mode):
        time.sleep(1000)

    plan = STANDARD.plan


SILENT = Silent()
"""


def test_backend_that_hangs_when_it_is_asked_ends_the_run_with_a_sentence(begun, tmp_path, monkeypatch):
    installed(tmp_path, "[attnsuite.backends]\nsilent = silent:SILENT\n", silent=SILENT)
    (tmp_path / "suite.toml").write_text(SUITE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(grid, "_PROBE_SECONDS", 6.0)  # of which a worker's start is one or two
    limits = Limits(60.0, 2**30)
    for backends, answers in (("standard", True), ("standard,silent", False)):
        asked = grid.new_request(str(tmp_path / "suite.toml"), "standard", None, None, tmp_path / "out", limits)
        asked = dataclasses.replace(asked, backends=tuple(backends.split(",")))
        with contextlib.nullcontext() if answers else pytest.raises(InputError, match="no answer within 6 s; name the"):
            grid.probe(asked)


@pytest.mark.thorough
def test_interpreted_kernel_is_judged_at_a_length_that_an_interpreter_can_take(lengths):
    record = lengths["slow", "elsewhere"]
    assert record.mode == "interpret"
    assert record.accuracy["out"].passed  # held to the oracle at 512, or the shapes would differ
    (note,) = record.notes
    assert note == "accuracy was judged at sequence=512: an interpreter is too slow at sequence=1024."
    assert not lengths["slow", "standard"].notes


@pytest.mark.thorough
def test_nothing_long_is_interpreted(lengths):
    record = lengths["long", "elsewhere"]
    assert (record.status, record.mode, record.resolved) == ("unsupported", None, FALLBACK)


@pytest.mark.thorough
def test_case_that_cannot_be_judged_is_its_cells_record_and_the_run_goes_on(lengths):
    record = lengths["lost", "standard"]
    assert record.status == "crashed"
    assert record.error == "nothing judges it."
    assert lengths["slow", "standard"].status == lengths["long", "standard"].status == "ok"


def test_cell_that_hangs_is_ended_and_becomes_a_record_without_samples(foreign, monkeypatch):
    """Nothing else has to end within its limit, and a slow machine may end it before it has come to its backend."""
    monkeypatch.syspath_prepend(foreign)
    context = context_of(limits=Limits(3.0, 2**30))
    with contextlib.closing(References(60.0)) as references:
        (record,) = in_turns([cell_of(CASE, "hanging")], dataclasses.replace(context, references=references))
    assert (record.status, record.samples) == ("timeout", ())
    assert record.error == "no answer within 3 s (--cell-timeout)."


@pytest.mark.parametrize(
    ("backend", "status", "error"),
    [
        ("hungry", "oom", "1.00 GiB"),
        ("dying", "crashed", "SIGSEGV"),
        pytest.param("raising", "crashed", "RuntimeError: raising raised", marks=pytest.mark.thorough),
        ("leaving", "crashed", "SystemExit: 0"),
        ("surrogate", "crashed", "RuntimeError: half a character: ?"),  # and the report is written all the same
        ("wrong", "wrong", "out is off by"),
        ("nan", "wrong", "NaN or infinity"),
        ("refusing", "unsupported", f"{FALLBACK} would run"),
    ],
)
def test_fault_becomes_a_record_without_samples(run, backend, status, error):
    record = run[0][backend]
    assert (record.status, record.samples) == (status, ())
    assert error in record.error
    assert "\n" not in record.error


def test_the_other_cells_are_measured_all_the_same(run):
    record = run[0]["standard"]
    assert record.status == "ok"
    assert len(record.samples) >= 5
    assert record.accuracy["out"].passed
    assert {"compiled_argument", "compiled_output", "compiled_temp", "process_high_water"} <= set(record.memory)
    if sys.platform == "linux":
        assert record.environment["pinned_threads"] == len(os.sched_getaffinity(0))
    assert record.compile_seconds > 0
    assert "report.md" in run[1]
    assert "Traceback" not in run[2]


def test_backend_that_cannot_be_asked_is_refused_with_what_it_raised_and_stops_no_other(run, unaskable):
    for name, raised in unaskable.items():
        record = run[0][name]
        assert (record.status, record.resolved, record.samples) == ("unsupported", FALLBACK, ())
        (reason,) = own_reasons(record)
        assert raised in reason
    assert run[0]["standard"].status == "ok"


def test_refused_cell_carries_every_reason_and_what_would_run_and_nothing_is_measured_in_its_place(run):
    records, stdout, stderr = run
    record = records["refusing"]
    assert (record.mode, record.resolved, record.samples) == (None, FALLBACK, ())
    assert record.key.endswith("/fallback")
    assert record.error == f"refused; {FALLBACK} would run."
    assert own_reasons(record) == (
        "refusing: refusing takes no head_dim at all.",
        "refusing: refusing does not like Mondays.",
    )
    assert "refusing is unsupported in 1 of 1 case: refusing: " in stdout + stderr


def test_kernel_that_can_only_be_interpreted_here_shows_its_accuracy_and_no_time(run):
    record = run[0]["elsewhere"]
    assert (record.status, record.mode, record.resolved) == ("ok", "interpret", "elsewhere")
    assert record.accuracy["out"].passed
    assert (record.samples, record.compile_seconds, record.memory) == ((), None, {})
    assert record.reasons[0] == "elsewhere: elsewhere is for devices that are not here."
