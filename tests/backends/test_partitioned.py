"""On a mesh with automatic axes each device computes its share, and no key or value is gathered."""

import json
import re

import pytest

pytest.importorskip("llvmlite", reason="the kernels are compiled by llvmlite")

from landing import swept
from script import printed

SCRIPT = """
import json, re, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from attnsuite import backends
from attnsuite.backends import masks
from attnsuite.testing.cases import leaning

devices = len(jax.devices())
data, heads = (2, 1) if devices == 2 else (2, 4)
mesh = jax.make_mesh((data, heads), ("data", "heads"), axis_types=(AxisType.Auto,) * 2)
rng = np.random.default_rng(0)
draw = lambda *shape: jnp.asarray(rng.standard_normal(shape).astype(np.float32))
B, T, N, K, D = 4, 256, 8, 4, 32
ids = jnp.asarray(np.sort(rng.integers(0, 3, (B, T)), 1))
lengths = jnp.asarray(rng.integers(40, T, B))
mask = jnp.asarray(rng.random((B, N, T, T)) < 0.7)
bias = draw(1, N, T, T)
q, k, v, dout = draw(B, T, N, D), draw(B, T, K, D), draw(B, T, K, D), draw(B, T, N, D)
whole, placed = P("data", None, "heads"), {4: P("data", "heads"), 2: P("data"), 1: P("data")}

def forward(backend, **fixed):
    def run(q, k, v, arrays):
        return backends.attention(q, k, v, backend=backend, on_unavailable="raise", **fixed, **arrays)
    return run

def gradient(backend, **fixed):
    run = forward(backend, **fixed)
    return lambda q, k, v, arrays: jax.grad(lambda *x: (run(*x, arrays) * dout).sum(), (0, 1, 2))(q, k, v)

def step(backend, **fixed):
    run = forward(backend, needs_grad=False, **fixed)
    return lambda q, k, v, arrays: run(q[:, :1], k, v, arrays)

def mapped(backend, **fixed):
    run = jax.vmap(forward(backend, **fixed), (0, 0, 0, None))
    return lambda q, k, v, arrays: run(q[None], k[None], v[None], arrays)[0]

def of_keys(backend, **fixed):
    run = forward(backend, value_head_dim=D, **fixed)
    return lambda q, k, v, arrays: jax.grad(lambda *x: (run(*x, None, arrays) * dout).sum(), (0, 1))(q, k)

CASES = {
    "causal": (forward, {"is_causal": True}, {}),
    "gradient": (gradient, {"is_causal": True}, {}),
    "segments": (gradient, {"is_causal": True}, {"query_segment_ids": ids, "key_value_segment_ids": ids}),
    "lengths": (gradient, {}, {"key_value_seq_lengths": lengths}),
    "mask": (gradient, {}, {"mask": mask}),
    "bias": (forward, {}, {"bias": bias}),
    "constant bias": (gradient, {}, {"bias": bias}),
    "values in keys": (of_keys, {"is_causal": True}, {}),
    "decode": (step, {}, {"key_value_seq_lengths": lengths}),
    "log-sum-exp": (forward, {"return_log_sum_exp": True}, {}),
    "functions": (gradient, {"mask_function": masks.Dilated(3), "score_function": leaning}, {}),
    "vmap": (mapped, {}, {}),
}
# Which blocks some head sees is an "or" over the devices, of a bit per block.
MOVED = re.compile(r"= (?!\\(?pred\\[).*? (all-gather|all-to-all|collective-permute|all-reduce)(?:-start)?\\(")
found = {}
shard = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
operands = [shard(x, whole) for x in (q, k, v)]
for name in sys.argv[1:]:
    make, fixed, arrays = CASES[name]
    expected = jax.jit(make("standard", **fixed))(q, k, v, arrays)
    given = {n: shard(x, P(None, "heads") if n == "bias" else placed[x.ndim]) for n, x in arrays.items()}
    standard = ["standard"] if name in ("causal", "gradient", "decode") else []
    for backend in ("flash_cpu", "chunked", *standard):
        compiled = jax.jit(make(backend, **fixed)).lower(*operands, given).compile()
        out = compiled(*operands, given)
        error = max(float(jnp.abs(a - b).max()) for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(expected)))
        text = compiled.as_text()
        found[name + " " + backend] = {
            "error": error,
            "calls": [line.strip() for line in text.splitlines() if "custom-call(" in line and "ffi_call" in line],
            "moved": sorted(set(MOVED.findall(text))),
            "share": [B // data, N // heads],
        }

x = draw(2, 40, 4, 16)
expected = backends.attention(x, x, x, backend="standard")
found = {"cases": found, "in a mesh": {}}
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((devices,), ("x",), axis_types=(kind,))
    for backend in ("flash_cpu", "chunked"):
        run = lambda x: backends.attention(x, x, x, backend=backend, on_unavailable="raise")
        with jax.set_mesh(mesh):
            for place, y in (("outside", x), ("replicated", jax.device_put(x, NamedSharding(mesh, P())))):
                for called, call in (("eager", run), ("jit", jax.jit(run))):
                    error = float(np.abs(np.asarray(call(y)) - np.asarray(expected)).max())
                    found["in a mesh"][f"{kind} {backend} {place} {called}"] = error
print(json.dumps(found))
"""


# With two devices the mesh has an axis of heads with one device.
CASES = {
    8: ("causal", "gradient", "segments", "lengths", "mask", "bias", "constant bias", "decode", "log-sum-exp",
        "functions", "vmap", "values in keys"),
    2: ("mask", "constant bias", "decode"),
}  # fmt: skip
# The controls: loops that call a user's functions, and a batch of problems.
GATHERED = {"functions chunked", "vmap flash_cpu", "vmap chunked"}


@pytest.mark.parametrize("devices", swept(CASES, (2,)))
def test_each_device_computes_its_share_and_nothing_is_gathered(devices):
    found = json.loads(printed(SCRIPT, *CASES[devices], JAX_NUM_CPU_DEVICES=f"{devices}"))
    assert len(found["in a mesh"]) == 16
    assert max(found["in a mesh"].values()) < 2e-6, found["in a mesh"]
    for name, case in found["cases"].items():
        assert case["error"] < 2e-5, name
        assert (case["moved"] == []) is (name not in GATHERED), (name, case["moved"])
        if name.endswith(" flash_cpu") and name not in GATHERED:
            sequences, heads = case["share"]
            assert case["calls"], name
            for call in case["calls"]:  # the first result has the shape of the query or of the output
                assert re.search(rf"\(f32\[{sequences},\d+,{heads},32\]", call), call
