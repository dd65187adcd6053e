"""Runs that are killed, interrupted and resumed, as real processes with real signals."""

from __future__ import annotations

import json
import signal
import time

import psutil

from suite.store import RECORDS, parse_records


def lines(out):
    path = out / RECORDS
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def wait_for_records(process, out, count, seconds=180):
    deadline = time.monotonic() + seconds
    while lines(out) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def keys(out):
    return [record.key for record in parse_records(out / RECORDS)[0]]


def test_killed_run_leaves_no_orphans_and_resumes_with_each_cell_once(tiny, new_run, attnsuite):
    flags = ("--suite", tiny, "--backends", "standard,chunked", "--out", new_run)
    process = attnsuite.start("run", *flags)
    wait_for_records(process, new_run, 1)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    attnsuite.finish(process)
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert alive == []
    before = (new_run / RECORDS).read_bytes()
    assert 1 <= before.count(b"\n") < 4

    again = attnsuite.finish(attnsuite.start("run", *flags))
    assert again[0] == 2
    assert "--resume" in again[2]

    code, _, err = attnsuite.finish(attnsuite.start("run", "--resume", "--out", new_run))
    assert code == 0, err
    assert (new_run / RECORDS).read_bytes().startswith(before)
    found = keys(new_run)
    assert len(found) == len(set(found)) == 4

    code, _, err = attnsuite.finish(attnsuite.start("run", "--resume", "--out", new_run))
    assert code == 0, err
    assert keys(new_run) == found


def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(tiny, new_run, attnsuite):
    process = attnsuite.start("run", "--suite", tiny, "--backends", "standard,chunked", "--out", new_run)
    wait_for_records(process, new_run, 1)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    code, _, err = attnsuite.finish(process)
    assert code == 130
    assert f"attnsuite run --resume --out {new_run}" in err
    assert "Traceback" not in err
    assert len(keys(new_run)) >= 1
    assert psutil.wait_procs(workers, timeout=20)[1] == []


def test_resuming_under_other_versions_is_refused(tiny, new_run, attnsuite):
    process = attnsuite.start("run", "--suite", tiny, "--cases", "first", "--backends", "standard", "--out", new_run)
    assert attnsuite.finish(process)[0] == 0
    manifest = json.loads((new_run / "run.json").read_text())
    manifest["versions"]["jax"] = "0.0.1"
    (new_run / "run.json").write_text(json.dumps(manifest))
    code, _, err = attnsuite.finish(attnsuite.start("run", "--resume", "--out", new_run))
    assert (code, "versions was" in err, "Traceback" in err) == (2, True, False)
    code, _, err = attnsuite.finish(attnsuite.start("run", "--resume", "--out", new_run, "--backends", "chunked"))
    assert (code, "other backends" in err) == (2, True)
