"""Attention that is dealt to many devices is the same attention: eight devices of the host, and two real processes.

Rows of the suite `sharded`, and broken ones, in processes of their own: JAX counts its devices once per process.
"""

import contextlib
import dataclasses
import json
import re
from pathlib import Path
from unittest import mock

import pytest

from attnsuite.backends import names
from attnsuite.suite.cell import Request
from attnsuite.suite.errors import InputError
from attnsuite.suite.grid.references import References
from attnsuite.suite.grid.run_grid import RunGrid
from attnsuite.suite.grid.running import Limits
from attnsuite.suite.kinds import make_case, problem_of
from attnsuite.suite.kinds.sharded_case import SHARDED, ShardedCase
from attnsuite.suite.measure.memory import machine_bytes
from attnsuite.suite.store import RECORDS, parse_records
from attnsuite.suite.suites import find_suite
from landing import is_landing
from script import run

PUBLISHED = Path(__file__).parents[2] / "reports" / "published" / "sharded"
DEVICES = 8
ALL, LONG = "data 2 x heads 2 x context 2", "heads 2 x context 4"

SUITE = find_suite("sharded")
ROWS = [cell for case in SUITE.cases for cell in SHARDED.cells(case, Request(rows=names(), cases=SUITE.cases))]


def cell_of(backend, mesh, problem, exchange="gather"):
    """The cell of a backend on a mesh; ``exchange`` counts where the mesh divides the context."""
    case = ShardedCase(problem=problem, mesh=mesh, exchange=exchange if "context" in mesh else None)
    (cell,) = SHARDED.cells(case, Request(rows=(backend,), cases=(case,)))
    return cell


# The command computes more of them; these are one of each kind: a ring by positions, keys that are gathered, and an
# interpreted kernel on three axes. A ring by slots goes through two processes below. That keys may be gathered is also
# in tests/backends/test_sharding.py.
COMPUTED = (cell_of("chunked", LONG, "packed, window, soft cap", "ring"),)
if not is_landing():
    COMPUTED += (
        cell_of("standard", LONG, "packed, window, soft cap"),
        cell_of("splash", ALL, "packed", "ring"),
        cell_of("chunked", ALL, "causal bfloat16"),
        cell_of("chunked", LONG, "causal bfloat16", "ring"),
    )
CHOSEN = (
    *COMPUTED,
    *(row for row in ROWS if row.row == "kascade" or row.case.problem == "one KV head"),
    cell_of("splash", ALL, "causal"),
    cell_of("splash", ALL, "balanced", "ring"),
    cell_of("standard", ALL, "causal", "ring"),
)
REFUSED = {
    ("chunked", "one KV head"): "num_kv_heads=1 cannot be sharded over the 2 devices of heads='heads'",
    ("kascade", "causal"): "kascade selects in one layer what the next ones attend to",
    ("splash", "causal"): "the share of one device with positions of its own: an array of explicit positions",
    ("splash", "balanced"): "explicit positions with query_length=160",
    ("standard", "causal"): "standard cannot attend to a part of the keys",
}


def compute(*cells):
    """The records of these cells."""
    limits = Limits(600.0, int(0.7 * machine_bytes()))
    grid = RunGrid(suite="sharded", cases=(), backends=(), out=Path(), limits=limits)
    with contextlib.closing(References(grid.limits.seconds)) as references:
        return list(grid.compute(cells, grid.context({}, mock.Mock(), references)))


@pytest.fixture(scope="module")
def computed():
    return compute(*CHOSEN)


def named(record):
    """Backend and problem of a record."""
    return record.requested, record.problem["problem"]


def test_chosen_rows_are_rows_of_the_command():
    assert {row.key for row in CHOSEN} <= {row.key for row in ROWS}


def test_case_runs_the_backends_that_it_names():
    fields = {"kind": "sharded", "problem": "causal", "mesh": "data 2"}
    case, named = make_case(fields), make_case({**fields, "backends": "splash, chunked"})
    rows = ("chunked", "standard")
    assert [cell.row for cell in SHARDED.cells(case, Request(rows=rows, cases=()))] == ["chunked", "standard"]
    assert [cell.row for cell in SHARDED.cells(named, Request(rows=rows, cases=()))] == ["chunked"]
    with pytest.raises(InputError, match="backend 'fast' is not registered; use"):
        make_case({**fields, "backends": "fast"})


def test_every_share_gives_what_one_device_gives(computed):
    ran = [row for row in computed if named(row) not in REFUSED or row.status != "unsupported"]
    assert [(*named(row), row.status, row.error) for row in ran] == [(*named(row), "ok", None) for row in ran]
    assert len(ran) == len(COMPUTED)


