"""A grid on several nodes of Ray on one machine: no cell is lost, none is doubled, whatever dies."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import psutil
import pytest

from attnsuite.backends import Target
from attnsuite.suite import compile_run, tuning
from attnsuite.suite.errors import InputError
from attnsuite.suite.grid.execute import execute
from attnsuite.suite.grid.fleet import Fleet, FleetRequest, Member
from attnsuite.suite.grid.running import Limits
from attnsuite.suite.kinds.model_case import ModelCase
from attnsuite.suite.measure.environment import source_digest, versions
from attnsuite.suite.store import MANIFEST, RECORDS, parse_records
from fleet_work import BEGUN, GO, ROWS, PretendGrid, Seen, Work, cluster, record_of, request

pytestmark = pytest.mark.ray

TESTS = Path(__file__).parents[1]
DRIVER = """
import sys
from pathlib import Path
from attnsuite.suite.grid.execute import execute
from attnsuite.suite.grid.fleet import Fleet, FleetRequest
from fleet_work import Seen, Work, request
out, address, *names = sys.argv[1:]
resume = (Path(out) / "run.json").is_file()
execute(request(Path(out), names, resume=resume), Seen(), FleetRequest(address=address, work=Work))
"""

# Fills the object store of every node with objects that stay referenced, until its stdin ends.
FILL = """
import sys
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

@ray.remote(num_cpus=0)
class Filler:
    def fill(self):
        self.held = []
        for size in (2**22, 2**17):
            try:
                while True:
                    self.held.append(ray.put(bytes(size)))
            except ray.exceptions.RayError as error:
                told = type(error).__name__
        return told

ray.init(sys.argv[1], logging_level="ERROR", log_to_driver=False)
alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
fillers = [Filler.options(scheduling_strategy=On(name, soft=False)).remote() for name in alive]
print(*ray.get([filler.fill.remote() for filler in fillers]), flush=True)
sys.stdin.read()
"""
# The command attnsuite, whose nodes make records without measuring.
PRETENDING = """
import functools
from attnsuite.suite import entry
from attnsuite.suite.grid import fleet
from fleet_work import Work
fleet.FleetRequest = functools.partial(fleet.FleetRequest, work=Work)
entry.main()
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
    execute(request(tmp_path / "run", names), seen, asked(ray_nodes))
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

    execute(request(tmp_path / "run", names), Adding(), asked(ray_nodes))
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
    execute(request(tmp_path / "run", names), seen, asked(ray_nodes))
    assert holds_each_cell_once(tmp_path / "run", names)
    assert len({record.environment["node"] for record in records(tmp_path / "run")}) == 2
    told = "\n".join(seen.warnings)
    assert "jax is 0.0.1, here " in told
    assert "target is tpu:v5e, was cpu:fake" in told


def test_nodes_of_other_versions_alone_are_refused_and_taken_when_asked_for(ray_nodes, tmp_path):
    ray_nodes.add_node(num_cpus=1, env_vars={"FLEET_WORK_JAX": "0.0.1"})
    with pytest.raises(InputError, match=r"no node of the cluster could compute \(.*jax is 0\.0\.1, here"):
        execute(request(tmp_path / "refused", ["a"]), Seen(), asked(ray_nodes, patience=1.0))
    assert not (tmp_path / "refused" / RECORDS).exists()
    execute(request(tmp_path / "run", ["a"]), Seen(), asked(ray_nodes, any_versions=True))
    assert holds_each_cell_once(tmp_path / "run", ["a"])
    with pytest.raises(InputError, match=r"could compute \(none has a CPU and what --nodes-with asks for\)"):
        execute(request(tmp_path / "none", ["a"]), Seen(), asked(ray_nodes, patience=1.0, needed=("GPU",)))
    ray_nodes.add_node(num_cpus=1, env_vars={"FLEET_WORK_TARGET": "tpu:v5e"})
    with pytest.raises(InputError, match=r"several kinds \(cpu:fake, tpu:v5e\); choose with --nodes-with"):
        execute(request(tmp_path / "several", ["a"]), Seen(), asked(ray_nodes, any_versions=True))


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
    execute(request(out, names, resume=True), Seen(), asked(ray_nodes))
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


