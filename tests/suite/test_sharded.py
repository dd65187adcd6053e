"""Attention that is dealt to many devices is the same attention: eight devices of the host, and two real processes.

Rows of `attnsuite sharded`, and broken ones, in processes of their own: JAX counts its devices once per process.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnsuite.suite import sharded
from attnsuite.suite.errors import InputError
from attnsuite.suite.sharded import DEVICES, ROWS, ROWS_OF_PROCESSES, Row

PUBLISHED = Path(__file__).parents[2] / "reports" / "published" / "sharded"
ALL, LONG = {"data": 2, "heads": 2, "context": 2}, {"heads": 2, "context": 4}

# The command computes more of them; these are one of each kind.
CHOSEN = (
    Row("standard", LONG, "packed, window, soft cap"),
    Row("chunked", ALL, "causal bfloat16"),
    Row("chunked", LONG, "causal bfloat16", "ring"),
    Row("chunked", LONG, "packed, window, soft cap", "ring"),
    Row("splash", ALL, "packed", "ring", "interpret"),
    *(row for row in ROWS if row.backend == "kascade" or row.problem == "one KV head"),
    Row("splash", ALL, "causal", "gather", "interpret"),
    Row("splash", ALL, "balanced", "ring", "interpret"),
    Row("standard", ALL, "causal", "ring"),
)
REFUSED = {
    ("chunked", "one KV head"): "num_kv_heads=1 cannot be dealt to the 2 devices of heads='heads'",
    ("kascade", "causal"): "kascade selects in one layer what the next ones attend to",
    ("splash", "causal"): "the share of one device with positions of its own: an array of explicit positions",
    ("splash", "balanced"): "explicit positions with query_length=160",
    ("standard", "causal"): "standard cannot attend to a part of the keys",
}


@pytest.fixture(scope="module")
def rows():
    return list(sharded.compute(CHOSEN, devices=DEVICES, alone=False))


def test_chosen_rows_are_rows_of_the_command():
    assert [row for row in CHOSEN if row not in ROWS] == []


def test_every_share_gives_what_one_device_gives(rows):
    computed = [row for row in rows if (row["backend"], row["problem"]) not in REFUSED or row["status"] != "refused"]
    assert [(row["backend"], row["problem"], row["status"], row.get("reasons")) for row in computed] == [
        (row["backend"], row["problem"], "ok", None) for row in computed
    ]
    assert len(computed) == 5


def test_every_device_has_a_share_of_the_output(rows):
    for row in rows:
        if row["status"] == "ok":
            shape = row["shape"]
            expected = [2 // shape.get("data", 1), 320 // shape.get("context", 1), 4 // shape.get("heads", 1), 32]
            assert (row["devices"], row["share"]) == (DEVICES, expected)


def test_what_cannot_be_dealt_is_refused_with_the_reason(rows):
    refused = {(row["backend"], row["problem"]): " ".join(row["reasons"]) for row in rows if row["status"] == "refused"}
    assert set(refused) == set(REFUSED)
    for key, words in REFUSED.items():
        assert words in refused[key]


def test_two_processes_give_what_one_device_gives():
    rows = ROWS_OF_PROCESSES[1:3]  # rings through both processes, by slot and by position
    for row in sharded.compute(rows, devices=2, processes=2, alone=False):
        assert (row["status"], row.get("reasons"), row["devices"]) == ("ok", None, 4)


BROKEN = """
import dataclasses, json, sys
import jax, jax.numpy as jnp
from attnsuite.backends import ring, sharding
from attnsuite.suite import sharded, sharded_worker
from attnsuite.suite.sharded import Row

ALL = {"data": 2, "heads": 2, "context": 2}
LONG = {"heads": 2, "context": 4}

def status(row, module, name, broken):
    whole = getattr(module, name)
    setattr(module, name, broken(whole))
    try:
        answer = sharded_worker._answer(row, alone=False)
    finally:
        setattr(module, name, whole)
    wrong = [q for q, x in answer.get("errors", {}).items() if x is None or x > answer["allowed"][q]]
    return [answer["status"], wrong]

def without_offset(whole):
    def place(self, share, layout):
        return dataclasses.replace(layout, query_positions=jnp.broadcast_to(
            jnp.arange(share.query_length, dtype=jnp.int32)[None], (share.batch, share.query_length)))
    return place

class SkipsAStep:
    fori_loop = staticmethod(lambda low, high, *rest: jax.lax.fori_loop(low + 1, high, *rest))
    def __getattr__(self, name):
        return getattr(jax.lax, name)

found = {
    "wrong positions": status(Row("standard", LONG, "packed, window, soft cap"),
        sharding.Sharded, "_with_positions", without_offset),
    "a step left out": status(Row("chunked", ALL, "causal", "ring"), ring, "lax", lambda whole: SkipsAStep()),
    "weights left out": status(Row("chunked", ALL, "causal", "ring"), ring, "_put_together",
        lambda whole: lambda a, b: (a[0] + b[0], *whole(a, b)[1:])),
    "own gradients only": status(Row("standard", ALL, "causal"), jax.lax, "psum_scatter",
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
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    environment = os.environ | {
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", BROKEN], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_what_goes_wrong_between_devices_is_seen(broken):
    assert broken["wrong positions"] == ["wrong", ["dk", "dq", "dv", "output"]]
    assert broken["a step left out"][0] == "wrong"
    assert broken["weights left out"][0] == "wrong"
    assert broken["own gradients only"] == ["wrong", ["dk", "dv"]]


def test_model_takes_a_sharded_backend_by_its_name(broken):
    assert broken["model"] < 1e-5
    assert broken["model's devices"] == DEVICES
    assert broken["share of a matrix"] == [96, 256]


def test_process_that_dies_is_told_with_its_last_words():
    with pytest.raises(InputError, match=r"1 of 1 rows have no answer: .*no-such-backend"):
        list(sharded.compute((Row("no-such-backend", {"data": 1}, "causal"),), devices=1))


def test_published_page_is_what_its_facts_say():
    facts = json.loads((PUBLISHED / sharded.FACTS).read_text(encoding="utf-8"))
    assert (PUBLISHED / sharded.PAGE).read_text(encoding="utf-8") == sharded.page(facts)
    statuses = [row["status"] for part in facts["parts"] for row in part["rows"]]
    assert len(statuses) == len(ROWS) + len(ROWS_OF_PROCESSES)
    assert set(statuses) == {"ok", "refused"}