def test_every_device_has_a_share_of_the_output(computed):
    for row in computed:
        if row.status == "ok":
            shape = make_case(row.problem).shape
            expected = (2 // shape.get("data", 1), 320 // shape.get("context", 1), 4 // shape.get("heads", 1), 32)
            assert (row.devices, row.facts.shape) == (DEVICES, expected)


def test_what_cannot_be_dealt_is_refused_with_the_reason(computed):
    refused = {named(row): " ".join(row.reasons) for row in computed if row.status == "unsupported"}
    assert {(row.resolved, row.mode) for row in computed if row.status == "unsupported"} == {(None, None)}
    assert set(refused) == set(REFUSED)
    for key, words in REFUSED.items():
        assert words in refused[key]


@pytest.mark.thorough
def test_two_processes_give_what_one_device_gives():
    """A ring by slots goes through both; rings by position are among the chosen rows, on eight devices."""
    joined = [row for row in ROWS if row.case.processes == 2 and row.case.exchange == "ring"]
    (row,) = compute(joined[0])
    assert (row.status, row.error, row.devices) == ("ok", None, 4)


BROKEN = """
import dataclasses, json, sys
import jax, jax.numpy as jnp
from attnsuite.backends import sharding, ring
from attnsuite.suite.cell import Means
from attnsuite.suite.cell import Request
from attnsuite.suite.kinds.sharded_case import SHARDED, ShardedCase

ALL, LONG = "data 2 x heads 2 x context 2", "heads 2 x context 4"

def status(case, module, name, broken):
    backend, problem, mesh, exchange = case
    case = ShardedCase(problem=problem, mesh=mesh, exchange=exchange)
    (cell,) = SHARDED.cells(case, Request(rows=(backend,), cases=(case,)))
    whole = getattr(module, name)
    setattr(module, name, broken(whole))
    try:
        found = SHARDED.prepare(cell, case, Means(reference=None, memory_limit=2**40)).outcome
    finally:
        setattr(module, name, whole)
    wrong = [q for q, x in found.accuracy.items() if x.max_error is None or x.max_error > x.allowed]
    return [found.status, wrong]

def without_offset(whole):
    def place(layout, axis, batch, sides):
        rows = {name: jnp.arange(length, dtype=jnp.int32)[None] for name, length in sides.items()}
        return dataclasses.replace(layout, **{name: jnp.repeat(row, batch, 0) for name, row in rows.items()})
    return place

class SkipsAStep:
    fori_loop = staticmethod(lambda low, high, *rest: jax.lax.fori_loop(low + 1, high, *rest))
    def __getattr__(self, name):
        return getattr(jax.lax, name)

found = {
    "wrong positions": status(("standard", "packed, window, soft cap", LONG, "gather"),
        ring, "with_positions", without_offset),
    "a step left out": status(("chunked", "causal", ALL, "ring"), ring, "lax", lambda whole: SkipsAStep()),
    "weights left out": status(("chunked", "causal", ALL, "ring"), ring, "put_together",
        lambda whole: lambda a, b: (a[0] + b[0], *whole(a, b)[1:])),
    "own gradients only": status(("standard", "causal", ALL, "gather"), jax.lax, "psum_scatter",
        lambda whole: lambda x, axis, **_: x[:, :x.shape[1] // 2]),
}

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from attnsuite import backends, models
from attnsuite.models.sharding import shard_parameters

model = models.Transformer(models.ModelConfig.from_preset("tiny"))
tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 64)), jnp.int32)
mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "context", "model"))
axes = sharding.MeshAxes("data", "model", "context", "ring")
backend = sharding.Sharded(backends.get("chunked"), mesh, axes)
backends.register(backend)
expected = model(tokens, backend="chunked")
dealt = models.Transformer(model.config, shard_parameters(model.arrays(), mesh, heads="model", rest="data"))
placed = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("data", "context")))
logits = dealt(placed, backend=backend.name)
found["model"] = float(jnp.abs(logits - expected).max() / jnp.abs(expected).max())
found["model's devices"] = len(logits.sharding.device_set)
found["share of a matrix"] = dealt.arrays()["layers"][0]["down_proj"].sharding.shard_shape((192, 512))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def broken():
    done = run(BROKEN, JAX_NUM_CPU_DEVICES=str(DEVICES))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]) | {"warnings": done.stderr}


@pytest.mark.thorough
def test_what_goes_wrong_between_devices_is_seen(broken):
    assert broken["wrong positions"] == ["wrong", ["dk", "dq", "dv", "out"]]
    assert broken["a step left out"][0] == "wrong"
    assert broken["weights left out"][0] == "wrong"
    assert broken["own gradients only"] == ["wrong", ["dk", "dv"]]


@pytest.mark.thorough
def test_model_takes_a_sharded_backend_by_its_name(broken):
    assert broken["model"] < 1e-5
    assert broken["model's devices"] == DEVICES
    assert broken["share of a matrix"] == [96, 256]
    assert "Involuntary full rematerialization" not in broken["warnings"]  # hidden states lie as the tokens do


@pytest.mark.thorough
def test_process_that_dies_is_told_with_its_last_words(monkeypatch):
    """Its row has a record, and the next one is computed by a new process."""
    known = cell_of("standard", "data 1", "causal")
    first, second = compute(dataclasses.replace(known, row="no-such-backend"), known)
    assert first.status == "crashed"
    assert "'no-such-backend' is not registered" in first.error
    assert second.status == "ok"
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag")
    (dead,) = compute(known)
    assert dead.status == "crashed"
    assert re.search(r"before it answered|died by SIG\w+", dead.error)
    assert re.search(r"it last wrote: .*--xla_no_such_flag", dead.error)


def test_published_rows_are_those_that_there_are():
    records, _, _ = parse_records(PUBLISHED / RECORDS)
    published = {record.key.replace(record.target, "here"): record.problem for record in records}
    assert published == {cell.key.replace(cell.target, "here"): _without_backends(cell) for cell in ROWS}
    assert {record.status for record in records} == {"ok", "unsupported"}


def _without_backends(cell):
    """The problem as it was recorded before a case could name its backends."""
    return {name: value for name, value in problem_of(cell.case).items() if name != "backends"}
