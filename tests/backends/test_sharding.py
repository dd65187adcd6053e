"""Attention over several devices gives what it gives on one, and refuses what cannot be divided."""

import dataclasses
import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from attnsuite.backends import (
    AttentionSpec,
    Backend,
    Layout,
    MeshAxes,
    Sharded,
    Target,
    balanced_order,
    plan,
    registry,
    support,
)
from attnsuite.backends.sharding import divided
from landing import is_landing
from script import printed

pytestmark = pytest.mark.newest

# JAX takes the number of CPU devices once per process: the claims about two run in a process with two. One process for
# all backends, because the cases that they share are solved once. With the oldest JAX, the core alone.
TWO_DEVICES = """
import json, sys
import jax, numpy as np
from jax.sharding import Mesh
from attnsuite.testing import checks, problems
from attnsuite.backends import MeshAxes, Sharded, Target, attention, make_spec, masks, plan, register, registry
from attnsuite.backends.sharding import divided
from landing import is_landing

mesh = Mesh(np.array(jax.devices()), ("cores",))
assert mesh.size == 2

def held(backend, case):
    name, _, ring = case.partition("@")
    problem = problems.problem(name)
    axis = {"heads": "heads", "batch": "data"}[divided(problem.spec, 2)]
    axes = MeshAxes(context="cores", exchange=ring) if ring else MeshAxes(**{axis: "cores"})
    sharded = Sharded(registry.get(backend), mesh, axes)
    results = checks.compiled(sharded, problem, Target.here())(*problem.inputs)
    checks.check_accuracy(results, problem)
    assert len(results["output"].sharding.device_set) == 2, case

found = {}
for backend, cases in json.loads(sys.argv[1]).items():
    for case in cases:
        try:
            held(backend, case)
        except Exception as error:
            found[f"{backend} {case}"] = repr(error)
        else:
            found[f"{backend} {case}"] = "held"

x = jax.random.normal(jax.random.key(0), (2, 512, 4, 16))
expected = attention(x, x, x, is_causal=True, backend="standard")
for name, axes, mask in (
    ("heads", {"heads": "cores"}, {"is_causal": True}),
    ("gather", {"context": "cores"}, {"is_causal": True}),
    ("ring", {"context": "cores", "exchange": "ring"}, {"mask_function": masks.Causal()}),
):
    sharded = Sharded(registry.get("chunked"), mesh, MeshAxes(**axes))
    made = plan(sharded, make_spec(x, x, x, **mask), target=Target.here())
    if name == "heads" or not is_landing():
        found[f"plan, {name}"] = float(abs(made.run(x, x, x)[0] - expected).max())
    explicit = Sharded(registry.get("chunked"), jax.make_mesh((2,), ("cores",)), MeshAxes(**axes))
    register(explicit)
    with jax.set_mesh(explicit.mesh):
        y = jax.device_put(x, explicit.sharding())
        result = attention(y, y, y, backend=explicit.name, on_unavailable="raise", **mask)
    found[f"call, {name}"] = float(abs(np.asarray(result) - np.asarray(expected)).max())
    if name == "gather" and is_landing():
        continue
    made = plan(explicit, make_spec(x, x, x, **mask), target=Target.here())
    moved = made.run(*[jax.device_put(x, jax.NamedSharding(explicit.mesh, jax.P()))] * 3)[0]
    found[f"call, replicated, {name}"] = float(abs(np.asarray(moved) - np.asarray(expected)).max())
print(json.dumps(found))
"""
# How arrays are divided does not depend on the backend; of a second one what its own gradient rules have to bear. Rings
# have one way without a mask by position, one for causality over slots, and one for every other mask.
CASES = {
    "standard": ["combination", "ragged-causal", "bias-per-head"],
    "chunked": ["log-sum-exp", "sinks@ring", "alibi@gather", "score@ring"],
    "flash_cpu": ["plain@ring", "window-causal@ring"],
}
if not is_landing():
    CASES["standard"] += ["decode-4", "log-sum-exp-of-nothing", "sinks", "causal", "gqa-8", "padding-both-ends"]
    CASES["standard"] += ["mask-per-head", "bias-broadcast"]
    CASES["chunked"] += ["combination", "sinks", "score@gather"]
    CASES["flash_cpu"] += ["causal", "causal@ring", "function-dilated@ring"]
if not importlib.util.find_spec("llvmlite"):
    del CASES["flash_cpu"]


def test_two_devices_pass_the_conformance_checks_and_are_called_without_jit():
    """In a process with two devices."""
    found = json.loads(printed(TWO_DEVICES, json.dumps(CASES), JAX_NUM_CPU_DEVICES="2").splitlines()[-1])
    errors = {name: found.pop(name) for name in [*found] if name.startswith(("plan, ", "call, "))}
    assert found == {f"{backend} {case}": "held" for backend, names in CASES.items() for case in names}
    assert len(errors) == (6 if is_landing() else 9)
    assert max(errors.values()) < 2e-6, errors


def test_heads_are_divided_before_the_batch():
    assert divided(_spec(batch=4, num_heads=8, num_kv_heads=4), 2) == "heads"
    assert divided(_spec(batch=4, num_heads=8, num_kv_heads=1), 2) == "batch"
    assert divided(_spec(batch=3, num_heads=8, num_kv_heads=1), 2) is None


