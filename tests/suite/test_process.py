"""What a worker process is started with, how its parent waits for it, and where its threads run."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from attnsuite.suite.cell import Outcome
from attnsuite.suite.errors import CellFailure
from attnsuite.suite.grid import call, executors, work
from attnsuite.suite.grid.executors import _sample
from attnsuite.suite.grid.process import Worker
from attnsuite.suite.grid.running import Running, prepare
from attnsuite.suite.kinds.attention_call import OpCase
from attnsuite.suite.measure import placement
from command import WorkerHere, cell_of, context_of
from script import printed


def test_worker_compiles_although_the_user_has_a_cache_of_programs(tmp_path, monkeypatch):
    """Compile times would be those of reading a file."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
    case = OpCase(kind="op_forward", sequence=16, heads=1, kv_heads=1)
    with Worker(2**33) as started:
        started.ask(120, work.write_reference, case, tmp_path / "judge.npz", None, 1)
    assert (tmp_path / "judge.npz").is_file()
    assert not (tmp_path / "cache").exists()


STARTED = """
import sys, attnsuite.reports
from attnsuite.suite import statistics
from attnsuite.suite.grid import call, run_grid, work, worker
from attnsuite.suite.kinds import make_case
from attnsuite.suite.verbs import flags, run

flags.text_of(run.Run())
case = make_case({"kind": "op_forward", "sequence": 64})
call.made(call.described(work.write_reference, (case, "reference.npz", None, None)))
statistics.median([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
print(*{"flax", "optax", "scipy.stats", "matplotlib"} & set(sys.modules))
from attnsuite import models
from attnsuite.suite import judgement
models.load_shipped()
print(*{"pytest", "hypothesis", "torch"} & set(sys.modules))
"""


def test_worker_and_command_import_nothing_that_a_call_of_attention_does_not_need():
    """A process per cell: what each imports for nothing is paid as often as there are cells.

    What judges needs no pytest, and a checkpoint of safetensors no PyTorch.
    """
    assert not printed(STARTED).split()


# Answers a request after ten steps of its own, as work that stops with the process does.
STEPS = r"""#!/bin/sh
while read -r request; do
    for step in 1 2 3 4 5 6 7 8 9 10; do sleep 0.05; done
    token=$(expr "$request" : '.*"token": "\([0-9a-f]*\)"')
    echo "{\"token\": \"$token\", \"ok\": 1}"
done
"""
WATCHING = """
import sys
sys.executable = sys.argv[1]
from attnsuite.suite.grid.process import Worker
with Worker(2**33) as worker:
    print(worker.pid, flush=True)
    print(worker.ask(2.0, print), worker.slept)
"""


def fake(tmp_path, script):
    """A program to start as the worker."""
    path = tmp_path / "worker"
    path.write_text(script)
    path.chmod(0o755)
    return path


