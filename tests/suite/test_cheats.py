"""Cheats of a benchmark do not get a time: ``attnsuite run`` catches each of ``cheats.py``, and not the honest one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import psutil
import pytest

from attnsuite.backends import oracle
from attnsuite.suite.cell import Outcome
from attnsuite.suite.grid import work
from attnsuite.suite.grid.process import Worker
from attnsuite.suite.kinds import kind_of, parts
from attnsuite.suite.kinds.inputs import make_inputs
from attnsuite.suite.kinds.op_case import OpCase, spec_of
from attnsuite.suite.measure import arrays, plausible
from attnsuite.suite.measure.program import Draw, renewed
from attnsuite.suite.record import Machine
from attnsuite.suite.subprocess_function import found_out
from landing import swept

FILE = Path(__file__).with_name("cheats.py")
FORWARD = '[[case]]\nkind = "op_forward"\nsequence = 512\nheads = 2\nkv_heads = 2\n'
GRADIENT = '[[case]]\nkind = "op_forward_backward"\nsequence = 512\nheads = 2\nkv_heads = 2\n'
# Just beyond what the oracle takes: it judges at 2048.
LONG = '[[case]]\nkind = "op_forward"\nsequence = 4096\nheads = 9\nkv_heads = 9\n'
RATES = '{"matmul_flops": {"float32": 1e11}, "copy_bytes_per_second": 1e10, "read_bytes_per_second": 1e10}'
CALLER = '[[case]]\nkind = "caller"\nway = "jit"\nsequence = 512\nheads = 2\nkv_heads = 2\noperand = "causal"\n'
TIMED, DIFFERENT = "a timed call gave wrong numbers", "wrong numbers against the reference"

# Which cheats run together, on which case, and what their records say.
GROUPS = {
    "right while judged": (
        FORWARD,
        {
            "wrong_from_the_fourth_call": TIMED,
            "finds_the_inputs": DIFFERENT,
            "zeros_called_approximate": "declared approximate",
        },
    ),
    "right while judged, in other ways": (
        FORWARD,
        {"counts_calls": DIFFERENT, "reads_the_choice": TIMED, "looks_ahead": TIMED},
    ),
    "one answer for all inputs": (
        FORWARD,
        {"remembers": DIFFERENT, "constant_in_run": DIFFERENT, "draws_the_inputs_again": DIFFERENT},
    ),
    "as people call it": (
        CALLER,
        {"remembers": DIFFERENT, "wrong_from_the_fourth_call": TIMED, "finds_the_inputs": DIFFERENT},
    ),
    "constant gradients": (GRADIENT, {"constant_gradients": DIFFERENT}),
    "right where the oracle judges": (LONG, {"zeros_at_length": TIMED}),
    "what judges": (
        FORWARD,
        {
            "reads_the_reference": DIFFERENT,
            "overwrites_the_reference": DIFFERENT,
            "replaces_the_judge": DIFFERENT,
            "replaces_the_sampler": "its outputs cannot be read",
            "replaces_the_call": DIFFERENT,
            "answers_in_its_name": "wrote an answer in the name",
        },
    ),
}
MEMORY = ("memory_in_a_child", "memory_before_the_baseline")


def run(folder: Path, case: str, names: list[str], *flags: str) -> dict[str, dict]:
    """The records of a run of these functions, by function."""
    suite = folder / "suite.toml"
    suite.write_text(case)
    (folder / "run").mkdir()
    (folder / "run/machine.json").write_text(RATES)  # else each run measures the machine, for ten seconds
    rows = ",".join(f"{FILE}:{name}" for name in names)
    command = [sys.executable, "-m", "attnsuite", "run", "--suite", str(suite), "--backends", rows]
    done = subprocess.run(
        [*command, "--out", str(folder / "run"), "--sample-seconds", "0.01", *flags],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "CHEATS_RUN": str(folder)},
        timeout=600,
    )
    assert (folder / "run/records.jsonl").is_file(), done.stderr
    records = map(json.loads, (folder / "run/records.jsonl").read_text().splitlines())
    return {record["requested"].rpartition(":")[2]: record for record in records}


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
    """Folder and records of one run: what attacks the judge, what may be replaced, takes memory, or outlives it."""
    folder = tmp_path_factory.mktemp("beside")
    others = ("replaces_the_clock", "replaces_the_wait", "leaves_a_child", *MEMORY)
    return folder, run(folder, FORWARD, ["honest", *GROUPS["what judges"][1], *others], "--cell-memory", "2GiB")


@pytest.mark.parametrize("group", swept(GROUPS, ("right while judged",)))
def test_a_cheat_is_caught_and_gets_no_time(tmp_path, group, request):
    case, cheats = GROUPS[group]
    if group == "what judges":
        _, found = request.getfixturevalue("beside")
        control = ["honest"]
    else:
        control = ["declared_honest"] * (case != FORWARD)  # "what judges" has the control of that case
        found = run(tmp_path, case, [*control, *cheats])
    for name in control:
        assert found[name]["status"] == "ok"
        assert found[name]["samples"]
    for name, said in cheats.items():
        assert found[name]["status"] in ("wrong", "crashed")
        assert said in found[name]["error"]
        assert not found[name]["samples"]


@pytest.mark.thorough
def test_what_is_replaced_in_the_process_changes_no_time(beside):
    """The clock and the wait are taken before."""
    _, found = beside
    for name in ("replaces_the_clock", "replaces_the_wait"):
        assert min(found[name]["samples"]) > 0.2 * min(found["honest"]["samples"])


@pytest.mark.thorough
def test_memory_that_is_taken_elsewhere_counts(beside):
    _, found = beside
    assert found["memory_in_a_child"]["status"] == "oom"
    assert found["memory_before_the_baseline"]["memory"]["process_high_water"] >= 2**30
    assert found["honest"]["memory"]["process_high_water"] < 2**28


@pytest.mark.thorough
def test_a_child_that_outlives_the_run_can_write_nowhere(beside):
    folder, found = beside
    assert found["leaves_a_child"]["status"] == "ok"
    assert not (folder / "mark").exists(), "some process ran the function unconfined"
    assert not [p.pid for p in psutil.process_iter(["cmdline"]) if str(folder) in (p.info["cmdline"] or ["", ""])[-1:]]


def test_what_a_function_starts_is_stopped_while_another_is_timed_and_ends_with_it(tmp_path):
    """Also where it left its group and its parent has ended."""
    with Worker(2**34, {"CHEATS_RUN": str(tmp_path)}, [str(FILE)]) as worker:
        worker.ask(60.0, work.confined)
        before = {p.pid for p in psutil.process_iter()}
        worker.ask(120.0, found_out, f"{FILE}:starts_a_daemon")
        found = [p for p in psutil.process_iter(["cmdline"]) if p.pid not in before]
        daemons = [p for p in found if (p.info["cmdline"] or [])[-1:] == ["daemon"]]
        assert _states_within_10_seconds(daemons, psutil.STATUS_STOPPED) == {psutil.STATUS_STOPPED}
    assert _states_within_10_seconds(daemons, psutil.STATUS_ZOMBIE) <= {psutil.STATUS_ZOMBIE}


def _states_within_10_seconds(processes, wanted):
    """The states of those that still exist, once all are ``wanted``: a signal arrives when its process runs next."""
    end = time.monotonic() + 10
    while (states := set(map(_state, processes)) - {None}) - {wanted} and time.monotonic() < end:
        time.sleep(0.01)
    return states


def _state(process):
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return None


def test_compile_loads_a_function_confined(tmp_path):
    """It is called with small arrays when it is loaded, compiler or not."""
    (tmp_path / "suite.toml").write_text(FORWARD)
    flags = {"backends": f"{FILE}:leaves_a_child", "targets": "h100", "suite": "suite.toml", "out": "o", "cache": "c"}
    command = [sys.executable, "-m", "attnsuite", "compile", *(f"--{name}={word}" for name, word in flags.items())]
    done = subprocess.run(
        [*command, "--schedule"],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "CHEATS_RUN": str(tmp_path)},
        cwd=tmp_path,
        timeout=300,
    )
    (record,) = map(json.loads, (tmp_path / "o/records.jsonl").read_text().splitlines())
    assert record["status"] in ("ok", "unsupported"), done.stderr
    assert work.UNCONFINED not in record["notes"]
    assert not (tmp_path / "mark").exists()


CONFINED = """
import os, socket, sys
from pathlib import Path
from attnsuite.suite.grid.confine import confine, readable_beside
own, other = map(Path, sys.argv[1:])
assert confine([own], readable_beside([]))
(own / "x").write_text("mine")
for what in (
    lambda: (other / "x").write_text("x"),
    lambda: (other / "here").read_text(),
    lambda: Path("records.jsonl").write_text(""),
    lambda: os.kill(os.getppid(), 0),
    lambda: socket.create_server(("127.0.0.1", 0)),
):
    try:
        what()
        print("done")
    except PermissionError:
        print("no")