def actors():
    """Processes of nodes that compute."""
    below = psutil.Process().children(recursive=True)
    return [process for process in below if process.name().startswith("ray::Work")]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_signal_ends_the_fleet_and_keeps_what_is_done_although_ray_has_handlers_of_its_own(name, ray_nodes, tmp_path):
    ray_nodes.add_node(num_cpus=1)
    names = [f"{number}-slow" for number in range(24)]
    suite, out = tmp_path / "slow.toml", tmp_path / "run"
    case = '[[case]]\nkind = "op_forward"\nsequence = 16\nheads = 1\nkv_heads = 1\nname = "{}"\n'
    suite.write_text("".join(map(case.format, names)))
    words = ("run", "--suite", suite, "--backends", ",".join(ROWS), "--out", out, "--executor", "ray")
    command = [sys.executable, "-c", PRETENDING, *map(str, words), "--address", ray_nodes.address]
    driver = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not lines(out) and time.monotonic() < deadline:
        time.sleep(0.02)
    running = actors()
    driver.send_signal(signal.Signals[name])
    _, err = driver.communicate(timeout=30)
    assert driver.returncode == 128 + signal.Signals[name]
    assert running
    assert psutil.wait_procs(running, timeout=20)[1] == []
    assert f"go on with: attnsuite run --resume --out {out}" in err
    assert "Traceback" not in err
    assert 0 < len(records(out)) < len(names) * len(ROWS)


@pytest.mark.parametrize("spills", [True, False])
def test_full_object_store_loses_no_cell_and_changes_no_record(spills, tmp_path):
    names = ["a-large", *(f"case{number}" for number in range(12))]
    # With this threshold Ray takes the disk for full, too. Messages below 100 KB never enter the store; the large one
    # shows that the store is full: it passes only where Ray may spill to the disk.
    settings = {"local_fs_capacity_threshold": 0.01, "automatic_object_spilling_enabled": spills}
    seen = Seen()
    with cluster(2, store=80 * 2**20, **settings) as nodes:
        command = [sys.executable, "-c", FILL, nodes.address]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as filler:
            assert filler.stdout.readline().split() == ["OutOfDiskError"] * 3
            execute(request(tmp_path / "run", names), seen, asked(nodes))
            filler.communicate()
    assert holds_each_cell_once(tmp_path / "run", names)
    lost = [record for record in records(tmp_path / "run") if record.status != "ok"]
    assert {record.case for record in lost} == (set() if spills else {"a-large"})
    assert spills == (not any("OutOfDiskError" in warning for warning in seen.warnings))
    kept = {record.key: record for record in records(tmp_path / "run") if record not in lost}
    here = {cell.key: record_of(cell, "here") for cell in Work("here").look(request(tmp_path, names))[1]}
    same = {"environment": {"node": "here"}, "notes": ()}
    assert {key: dataclasses.replace(record, **same) for key, record in kept.items()} == {
        key: here[key] for key in kept
    }


def other_jax():
    """A version that the driver does not have."""
    return next(version for version in ("0.10.1", "0.10.0") if version != metadata.version("jax"))


def test_run_of_another_jax_is_a_run_of_its_own_that_compares(ray_nodes, tiny, tmp_path, attnsuite, monkeypatch):
    monkeypatch.delenv("UV_CONSTRAINT", raising=False)  # tox's, for the driver's version
    ray_nodes.add_node(num_cpus=1)
    version, out, own = other_jax(), tmp_path / "other", tmp_path / "own"
    words = ("run", "--suite", tiny, "--cases", "first", "--backends", "standard")
    ray = ("--executor", "ray", "--address", ray_nodes.address)
    code, _, err = attnsuite.finish(
        attnsuite.start(*words, "--out", out, *ray, "--packages", f"jax=={version},jaxlib=={version}")
    )
    assert code == 0, err
    manifest = json.loads((out / MANIFEST).read_text())
    assert {record.status for record in records(out)} == {"ok"}
    for found in (manifest["versions"], *(record.environment["versions"] for record in records(out))):
        assert found == versions() | {"jax": version, "jaxlib": version}
    code, _, err = attnsuite.finish(attnsuite.start("run", "--resume", "--out", out, *ray))
    assert code == 2
    assert "cannot be resumed, since its figures would not compare: versions was" in err
    assert attnsuite.finish(attnsuite.start(*words, "--out", own, *ray))[0] == 0
    assert {record.environment["versions"]["jax"] for record in records(own)} == {metadata.version("jax")}
    code, told, err = attnsuite.finish(attnsuite.start("compare", own, out))
    assert code == 0, err
    assert version in told


def test_package_that_cannot_be_installed_is_told_with_the_reason(ray_nodes, tmp_path, monkeypatch):
    monkeypatch.delenv("UV_CONSTRAINT", raising=False)
    monkeypatch.setenv("RUNTIME_ENV_RETRY_TIMES", "1")
    ray_nodes.add_node(num_cpus=1)
    wanted = asked(ray_nodes, packages={"jax": "0.0.99"}, patience=1.0)
    expected = r"--packages jax==0\.0\.99 cannot be installed there: .*no version of jax==0\.0\.99"
    with pytest.raises(InputError, match=expected):
        execute(request(tmp_path, ["a"]), Seen(), wanted)


