"""A ring of two devices puts the parts of flash_cpu together: output and gradients are those of one device."""

import json

import pytest

pytest.importorskip("llvmlite", reason="the kernels are compiled by llvmlite")

from script import run

SCRIPT = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh
from attnsuite.backends import Target, get, make_spec, masks, plan
from attnsuite.backends.sharding import MeshAxes, Sharded

OPTIONS = {
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "local_window_size": (60, 0)},
    "all": {},
    "dilated": {"mask_function": masks.Dilated(3)},
}
rng = np.random.default_rng(0)
q, k, v = (jnp.asarray(rng.standard_normal((1, 256, n, 32)).astype(np.float32)) for n in (4, 2, 2))
target = Target.here()
mesh = Mesh(np.array(jax.devices()), ("cores",))
ring = Sharded(get("flash_cpu"), mesh, MeshAxes(context="cores", exchange="ring"))
assert len(jax.devices()) == 2
errors = {}
for name, options in OPTIONS.items():
    spec = make_spec(q, k, v, **options)
    plans = plan(ring, spec, target=target), plan(get("standard"), spec, target=target)
    errors[name] = [float(jnp.abs(one - other).max() / jnp.abs(other).max()) for one, other in zip(*(
        jax.tree.leaves(jax.jit(jax.value_and_grad(lambda *x, p=p: (p.run(*x)[0] ** 2).sum(), (0, 1, 2)))(q, k, v))
        for p in plans
    ))]
print(json.dumps(errors))
"""


def test_ring_of_parts_agrees_with_one_device():
    done = run(SCRIPT, JAX_NUM_CPU_DEVICES="2")
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)
    assert {len(of_mask) for of_mask in errors.values()} == {4}
    assert max(map(max, errors.values())) < 1e-5, errors
