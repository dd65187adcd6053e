"""Attention over several devices gives what it gives on one, and refuses what cannot be divided."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from backends import AttentionSpec, Layout, Target, plan_sharded, registry
from backends.sharding import divided

# JAX takes the number of CPU devices once per process: the claims about two run in a process with two.
TWO_DEVICES = """
import dataclasses, json, sys
import jax, numpy as np
from jax.sharding import Mesh
import conformance, problems
from backends import Target, plan_sharded, registry

class Sharded:
    def __init__(self, name, mesh):
        self.backend, self.mesh = registry.get(name), mesh
    def plan(self, spec, layout, *, target, mode="native"):
        return plan_sharded(self.backend, spec, layout, self.mesh, target=target, mode=mode)

mesh = Mesh(np.array(jax.devices()), ("cores",))
assert mesh.size == 2
for name in sys.argv[2:]:
    problem = problems.problem(name)
    results = conformance.compiled(Sharded(sys.argv[1], mesh), problem, Target.here())(*problem.inputs)
    conformance.check_accuracy(results, problem)
    assert len(results["output"].sharding.device_set) == 2, name
print(json.dumps(sys.argv[2:]))
"""


@pytest.mark.parametrize("backend", ["standard", "chunked"])
def test_two_devices_pass_the_conformance_checks(backend):
    cases = ["causal", "gqa-8", "combination", "padding-both-ends", "ragged-causal", "decode-4"]
    cases += ["mask-per-head", "bias-per-head"] if backend == "standard" else []
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", TWO_DEVICES, backend, *cases],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == cases


def test_heads_are_divided_before_the_batch():
    assert divided(_spec(batch=4, num_heads=8, num_kv_heads=4), 2) == "heads"
    assert divided(_spec(batch=4, num_heads=8, num_kv_heads=1), 2) == "batch"
    assert divided(_spec(batch=3, num_heads=8, num_kv_heads=1), 2) is None


def test_what_cannot_be_divided_is_refused_with_the_numbers():
    class Two:
        axis_names, size = ("cores",), 2

    spec = _spec(batch=3, num_heads=8, num_kv_heads=1)
    with pytest.raises(ValueError, match="num_kv_heads=1 and batch=3 cannot be divided among 2 devices"):
        plan_sharded(registry.get("standard"), spec, Layout(), Two(), target=Target.here())


def test_mesh_of_two_axes_is_refused():
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("a", "b"))
    with pytest.raises(ValueError, match="a mesh of one axis"):
        plan_sharded(
            registry.get("standard"), _spec(batch=1, num_heads=2, num_kv_heads=2), Layout(), mesh, target=Target.here()
        )


def _spec(**sizes):
    return AttentionSpec(query_length=8, key_value_length=8, head_dim=16, **sizes)