@pytest.mark.parametrize(
    ("axis", "words"),
    [
        ("data", "batch=3 cannot be sharded over the 2 devices of data='x'"),
        ("heads", "num_kv_heads=3 cannot be sharded over the 2 devices of heads='x'"),
    ],
)
@pytest.mark.parametrize("name", ["chunked", "kvax"])
def test_sizes_that_the_mesh_does_not_divide_are_refused(name, axis, words):
    sharded = Sharded(registry.get(name), AbstractMesh((2,), ("x",)), MeshAxes(**{axis: "x"}))
    reasons = support(sharded, _spec(batch=3, num_heads=3, num_kv_heads=3), Target.here(), "interpret").reasons
    assert reasons[0].startswith(words)


def test_arrays_of_either_layout_have_a_sharding():
    assert sharded().sharding().spec == PartitionSpec(None, None, "x")
    assert sharded().sharding("HND").spec == PartitionSpec(None, "x", None)


def among(mesh, **sizes):
    return Sharded.among(registry.get("standard"), _spec(**sizes), mesh)


def sharded(**given):
    return Sharded(**{"backend": registry.get("chunked"), "mesh": _mesh("x"), "axes": MeshAxes(heads="x")} | given)


EXAMPLE = r"is not accepted; .*such as Sharded\(backends\.get\('chunked'\), mesh, Mesh"
REFUSED = {
    "num_kv_heads=1 and batch=3 cannot be divided among 2 devices": lambda: among(
        AbstractMesh((2,), ("x",)), batch=3, num_heads=8, num_kv_heads=1
    ),
    "a mesh of one axis": lambda: among(_mesh("a", "b"), batch=1, num_heads=2, num_kv_heads=2),
    "heads='model' is not an axis of the mesh; it has x": lambda: sharded(axes=MeshAxes(heads="model")),
    "kv_layout='BSHD' is not accepted; use one of NHD, HND": lambda: sharded().sharding("BSHD"),
    "names no axis": MeshAxes,
    "give each dimension a name, or a tuple of names": lambda: MeshAxes(heads=["x"]),
    "give each an axis of its own": lambda: MeshAxes(data="x", heads="x"),
    "must be 'gather' or 'ring'": lambda: MeshAxes(context="x", exchange="mail"),
    f"chunked.* {EXAMPLE}": lambda: sharded(backend="chunked"),
    f"x.* {EXAMPLE}": lambda: sharded(axes="x"),
    r"is not accepted; .*give a jax\.sharding\.Mesh": lambda: sharded(mesh="x"),
    "length=100 cannot be cut into 8 equal pieces": lambda: balanced_order(100, 4),
}


@pytest.mark.wrong_types
@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_sharded_is_refused(words):
    with pytest.raises(ValueError, match=words):
        REFUSED[words]()


def test_sharded_backend_is_a_backend_with_the_reasons_of_its_share():
    sharded = Sharded(registry.get("splash"), _mesh("cores"), MeshAxes(context="cores"))
    spec = _spec(batch=1, num_heads=2, num_kv_heads=2)
    assert isinstance(sharded, Backend)
    assert hash(sharded) == hash(Sharded(registry.get("splash"), _mesh("cores"), MeshAxes(context="cores")))
    reasons = support(sharded, spec, Target.here()).reasons
    assert [reason.partition(": ")[0] for reason in reasons] == ["the share of one device"]
    assert support(sharded, spec, Target.here(), "interpret")
    with pytest.raises(ValueError, match="splash is a kernel for TPUs"):
        plan(sharded, spec, target=Target.here())


def test_ring_of_one_device_is_no_ring_for_a_forward_plan():
    sharded = Sharded(registry.get("chunked"), _mesh("cores"), MeshAxes(context="cores", exchange="ring"))
    spec = dataclasses.replace(_spec(batch=1, num_heads=2, num_kv_heads=2), needs_grad=False)
    x = jnp.ones((1, 8, 2, 16))
    plan = sharded.plan(spec, Layout(), target=Target.here())
    np.testing.assert_allclose(plan.run(x, x, x)[0], x, rtol=1e-6)
    with pytest.raises(ValueError, match="asks for a gradient where needs_grad=False was given"):
        jax.grad(lambda x: plan.run(x, x, x)[0].sum())(x)


def test_carry_of_a_backend_is_dealt_with_its_batch():
    """Kascade's reuse layer gets the selection of the anchor; one device is enough to lose it."""
    sharded = Sharded(registry.get("kascade"), _mesh("cores"), MeshAxes(data="cores"))
    spec = dataclasses.replace(_spec(batch=1, num_heads=2, num_kv_heads=2), needs_grad=False, is_causal=True)
    spec = dataclasses.replace(spec, query_length=256, key_value_length=256)
    options, layer = registry.get("kascade").roles(spec)["reuse"]
    plan = sharded.plan(spec, Layout(), target=Target.here(), options=options)
    x = jnp.ones((1, 256, 2, 16))
    carry = plan.run(x, x, x, layer=layer - 1)[1]
    assert jax.tree.leaves(carry)
    np.testing.assert_allclose(plan.run(x, x, x, layer=layer, carry=carry)[0], x, rtol=1e-6)


def test_balanced_order_gives_every_device_the_same_causal_work():
    order = balanced_order(96, 4)
    assert sorted(order) == list(range(96))
    assert len({int((part + 1).sum()) for part in order.reshape(4, -1)}) == 1


def _mesh(*axes):
    return Mesh(np.array(jax.devices()[:1]).reshape([1] * len(axes)), axes)


def _spec(**sizes):
    return AttentionSpec(query_length=8, key_value_length=8, head_dim=16, **sizes)
