"""Kvax over a caller's mesh: data, tensor and context parallelism on four devices that the host pretends to have.

One process of its own: devices are counted once per process. ``NPROC`` gives JAX's CPU client enough threads: a device
that waits in a callback keeps one, and with fewer than there are devices they wait for each other.
"""

import pytest

from script import printed

pytestmark = pytest.mark.needs_kvax

# Of each mesh its shape, its axes, what each axis divides, and the cases.
DEALT = {
    "data": ((4,), "x", {"data": "x"}, ["ragged-causal"]),
    "tensor": ((2,), "x", {"heads": "x"}, ["causal-bfloat16", "segments-causal"]),
    "context": ((2,), "x", {"context": "x"}, ["causal", "padding-both-ends", "positions-reversed"]),
    "all three": ((2, 1, 2), "xyz", {"data": "x", "heads": "y", "context": "z"}, ["gqa-4", "more-keys-causal"]),
}


def in_four_devices(code):
    return printed(code, JAX_NUM_CPU_DEVICES="4", NPROC="16", PYTHONWARNINGS="error")


@pytest.mark.thorough
def test_same_as_the_oracle_however_it_is_dealt():
    """One process for all meshes: it takes seconds to start."""
    code = f"""
import jax, numpy as np
from attnsuite.testing import checks, problems
from attnsuite.backends import MeshAxes, Sharded, Target
from attnsuite.backends.kvax import KVAX

for name, (shape, axes, divides, cases) in {DEALT}.items():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:np.prod(shape)]).reshape(shape), tuple(axes))
    sharded = Sharded(KVAX, mesh, MeshAxes(**divides))
    for case in cases:
        problem = problems.problem(case)
        results = checks.compiled(sharded, problem, Target.here(), "interpret")(*problem.inputs)
        checks.check_accuracy(results, problem)
        assert len(results["output"].sharding.device_set) == mesh.size, name
        print(name, case, sep=": ")
"""
    dealt = [f"{name}: {case}" for name, (*_, cases) in DEALT.items() for case in cases]
    assert in_four_devices(code).splitlines() == dealt


def test_inside_a_callers_own_shard_map():
    """Without a mesh the kernels run where the arrays are, so a caller may deal them himself."""
    code = """
import jax, numpy as np, jax.numpy as jnp, dataclasses
from attnsuite.testing import checks, problems
from jax.sharding import PartitionSpec as P
from attnsuite.backends import Target, plan
from attnsuite.backends.kvax import KVAX

mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
problem = problems.problem("gqa-4")
half = dataclasses.replace(problem.spec, num_heads=4, num_kv_heads=1)

def attend(query, key, value):
    return plan(KVAX, half, target=Target("cpu"), mode="interpret").run(query, key, value)[0]

heads = P(None, None, "x")
dealt = jax.shard_map(attend, mesh=mesh, in_specs=(heads, heads, heads), out_specs=heads, check_vma=False)
results = problems.forward_and_backward(dealt)(*problem.inputs)
checks.check_accuracy(results, problem)
print("done")
"""
    assert in_four_devices(code) == "done\n"