"""


def test_a_confined_process_writes_in_its_own_folder_alone_and_reads_no_other(tmp_path):
    """The control is the same process without confinement."""
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    other.mkdir()
    (other / "here").write_text("a reference")
    for code, said in ((CONFINED, "no"), (CONFINED.replace("assert confine([own], readable_beside([]))", ""), "done")):
        command = [sys.executable, "-P", "-c", code, str(own), str(other)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        answers = done.stdout.split()
        assert answers == [said] * 5, done.stderr


@pytest.mark.parametrize(
    ("spent", "waited", "is_lie"), [(1.0, 1.1, False), (0.4, 0.55, False), (0.001, 1.0, True), (0.3, 1.0, True)]
)
def test_a_clock_that_another_process_contradicts_is_a_lie(spent, waited, is_lie):
    assert (plausible.clock(spent, waited, requests=10) is not None) is is_lie


def test_a_call_faster_than_the_machine_is_implausible():
    machine = Machine(matmul_flops={"float32": 1e11}, read_bytes_per_second=1e10)
    work = Outcome(flops=1e9, bytes_moved=1e8)  # 5 ms at twice the rate of products; 1 ms from a cache
    assert "needs at least 5 ms" in str(plausible.floor([0.004] * 5, work, "float32", machine))
    assert plausible.floor([0.0051] * 5, work, "float32", machine) is None
    assert "needs at least 1 ms" in str(plausible.floor([0.0009], Outcome(bytes_moved=1e8), "bfloat16", machine))


def test_a_file_of_outputs_is_read_only_if_it_is_what_it_says(tmp_path):
    kept = {"out": np.arange(6, dtype=np.float32).reshape(2, 3).T, "dq": np.ones((2, 2), ml_dtypes.bfloat16)}
    kept["loss"] = np.float32(2.5) * np.ones(())  # a number has no axis
    arrays.save(tmp_path / "right", kept)
    for name, found in arrays.load(tmp_path / "right").items():
        assert (found.dtype, found.shape) == (kept[name].dtype, kept[name].shape)
        assert (found == kept[name]).all()
    written = (tmp_path / "right").read_bytes()
    for spoilt in (written + b"x", written[:-1], b"{}\n", b"", written.replace(b"float32", b"object ")):
        (tmp_path / "spoilt").write_bytes(spoilt)
        with pytest.raises(ValueError):  # noqa: PT011 (of several readers)
            arrays.load(tmp_path / "spoilt")
    (tmp_path / "link").symlink_to(tmp_path / "right")
    with pytest.raises(OSError, match="symbolic"):
        arrays.load(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="no plain file"):
        arrays.load(tmp_path / "pipe")


CASES = (
    OpCase(kind="op_forward_backward", sequence=160, heads=4, kv_heads=2, batch=2),
    OpCase(kind="op_forward", sequence=160, heads=4, kv_heads=2, window_size=40, kv_layout="HND"),
    OpCase(kind="op_forward_backward", sequence=160, heads=2, kv_heads=2, causal=False, documents=3, value_head_dim=32),
    OpCase(kind="op_forward", sequence=160, heads=2, kv_heads=2, causal=False, mask="causal | prefix(64)"),
    OpCase(kind="op_decode", sequence=160, heads=4, kv_heads=2, kv_layout="HND"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("choice", swept((0, 1, 2, 3), (1,)))
def test_a_part_of_a_problem_is_that_part_of_the_whole(case, choice, monkeypatch):
    """Against the oracle on the whole problem; a part of another draw is not."""
    monkeypatch.setattr(parts, "ENTRIES", 20 * case.sequence * case.heads // case.kv_heads)
    draw = Draw(3, 2)
    inputs = make_inputs(case, draw)
    tensors = inputs.query, inputs.key, inputs.value
    whole = {"out": oracle.forward(spec_of(case), inputs.layout, *tensors)}
    if case.needs_grad:
        whole |= oracle.gradients(spec_of(case), inputs.layout, *tensors, inputs.d_out)
    outputs = {name: jnp.asarray(x, case.dtype) for name, x in whole.items()}
    errors = kind_of(case.kind).recheck(case, outputs, draw, choice)
    assert all(error.passed for error in errors.values()), errors
    assert not any(error.passed for error in kind_of(case.kind).recheck(case, outputs, Draw(3, 1), choice).values())


@pytest.mark.parametrize("choice", [0, 1, 2, 3])
def test_a_part_meets_a_block_of_wrong_rows(choice, monkeypatch):
    case = OpCase(kind="op_forward", sequence=512, heads=2, kv_heads=2)
    monkeypatch.setattr(parts, "ENTRIES", 64 * case.sequence)
    inputs = make_inputs(case, Draw(3, 2))
    out = oracle.forward(spec_of(case), inputs.layout, inputs.query, inputs.key, inputs.value)
    spoilt = {"out": jnp.asarray(out, case.dtype).at[:, 256:320].set(0)}
    assert not kind_of(case.kind).recheck(case, spoilt, Draw(3, 2), choice)["out"].passed


def test_inputs_are_new_in_every_call_and_the_same_in_every_process():
    arrays_of = [make_inputs(CASES[0], Draw(5, call)).key for call in (0, 1, 0)]
    assert (arrays_of[0] == arrays_of[2]).all()
    assert float(jnp.mean(arrays_of[0] == arrays_of[1])) < 0.1
    three, four = (renewed(make_inputs_of(count), Draw(5)) for count in (3, 4))
    assert all((a == b).all() for a, b in zip(three, four, strict=False)), "a forward pass shares a reference"


def make_inputs_of(count):
    inputs = make_inputs(CASES[0])
    return (inputs.query, inputs.key, inputs.value, inputs.d_out)[:count]


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "beside the judge"])
def test_a_function_cannot_reach_its_judge(tmp_path, apart):
    """Beside the judge, as it once was, the same functions of zeros are right."""
    names = ["honest", "answer_in_its_frames", "zeros_and_the_judge_replaced"]
    script = f"""
from attnsuite.suite.grid import work
from attnsuite.suite.kinds.conformance_case import CONFORMANCE, ConformanceCase, judged
from attnsuite.suite.kinds import problem_of
from attnsuite.suite.cell import Cell
from attnsuite.backends import Target
type(CONFORMANCE).calls_in_subprocess = {apart}
case = ConformanceCase(name="gqa-1")
for name in {names}:
    row = "{FILE}:" + name
    cell = Cell(case=case, row=row, target=str(Target.here()), resolved=row,
                mode="native", exact=True)
    outcome = work.prepare(cell, None, 2**34, None, True)["outcome"]
    print(name, outcome.status, "unconfined" if work.UNCONFINED in outcome.notes else "confined")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300)
    found = {name: rest for name, *rest in map(str.split, done.stdout.splitlines())}
    status, place = ("wrong", "confined") if apart else ("ok", "unconfined")
    assert found == {name: ["ok" if name == "honest" else status, place] for name in names}, done.stderr