def test_time_for_which_the_run_was_stopped_counts_toward_no_limit(tmp_path):
    command = [sys.executable, "-c", WATCHING, str(fake(tmp_path, STEPS))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as run:
        assert run.stdout is not None
        groups = run.pid, int(run.stdout.readline())
        time.sleep(0.2)
        for number, wait in ((signal.SIGSTOP, 2.5), (signal.SIGCONT, 0)):
            for group in groups:
                os.killpg(group, number)
            time.sleep(wait)
        answer, slept = run.stdout.readline().split()
    assert (answer, run.returncode) == ("1", 0)
    assert 2.0 < float(slept) < 10


def test_sample_that_holds_a_stop_is_taken_again():
    times = iter([1e-3, 3600.0, *[1e-3] * 20])

    class Stopped(WorkerHere):
        def ask(self, *_):
            taken = next(times)
            self.slept += taken if taken > 1 else 0.0
            return {"seconds": taken, "spent": taken}

    running = Running(cell_of(OpCase(kind="op_forward", sequence=8)), Stopped(), outcome=Outcome(calls=1))
    assert list(_sample(OpCase(kind="op_forward", sequence=16), [running], context_of()))
    assert running.samples == [1e-3] * 10


@pytest.mark.parametrize("answer", [{"seconds": None, "spent": 1.0}, {}, [1.0], "fast"], ids=str)
def test_an_answer_of_another_form_ends_its_cell_and_not_the_run(answer):
    """Code of the user may have replaced what answers."""

    class Replaced(WorkerHere):
        def ask(self, *_):
            return answer

    case = OpCase(kind="op_forward", sequence=8)
    cell, context = cell_of(case, "mine"), context_of()
    (sampled,) = _sample(case, [Running(cell, Replaced(), outcome=Outcome(calls=1))], context)
    for record in (sampled, prepare(Running(cell, Replaced()), None, context)):
        assert record.status == "crashed"
        assert record.error.startswith("its figures cannot be recorded: ")


def test_interpreted_cells_are_judged_at_once_and_before_anything_is_timed(monkeypatch):
    both, asked = threading.Barrier(2), []

    class Answering(WorkerHere):
        def ask(self, seconds, function, cell, *_):
            if function is work.sample:
                return {"seconds": 1e-3, "spent": 1e-3}
            asked.append(cell.mode)
            if asked[-1] == "interpret":
                both.wait(20)  # for the other interpreted cell: one after the other, both would be broken
                return {"outcome": dataclasses.asdict(Outcome()), "named": False}
            return {"outcome": dataclasses.asdict(Outcome(calls=1)), "named": False}

    monkeypatch.setattr(executors, "Worker", Answering)
    monkeypatch.setattr(executors, "usable_cores", lambda: 2)
    case = OpCase(kind="op_forward", sequence=16)
    cells = [
        cell_of(case, row, mode=mode)
        for row, mode in (("standard", "native"), ("splash", "interpret"), ("pallas_flash", "interpret"))
    ]
    references: Any = SimpleNamespace(path=lambda *_, **__: None)
    records = list(executors.in_turns(cells, context_of(references=references)))
    assert asked == ["interpret", "interpret", "native"]
    assert [(record.status, record.error, len(record.samples)) for record in records] == [
        ("ok", None, 0),
        ("ok", None, 0),
        ("ok", None, 10),
    ]
    assert {record.requested for record in records[:2]} == {"splash", "pallas_flash"}


def test_end_of_a_worker_is_seen_although_what_it_forked_holds_its_pipe(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(fake(tmp_path, "#!/bin/sh\nread -r request\nsleep 20 &\nexit 7\n")))
    with Worker(2**33) as short, pytest.raises(CellFailure, match="exited with code 7 before it answered"):
        short.ask(5, print)


FORKING = """
import functools, os, sys, time
from attnsuite.suite.grid import call
from attnsuite.suite.grid.worker import answer_requests

def answer(number):
    print("a plug-in may print, and read", sys.stdin.read())
    for stays in (True, False):
        if os.fork() == 0:
            if stays:
                time.sleep(1000)
            return "of a copy"
    time.sleep(0.1)
    return number

if __name__ == "__main__":
    call.made = lambda request: functools.partial(answer, *request["arguments"])
    answer_requests()
"""


def test_what_a_plug_in_forks_does_not_answer_and_ends_with_its_worker_and_reads_nothing(tmp_path, monkeypatch):
    (tmp_path / "answers.py").write_text(FORKING)
    script = f"#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(tmp_path / 'answers.py'))}\n"
    monkeypatch.setattr(sys, "executable", str(fake(tmp_path, script)))
    with Worker(2**33) as forking:
        assert [forking.ask(60, work.forget, number) for number in range(3)] == [0, 1, 2]
        copies = psutil.Process(forking.pid).children()
        assert len(copies) >= 3
        forking._stdin.close()  # as when the run is killed
        assert psutil.wait_procs(copies, timeout=20)[1] == []


def test_address_space_that_is_too_small_for_jax_is_a_failure_and_no_hang():
    with Worker(2**33) as small:
        resource.prlimit(small.pid, resource.RLIMIT_AS, (2**29, 2**29))
        with pytest.raises(CellFailure) as failure:
            small.ask(120, work.measure_machine)
    assert failure.value.status in {"crashed", "oom"}


def test_cell_of_a_device_that_is_gone_is_not_computed_on_the_cpu():
    case = OpCase(kind="op_forward", sequence=16, heads=1, kv_heads=1)
    cell = cell_of(case, target="cuda:h100")
    with pytest.raises(CellFailure, match=r"is for cuda:h100, and JAX now finds cpu.*: the device is gone") as failure:
        work.prepare(cell, None, 2**33, None, shared=False)
    assert failure.value.status == "crashed"


@pytest.mark.parametrize("name", ["os:system", "attnsuite.suite.grid.call:Path", "attnsuite.suite.grid.call:nothing"])
def test_worker_calls_functions_of_this_package_alone(name):
    with pytest.raises(ValueError, match="is no function of this package"):
        call.made({"function": name, "arguments": []})


PINNED = """
import json, os, pathlib
import jax
from attnsuite.suite.measure import placement

before = placement.pin_pool()
jax.devices()
pinned = placement.pin_pool()
tasks = pathlib.Path("/proc/self/task").iterdir()
pool = [int(task.name) for task in tasks if (task / "comm").read_text().strip() == "tf_XLAEigen"]
print(json.dumps([before, pinned, sorted(map(list, map(os.sched_getaffinity, pool))), len(os.sched_getaffinity(0))]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says where a thread may run")
def test_each_thread_of_the_pool_has_a_processor_of_its_own():
    """The name of the threads is XLA's own: this fails with a jaxlib that calls them otherwise."""
    before, pinned, places, usable = json.loads(printed(PINNED))
    processors = sorted(os.sched_getaffinity(0))
    assert before is None  # JAX had made no pool
    assert pinned == len(processors)
    assert places == [[processor] for processor in processors]
    assert usable == len(processors)  # the caller's own thread may run everywhere


def test_a_system_without_such_a_call_is_left_as_it_is(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    assert placement.pin_pool() is None
