"""Runs that are killed, interrupted and resumed, as real processes with real signals; in an odd environment."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from attnsuite import reports
from attnsuite.suite import command_line, entry
from attnsuite.suite.grid.running import Running
from attnsuite.suite.kinds.op_case import OpCase
from attnsuite.suite.store import RECORDS, parse_records
from attnsuite.suite.verbs import run
from attnsuite.suite.verbs.flags import resuming
from attnsuite.suite.verbs.run import Run
from attnsuite.suite.verbs.tune import Tune
from command import cell_of, code_of, known_machine
from script import python

TESTS = Path(__file__).parents[1]
TRIALS = int(os.environ.get("ATTNSUITE_FAULT_TRIALS", "3"))  # tests/faults.py asks for 200


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


@pytest.fixture(scope="module")
def killed(tiny, tmp_path_factory, attnsuite):
    """A run of two cells that is killed behind its first record: its command, directory and living workers."""
    out = known_machine(tmp_path_factory.mktemp("killed") / "run")
    command = ("run", "--suite", tiny, "--backends", "standard", "--sample-seconds", "0.01", "--out", out)
    process = attnsuite.start(*command)
    wait_for_records(process, out, 1)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    attnsuite.finish(process)
    _, alive = psutil.wait_procs(workers, timeout=20)
    return command, out, alive


def test_killed_run_leaves_no_orphans_and_resumes_with_each_cell_once(killed, attnsuite, refused):
    command, out, alive = killed
    assert alive == []
    before = (out / RECORDS).read_bytes()
    before = before[: before.rindex(b"\n") + 1]  # the system may have written half of what was written at once
    assert before.count(b"\n") == 1

    assert "--resume" in refused(*command)
    assert "other --sample-seconds" in refused("run", "--resume", "--out", out, "--sample-seconds", "0.2")
    assert "other backends" in refused("run", "--resume", "--out", out, "--backends", "splash")
    page = reports.render(out).read_text(encoding="utf-8")
    assert "This run was not finished: 1 of its 2 cells have no record." in page
    assert "--sample-seconds 0.01" in page

    code, _, err = attnsuite.finish(attnsuite.start("run", "--resume", "--out", out))
    assert code == 0, err
    assert (out / RECORDS).read_bytes().startswith(before)
    found = keys(out)
    assert len(found) == len(set(found)) == 2
    assert "not finished" not in reports.render(out).read_text(encoding="utf-8")

    assert code_of("run", "--resume", "--out", out) == 0
    assert keys(out) == found


@pytest.mark.parametrize(
    ("command", "flags", "words"),
    [
        (
            Run(suite="quick", cell_timeout=9.0, executor="ray"),
            ("cell_timeout",),
            "run --executor ray --cell-timeout 9.0",
        ),
        (Tune(cases="decode-*", target="h100"), ("target", "cases"), "tune --target h100 --cases 'decode-*'"),
    ],
)
def test_the_command_that_goes_on_has_the_flags_that_are_not_written_down(tmp_path, command, flags, words):
    (tmp_path / "run.json").touch()
    assert resuming(command, tmp_path, flags) == f"go on with: attnsuite {words} --resume --out {tmp_path}"


def test_a_run_that_is_interrupted_while_it_compiles_for_an_h100_says_how_it_goes_on(tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    (tmp_path / "run.json").touch()
    (tmp_path / RECORDS).touch()
    request = SimpleNamespace(out=tmp_path, backends=("standard",))
    monkeypatch.setattr(
        "attnsuite.suite.compile_request.verdict_request", lambda *_: SimpleNamespace(out=tmp_path / "x")
    )
    monkeypatch.setattr("attnsuite.suite.compile_run.compile_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run._verdicts(Run(cell_timeout=9.0), request, ())
    again = f"attnsuite run --cell-timeout 9.0 --resume --out {tmp_path}"
    assert f"go on with: {again}" in " ".join(capsys.readouterr().err.split())


@pytest.mark.thorough
def test_signal_keeps_what_is_done_and_leaves_nothing_behind(tiny, new_run, tmp_path, attnsuite, monkeypatch):
    """One signal; :func:`test_each_signal_reaches_the_command_in_the_same_way` has the others."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    process = attnsuite.start("run", "--suite", tiny, "--backends", "standard", "--out", new_run)
    wait_for_records(process, new_run, 1)  # the process of the second case has begun to start
    workers = psutil.Process(process.pid).children(recursive=True)
    assert workers
    assert list(temporary.iterdir())
    process.send_signal(signal.SIGTERM)
    code, _, err = attnsuite.finish(process)
    assert psutil.wait_procs(workers, timeout=1)[1] == []
    assert code == 128 + signal.SIGTERM, err
    assert f"attnsuite run --resume --out {new_run}" in err
    assert "Traceback" not in err
    assert len(keys(new_run)) >= 1
    assert list(temporary.iterdir()) == []


