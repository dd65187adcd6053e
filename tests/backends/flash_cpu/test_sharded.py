"""A ring of two devices puts the parts of flash_cpu together: output and gradients are those of one device."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("llvmlite", reason="the kernels are compiled by llvmlite")

SCRIPT = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh
from attnsuite.backends import Target, get, make_spec, masks, plan
from attnsuite.backends.dealing import MeshAxes, Sharded

options = eval(sys.argv[1])
rng = np.random.default_rng(0)
q, k, v = (jnp.asarray(rng.standard_normal((1, 256, n, 32)).astype(np.float32)) for n in (4, 2, 2))
spec, target = make_spec(q, k, v, **options), Target.here()
mesh = Mesh(np.array(jax.devices()), ("cores",))
ring = Sharded(get("flash_cpu"), mesh, MeshAxes(context="cores", exchange="ring"))
plans = plan(ring, spec, target=target), plan(get("standard"), spec, target=target)
assert len(jax.devices()) == 2
for one, other in zip(*(
    jax.tree.leaves(jax.jit(jax.value_and_grad(lambda *x, p=p: (p.run(*x)[0] ** 2).sum(), (0, 1, 2)))(q, k, v))
    for p in plans
)):
    print(float(jnp.abs(one - other).max() / jnp.abs(other).max()))
"""


@pytest.mark.parametrize(
    "options",
    [
        "{'is_causal': True}",
        "{'is_causal': True, 'local_window_size': (60, 0)}",
        "{}",
        "{'mask_function': masks.Dilated(3)}",
    ],
)
def test_ring_of_parts_agrees_with_one_device(options):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, options],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_NUM_CPU_DEVICES": "2"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    errors = [float(x) for x in done.stdout.split()]
    assert len(errors) == 4, done.stderr
    assert max(errors) < 1e-5