@pytest.mark.parametrize(
    ("packages", "found", "told"),
    [
        ({"jax": "0.0.1"}, {"jax": "0.0.1"}, None),
        ({"jax": "0.0.1"}, {"jax": "0.0.1", "jaxlib": "0.0.1"}, r"jaxlib is 0.0.1, here .*; --any-versions takes"),
        ({"jax": "0.0.1"}, {}, r"jax is .*, asked for 0.0.1"),
        ({"kvax": "0.0.1"}, {}, r"kvax is missing, asked for 0.0.1"),
        ({}, {"jax": "0.0.1"}, r"jax is 0.0.1, here .*; --any-versions takes"),
    ],
)
def test_node_has_the_versions_that_were_asked_for_and_else_those_of_the_driver(packages, found, told, tmp_path):
    seen = Seen()
    fleet = Fleet(request(tmp_path / "run", ["a"]), FleetRequest(packages=packages), seen)
    its = {name: version for name, version in versions().items() if name != "kvax"} | found
    member = Member("node", "idle", environment={"versions": its, "source": source_digest()})
    fleet._admit(member)
    assert member.state == ("idle" if told is None else "refused")
    assert [bool(re.search(told, warning)) for warning in seen.warnings] == ([] if told is None else [True])


def test_node_that_cannot_write_gets_no_more_cases(ray_nodes, tmp_path):
    ray_nodes.add_node(num_cpus=1)
    seen = Seen()
    with pytest.raises(InputError, match=r"it lost .*no space left on this node"):
        execute(request(tmp_path / "run", ["a-raising", "b"]), seen, asked(ray_nodes, patience=5.0))


def test_grid_of_another_verb_is_computed_by_case_on_nodes_that_leave_no_files(ray_nodes, tmp_path):
    names = [f"case{number}" for number in range(6)]
    for _ in range(2):
        ray_nodes.add_node(num_cpus=1)
    wanted = request(tmp_path / "run", names)
    grid = PretendGrid(request=wanted, out=wanted.out, limits=wanted.limits)
    kept = execute(grid, Seen(), FleetRequest(address=ray_nodes.address, patience=60.0))
    assert holds_each_cell_once(tmp_path / "run", names)
    where = {record.case: record.environment.get("node") for record in kept}
    assert len(set(where.values())) == 2
    assert all(where[record.case] == record.environment.get("node") for record in kept)
    folders = {Path(tempfile.gettempdir()) / note for record in kept for note in record.notes}
    assert len(folders) == 2
    assert not [folder for folder in folders if folder.exists()]
    with pytest.raises(InputError, match="--resume"):
        execute(grid, Seen(), None)


@pytest.mark.parametrize("verb", ["tune", "compile"])
def test_grid_of_a_verb_travels_to_nodes(verb, tmp_path):
    limits = Limits(10, 2**30)
    grid = {
        "tune": lambda: tuning.TuneGrid(
            backends=("chunked",), cases=tuning.TUNED[:1], target=None, limits=limits, out=tmp_path, command=""),
        "compile": lambda: compile_run.CompileGrid(
            cases=tuning.TUNED[:1], searches=(), backends=("chunked",), targets=(Target.named("v5e"),), out=tmp_path,
            limits=limits, cache=tmp_path, command=()),
    }[verb]()  # fmt: skip
    there = pickle.loads(pickle.dumps(grid))  # noqa: S301 (our own)
    assert there == grid
    environment, cells = there.look() if verb != "tune" else ({}, [])
    assert cells or verb == "tune"
    assert there.manifest(environment, len(cells)) == grid.manifest(environment, len(cells))


def test_search_for_the_longest_length_is_for_one_machine(tmp_path):
    case = ModelCase(kind="model_prefill", model="debug", sequence=64)
    asked = compile_run.CompileGrid(searches=(("sequence", case),), backends=("chunked",), targets=(), out=tmp_path,
                                    limits=Limits(1, 1), cache=tmp_path, command=())  # fmt: skip
    with pytest.raises(InputError, match="--longest asks one compiler after the other"):
        compile_run.compile_all(asked, Seen(), FleetRequest())


def test_refused_cell_of_a_case_that_no_node_survived_is_refused_all_the_same(tmp_path):
    wanted = request(tmp_path / "run", ["a"])
    fleet = Fleet(wanted, FleetRequest(), Seen())
    fleet._first = Work("here").look(wanted)
    cell = fleet._first[1][0]
    nowhere = dataclasses.replace(cell, mode=None, resolved=None)
    elsewhere = dataclasses.replace(cell, mode="fallback", resolved="chunked")  # chunked is a cell of the case
    given_up = [fleet._lost_record(each, ["n1", "n2", "n3"]).status for each in (cell, nowhere, elsewhere)]
    assert given_up == ["crashed", "unsupported", "unsupported"]


def test_no_cluster_is_one_sentence(tmp_path):
    nowhere = FleetRequest(address="nowhere", work=Work)
    with pytest.raises(
        InputError, match=r"no Ray cluster answers at 'nowhere' \(.*\); start one with ray start --head"
    ):
        execute(request(tmp_path / "run", ["a"]), Seen(), nowhere)
