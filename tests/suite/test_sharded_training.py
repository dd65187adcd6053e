"""attnsuite train --mesh: the losses of one device on eight, step for step; resumed; no device holds a whole matrix.

One process with eight CPU devices trains; the tests read what it wrote. Words that are no mesh: ``test_refusals.py``.
"""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from attnsuite.models.resume import missing
from attnsuite.models.sharded_training import MeshSizes, place_on
from attnsuite.suite.errors import InputError
from attnsuite.suite.host_devices import parse_mesh
from script import printed

TRAIN = """
import json, sys, jax
from pathlib import Path
from attnsuite.suite.host_devices import make_host_devices, parse_mesh
mesh = parse_mesh("data=2,fsdp=2,heads=2")
make_host_devices(mesh.count)
from attnsuite.models import PRESETS
from attnsuite.suite.training_run import LOSSES, TrainRequest, _started, execute, open_training
PRESETS["nano"] = PRESETS["debug"] | dict(
    num_layers=1, hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2
)
from attnsuite.models import TextFile
out, found = Path(sys.argv[1]), {}
# The text that training reads by default is a part of Python, and differs from version to version.
(out / "text.txt").write_text("\\n\\n".join(f"Document {n} says this again. " * 8 for n in range(400)))
words = dict(model="nano", text=TextFile(str(out / "text.txt")),
             steps=3, batch=8, accumulate=2, length=32, learning_rate=0.05, save_every=1, packed=True,
             backend="standard")
class Cut(Exception): pass
def cut(line):
    if line.startswith("step 2/"): raise Cut
for name, mesh_of in (("one", None), ("eight", mesh), ("cut", mesh)):
    request = TrainRequest(**words, mesh=mesh_of)
    try:
        execute(request, out / name, say=cut if name == "cut" else lambda line: None)
    except Cut:
        execute(request, out / name, resume=True, say=lambda line: found.setdefault("resumed", line))
    found[name] = [json.loads(line)["loss"] for line in (out / name / LOSSES).read_text().splitlines()]
request = TrainRequest(**words, mesh=mesh)
opened = open_training(request)
trained, state, *_ = _started(request, opened)
found["backend"] = opened.resolutions[0][1].backend.name
for kind, tree in (("parameters", trained), ("state", state)):
    leaf = jax.tree.leaves({"x": [x for x in jax.tree.leaves(tree) if x.shape == (48, 32)]})[0]
    found[kind] = [leaf.sharding.shard_shape(leaf.shape), len(leaf.sharding.device_set)]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    if missing() is not None:
        pytest.skip(str(missing()))
    out = tmp_path_factory.mktemp("mesh")
    said = printed(
        TRAIN,
        out,
        JAX_DISABLE_MOST_OPTIMIZATIONS="1",
        # A run that is resumed compiles nothing anew.
        JAX_COMPILATION_CACHE_DIR=os.environ.get("JAX_COMPILATION_CACHE_DIR", str(out / "compiled")),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
    )
    return out, json.loads(said.splitlines()[-1])


@pytest.mark.thorough
def test_eight_devices_train_like_one_step_for_step(trained):
    _, found = trained
    assert found["backend"] == "standard@data=4,heads=2"
    assert found["one"][-1] < found["one"][0] - 0.1
    np.testing.assert_allclose(found["eight"], found["one"], rtol=2e-6)


@pytest.mark.thorough
def test_no_device_holds_a_whole_matrix_or_its_optimizer_state(trained):
    assert trained[1]["parameters"] == trained[1]["state"] == [[24, 16], 8]


@pytest.mark.thorough
def test_a_resumed_mesh_goes_on_to_the_same_bits(trained):
    out, found = trained
    assert found["resumed"] == "resuming behind step 2"
    assert found["cut"] == found["eight"]
    weights = [(out / name / "model.safetensors").read_bytes() for name in ("cut", "eight")]
    assert weights[0] == weights[1]


def test_sizes_of_a_mesh_are_checked_in_python_too():
    assert parse_mesh("heads=2, fsdp=4") == MeshSizes(fsdp=4, heads=2)
    with pytest.raises(ValueError, match="heads=True must be an integer of at least 1"):
        MeshSizes(heads=True)
    with pytest.raises(InputError):
        parse_mesh("")
    assert place_on(MeshSizes()).mesh.size == 1
