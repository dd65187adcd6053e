"""A grid on several nodes of Ray on one machine: no cell is lost, none is doubled, whatever dies."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from attnsuite.backends import Target
from attnsuite.suite import compile_run, curves, sharded, tuning
from attnsuite.suite.errors import InputError
from attnsuite.suite.grid.executors import Limits
from attnsuite.suite.grid.fleet import Fleet, FleetRequest, execute_grid, execute_on_fleet
from attnsuite.suite.kinds.model import ModelCase
from attnsuite.suite.store import MANIFEST, RECORDS, parse_records
from fleet_work import BEGUN, GO, ROWS, PretendGrid, Seen, Work, cluster, request

pytestmark = pytest.mark.ray

TESTS = Path(__file__).parents[1]
DRIVER = """
import sys
from pathlib import Path
from attnsuite.suite.grid.fleet import Fleet, FleetRequest, execute_on_fleet
from fleet_work import Seen, Work, request
out, address, *names = sys.argv[1:]
resume = (Path(out) / "run.json").is_file()
execute_on_fleet(request(Path(out), names, resume=resume), FleetRequest(address=address, work=Work), Seen())
"""


@pytest.fixture(scope="module", autouse=True)
def _nodes_find_the_work():
    """Nodes import what tests/ holds."""
    if importlib.util.find_spec("ray") is None and "ATTNSUITE_REQUIRE_RAY" not in os.environ:
        pytest.skip("ray is not installed")
    with pytest.MonkeyPatch.context() as patch:
        path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        patch.setenv("PYTHONPATH", path)
        yield


@pytest.fixture(scope="module")
def head(_nodes_find_the_work):
    with cluster() as made:
        yield made


@pytest.fixture
def ray_nodes(head):
    """A cluster without nodes that compute."""
    yield head
    for node in tuple(head.worker_nodes):
        head.remove_node(node, allow_graceful=False)


def asked(nodes, **changes):
    return FleetRequest(address=nodes.address, work=Work, **{"patience": 60.0, **changes})


def records(out):
    return parse_records(out / RECORDS)[0]


def holds_each_cell_once(out, names):
    keys = [record.key for record in records(out)]
    return sorted(keys) == sorted(f"{name}/{row}/cpu/native" for name in names for row in ROWS)


def begun(out):
    return [line.split() for line in (out.parent / BEGUN).read_text().splitlines()]


def test_case_whose_node_died_runs_again_elsewhere_and_leaves_no_half(ray_nodes, tmp_path):
    names = ["a", "b-once", "c", "d"]
    for _ in range(2):
        ray_nodes.add_node(num_cpus=1)
    seen = Seen()
    execute_on_fleet(request(tmp_path / "run", names), asked(ray_nodes), seen)
    assert holds_each_cell_once(tmp_path / "run", names)
    attempts = [node for case, node in begun(tmp_path / "run") if case == "b-once"]
    assert len(attempts) == len(set(attempts)) == 2
    assert {record.environment["node"] for record in records(tmp_path / "run") if record.case == "b-once"} == {
        attempts[1]
    }
    assert any("case b-once was lost on node" in warning for warning in seen.warnings)
    assert any("pretending on " in told for told in seen.told)


def test_case_that_kills_three_nodes_is_a_record_and_late_nodes_do_the_rest(ray_nodes, tmp_path):
    names = ["a-deadly", "b", "c"]
    ray_nodes.add_node(num_cpus=1)

    class Adding(Seen):
        def warn(self, sentence):
            super().warn(sentence)
            if "was lost on node" in sentence:
                ray_nodes.add_node(num_cpus=1)

    execute_on_fleet(request(tmp_path / "run", names), asked(ray_nodes), Adding())
    assert holds_each_cell_once(tmp_path / "run", names)
    for record in records(tmp_path / "run"):
        assert (record.status == "crashed") == (record.case == "a-deadly")
        assert record.status == "ok" or "was lost 3 times" in record.error
    assert len({node for case, node in begun(tmp_path / "run") if case == "a-deadly"}) == 3


class Adding(Seen):
    """Adds three nodes when the first case has begun, and lets it go on when all of them were met."""

    def __init__(self, nodes, go):
        super().__init__()
        self._nodes, self._go = nodes, go

    def doing(self, case, backend, what):
        if case == "first-waiting":
            for variables in ({}, {"FLEET_WORK_JAX": "0.0.1"}, {"FLEET_WORK_TARGET": "tpu:v5e"}):
                self._nodes.add_node(num_cpus=1, env_vars=variables, wait=False)
        super().doing(case, backend, what)
        self._look()

    def warn(self, sentence):
        super().warn(sentence)
        self._look()

    def _look(self):
        used = {what for what in self.told if what.startswith("pretending on")}
        if len(used) == 2 and len(self.warnings) == 2:
            self._go.touch()


def test_late_node_is_used_and_node_of_other_versions_or_kind_is_not(ray_nodes, tmp_path):
    names = ["first-waiting", "b", "c", "d"]
    ray_nodes.add_node(num_cpus=1)
    seen = Adding(ray_nodes, tmp_path / GO)
    execute_on_fleet(request(tmp_path / "run", names), asked(ray_nodes), seen)
    assert holds_each_cell_once(tmp_path / "run", names)
    assert len({record.environment["node"] for record in records(tmp_path / "run")}) == 2
    told = "\n".join(seen.warnings)
    assert "jax is 0.0.1, here " in told
    assert "target is tpu:v5e, was cpu:fake" in told


def test_nodes_of_other_versions_alone_are_refused_and_taken_when_asked_for(ray_nodes, tmp_path):
    ray_nodes.add_node(num_cpus=1, env_vars={"FLEET_WORK_JAX": "0.0.1"})
    with pytest.raises(InputError, match=r"no node of the cluster could compute \(.*jax is 0\.0\.1, here"):
        execute_on_fleet(request(tmp_path / "refused", ["a"]), asked(ray_nodes, patience=1.0), Seen())
    assert not (tmp_path / "refused" / RECORDS).exists()
    execute_on_fleet(request(tmp_path / "run", ["a"]), asked(ray_nodes, any_versions=True), Seen())
    assert holds_each_cell_once(tmp_path / "run", ["a"])
    with pytest.raises(InputError, match=r"could compute \(none has a CPU and what --nodes-with asks for\)"):
        execute_on_fleet(request(tmp_path / "none", ["a"]), asked(ray_nodes, patience=1.0, needed=("GPU",)), Seen())
    ray_nodes.add_node(num_cpus=1, env_vars={"FLEET_WORK_TARGET": "tpu:v5e"})
    with pytest.raises(InputError, match=r"several kinds \(cpu:fake, tpu:v5e\); choose with --nodes-with"):
        execute_on_fleet(request(tmp_path / "several", ["a"]), asked(ray_nodes, any_versions=True), Seen())


def lines(out):
    return (out / RECORDS).read_bytes().count(b"\n") if (out / RECORDS).is_file() else 0


def test_driver_that_was_ended_is_resumed_with_each_cell_once(ray_nodes, tmp_path):
    names = [f"{number}-slow" for number in range(24)]
    for _ in range(2):
        ray_nodes.add_node(num_cpus=1)
    out = tmp_path / "run"
    for number in (signal.SIGINT, signal.SIGKILL):
        before = lines(out)
        command = [sys.executable, "-c", DRIVER, str(out), ray_nodes.address, *names]
        driver = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while lines(out) == before and time.monotonic() < deadline:
            time.sleep(0.02)
        driver.send_signal(number)
        driver.communicate(timeout=30)
        assert before < lines(out) < len(names) * len(ROWS)
    kept = (out / RECORDS).read_bytes()
    execute_on_fleet(request(out, names, resume=True), asked(ray_nodes), Seen())
    assert (out / RECORDS).read_bytes().startswith(kept)
    assert holds_each_cell_once(out, names)


def workers():
    """Workers of the nodes, which are processes below this one."""
    below = psutil.Process().children(recursive=True)
    return [process for process in below if "attnsuite.suite.grid.worker" in process.cmdline()]


def test_interrupted_command_leaves_no_worker_on_a_node(ray_nodes, tiny, tmp_path, attnsuite):
    ray_nodes.add_node(num_cpus=1)
    out = tmp_path / "run"
    address = ("--executor", "ray", "--address", ray_nodes.address)
    process = attnsuite.start("run", "--suite", tiny, "--backends", "standard", "--out", out, *address)
    deadline = time.monotonic() + 120
    while not (out / MANIFEST).is_file() or not workers():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running = workers()
    process.send_signal(signal.SIGINT)
    code, _, err = attnsuite.finish(process, seconds=60)
    assert code == 128 + signal.SIGINT
    assert f"go on with: attnsuite run --resume --out {out}" in err
    assert "Traceback" not in err
    assert psutil.wait_procs(running, timeout=20)[1] == []


def test_node_that_cannot_write_gets_no_more_cases(ray_nodes, tmp_path):
    ray_nodes.add_node(num_cpus=1)
    seen = Seen()
    with pytest.raises(InputError, match=r"it lost .*no space left on this node"):
        execute_on_fleet(request(tmp_path / "run", ["a-raising", "b"]), asked(ray_nodes, patience=5.0), seen)


def test_grid_of_another_verb_is_computed_by_case_on_nodes_that_leave_no_files(ray_nodes, tmp_path):
    names = [f"case{number}" for number in range(6)]
    for _ in range(2):
        ray_nodes.add_node(num_cpus=1)
    grid = PretendGrid(request(tmp_path / "run", names))
    kept = execute_grid(grid, Seen(), FleetRequest(address=ray_nodes.address, patience=60.0))
    assert holds_each_cell_once(tmp_path / "run", names)
    where = {record.case: record.environment.get("node") for record in kept}
    assert len(set(where.values())) == 2
    assert all(where[record.case] == record.environment.get("node") for record in kept)
    folders = {Path(tempfile.gettempdir()) / note for record in kept for note in record.notes}
    assert len(folders) == 2
    assert not [folder for folder in folders if folder.exists()]
    with pytest.raises(InputError, match="--resume"):
        execute_grid(grid, Seen(), None)


@pytest.mark.parametrize("verb", ["sharded", "tune", "curves", "compile"])
def test_grid_of_a_verb_travels_to_nodes(verb, tmp_path):
    limits = Limits(10, 2**30)
    grid = {
        "sharded": lambda: sharded.ShardedGrid(out=tmp_path, resume=False),
        "tune": lambda: tuning.TuneGrid(resume=False, request=tuning.TuneRequest(
            backends=("chunked",), cases=tuning.TUNED[:1], target=None, limits=limits, out=tmp_path, command="")),
        "curves": lambda: curves.CurvesGrid(out=tmp_path, resume=False, request=curves.CurvesRequest(
            preset="tiny", backends=("chunked",), steps=1, interpreted_steps=1)),
        "compile": lambda: compile_run.CompileGrid(request=compile_run.CompileRequest(
            cases=tuning.TUNED[:1], searches=(), backends=("chunked",), targets=(Target.named("v5e"),), out=tmp_path,
            limits=limits, cache=tmp_path, command=())),
    }[verb]()  # fmt: skip
    there = pickle.loads(pickle.dumps(grid))  # noqa: S301 (our own)
    assert there == grid
    environment, cells = there.look() if verb != "tune" else ({}, [])
    assert cells or verb == "tune"
    assert there.manifest(environment) == grid.manifest(environment)


def test_search_for_the_longest_length_is_for_one_machine(tmp_path):
    case = ModelCase(kind="model_prefill", model="debug", sequence=64)
    asked = compile_run.CompileRequest(cases=(), searches=(case,), backends=("chunked",), targets=(), out=tmp_path,
                                       limits=Limits(1, 1), cache=tmp_path, command=())  # fmt: skip
    with pytest.raises(InputError, match="--longest asks one compiler after the other"):
        compile_run.execute(asked, Seen(), FleetRequest())


def test_refused_cell_of_a_case_that_no_node_survived_is_refused_all_the_same(tmp_path):
    wanted = request(tmp_path / "run", ["a"])
    fleet = Fleet(wanted, FleetRequest(), Seen())
    fleet._first = Work("here").look(wanted)
    cell = fleet._first[1][0]
    nowhere = dataclasses.replace(cell, mode=None, resolved=None)
    elsewhere = dataclasses.replace(cell, mode="fallback", resolved="chunked")  # chunked is a cell of the case
    given_up = [fleet._given_up(each, ["n1", "n2", "n3"]).status for each in (cell, nowhere, elsewhere)]
    assert given_up == ["crashed", "unsupported", "unsupported"]


def test_no_cluster_is_one_sentence(tmp_path):
    nowhere = FleetRequest(address="nowhere", work=Work)
    with pytest.raises(
        InputError, match=r"no Ray cluster answers at 'nowhere' \(.*\); start one with ray start --head"
    ):
        execute_on_fleet(request(tmp_path / "run", ["a"]), nowhere, Seen())