def test_each_signal_reaches_the_command_in_the_same_way(monkeypatch):
    ending, found = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP), []
    before = [signal.getsignal(number) for number in ending]
    monkeypatch.setattr(command_line, "main", lambda: found.extend(map(signal.getsignal, ending)))
    try:
        entry.main()
    finally:
        for number, handler in zip(ending, before, strict=True):
            signal.signal(number, handler)
    assert found == [entry._interrupt] * 3


def catches(process, number):
    """Whether the process has a handler of its own for a signal that ends others."""
    (line,) = re.findall(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
    return bool(int(line, 16) & 1 << (number - 1))


def test_signal_during_the_imports_ends_at_once_without_a_traceback(attnsuite):
    process = attnsuite.start("doctor")
    deadline = time.monotonic() + 60
    while not catches(process, signal.SIGHUP):
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGHUP)
    code, out, err = attnsuite.finish(process, seconds=60)
    assert (code, out, err) == (128 + signal.SIGHUP, "", "")


def test_a_signal_that_is_ignored_stays_ignored(attnsuite):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does; the child inherits it
    try:
        process = attnsuite.start("report", "nowhere")
    finally:
        signal.signal(signal.SIGHUP, before)
    while process.poll() is None:
        process.send_signal(signal.SIGHUP)
        time.sleep(0.1)
    code, _, err = attnsuite.finish(process)
    assert code == 2
    assert err.startswith("attnsuite: nowhere holds no records.jsonl")


# Each ends by the signal that its ``{}`` sends itself, as the command does.
ENDS = """
import gc, os, signal, subprocess, sys, time
from pathlib import Path
from attnsuite.suite import entry

signal.signal(signal.SIGTERM, entry._interrupt)
sent, started = [], []
try:
{}
    time.sleep(5)
except KeyboardInterrupt as error:
    for process in started:
        process.kill()
    sys.exit(128 + error.args[0])
"""
IN_THE_COLLECTOR = """
    gc.callbacks.append(lambda *_: sent or sent.append(os.kill(os.getpid(), signal.SIGTERM)))
    gc.collect()
"""
IN_AN_IMPORT = """
    Path(__file__).with_name("catches_everything.py").write_text('''
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1)
except:
    pass
''')
    import catches_everything
"""
IN_A_START = """
    def fork_and_signal(*arguments, fork=subprocess._fork_exec):
        found = fork(*arguments)
        os.kill(os.getpid(), signal.SIGTERM)
        return found

    subprocess._fork_exec = fork_and_signal
    try:
        started.append(subprocess.Popen(["sleep", "20"]))
    except KeyboardInterrupt:
        sys.exit("a process was started, and nobody knows it")
"""
TWICE = """
    class Ending:
        def __del__(self, sleep=time.sleep):
            sleep(0.1)

    sys.modules["ending"] = Ending()  # is deleted when Python has taken its handlers back
    exec(compile("os.kill(os.getpid(), signal.SIGTERM)", "/tempfile.py", "exec"))
    os.kill(os.getpid(), signal.SIGTERM)
"""
# The command itself has to hear it.
IN_EXEC = """
from attnsuite.suite import command_line

command_line._act = lambda words: exec("raise KeyboardInterrupt(15)")
command_line.main([])
"""


@pytest.mark.parametrize(
    "code",
    [*map(ENDS.format, (IN_THE_COLLECTOR, IN_AN_IMPORT, IN_A_START, TWICE)), IN_EXEC],
    ids=["garbage collector", "import", "start", "twice", "exec"],
)
def test_signal_is_not_lost_where_python_drops_or_remembers_it(code, tmp_path):
    """JAX has a callback in the collector, verbs import late, workers start, exec makes a dataclass: runs met all."""
    (tmp_path / "interrupted.py").write_text(code)
    done = python("-m", "interrupted", first=tmp_path)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert not done.stderr


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
