"""The table of JAX's transformations is what docs/reference/transformations.md shows, without a fault."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from attnsuite.backends import attention
from attnsuite.testing import transformations
from landing import swept
from script import printed, python

pytestmark = [pytest.mark.backends, pytest.mark.newest]
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "transformations.md"


@pytest.mark.thorough
def test_table_is_the_one_of_the_page():
    pytest.importorskip("llvmlite", reason="flash_cpu is compiled by llvmlite")
    found = python("-m", "attnsuite.testing.transformations", "standard", "chunked", "flash_cpu")
    assert found.returncode == 0, found.stdout + found.stderr
    made = re.sub(r"on cpu:[^:]*: ", "on this CPU: ", found.stdout.strip())  # the processor's name
    assert made in PAGE.read_text()


def explicit(*axes):
    """A sharding on an explicit mesh of one device, and the operands sharded so."""
    sharding = NamedSharding(jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,)), PartitionSpec(*axes))
    return sharding, [jax.device_put(x, sharding) for x in transformations.operands("float32")]


def test_what_has_no_share_on_an_explicit_mesh_is_refused_with_what_to_do():
    sharding, by_length = explicit(None, "x")
    with jax.set_mesh(sharding.mesh), pytest.raises(ValueError, match=r"length.*'x'.*MeshAxes\(context=\.\.\.\)"):
        attention(*by_length, is_causal=True, backend="chunked")
    with pytest.raises(ValueError, match=r"count sequences and heads from zero .*; use backend='standard'"):
        attention(*explicit("x")[1], score_function=lambda score, *_: score, backend="chunked")


@pytest.mark.parametrize("backend", ["standard", "chunked"])
def test_arrays_that_an_explicit_mesh_does_not_shard_are_taken(backend):
    more = {
        "key_value_seq_lengths": np.array([9, 160]),
        "bias": np.ones((2, 1, 1, 160), np.float32),
        "sinks": np.ones(4),
    }
    attend = functools.partial(attention, backend=backend, **more)
    sharding, arrays = explicit("x")
    with jax.set_mesh(sharding.mesh):
        found = attend(*arrays)
    expected = attention(*transformations.operands("float32"), backend="standard", **more)
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_gradient_of_arrays_that_are_whole_on_an_explicit_mesh_outside_of_it():
    given = transformations.operands("float32")
    found, expected = (
        jax.jit(jax.grad(lambda *x, name=name: attention(*x, is_causal=True, backend=name).sum()))
        for name in ("chunked", "standard")
    )
    np.testing.assert_allclose(found(explicit()[1][0], *given[1:]), expected(*given), atol=2e-6)


CALLS_WITHOUT_LEAKS = """
import jax, jax.numpy as jnp, sys
from attnsuite.backends import attention

x, ids, lengths = jnp.ones((2, 33, 2, 16)), jnp.zeros((2, 33), jnp.int32), jnp.array([20, 0])
segments = {"is_causal": True, "query_segment_ids": ids, "key_value_segment_ids": ids}
bias = jnp.ones((1, 2, 33, 33))
for backend in sys.argv[1:]:
    how = {"backend": backend, "on_unavailable": "raise"}
    with jax.checking_leaks():
        attention(x, x, x, **segments, **how)
        attention(x[:, :1], x, x, key_value_seq_lengths=lengths, needs_grad=False, **how)
        jax.grad(lambda x: attention(x, x, x, bias=bias, **segments, **how).sum())(x)
with jax.checking_leaks():
    attention(x, x, x, **segments, backend="kascade", on_unavailable="raise", backend_options={"min_keys": 0})
"""


@pytest.mark.parametrize("devices", swept("12", "2"))  # on two a program has the function of a share
def test_programs_keep_no_traced_array(devices):
    pytest.importorskip("llvmlite", reason="flash_cpu is compiled by llvmlite")
    printed(CALLS_WITHOUT_LEAKS, "standard", "chunked", "flash_cpu", JAX_NUM_CPU_DEVICES=devices)


def test_repeated_calls_outside_of_jit_compile_nothing():
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: compiled.append(name))
    try:
        query, key, value = transformations.operands("float32")
        call = functools.partial(attention, query, key, value, is_causal=True, backend="chunked", scale=0.123)
        call()
        assert any("compile" in name for name in compiled)
        compiled.clear()
        for _ in range(100):
            call()
        assert not [name for name in compiled if "compile" in name]
    finally:
        jax.monitoring.clear_event_listeners()


@pytest.mark.parametrize("backend", ["standard", "chunked"])
def test_vmap_runs_a_backend_once(backend):
    query, key, value = transformations.operands("float32")
    step = functools.partial(attention, backend=backend, needs_grad=False)
    operands = [query[:, :1], key, value]
    mapped = str(jax.make_jaxpr(jax.vmap(step))(*(jnp.stack([x, x]) for x in operands)))
    batched = str(jax.make_jaxpr(step)(*(jnp.concatenate([x, x]) for x in operands)))
    for operation in ("dot_general", "cond"):
        assert mapped.count(operation) == batched.count(operation)


@pytest.mark.parametrize("fault", ["wrong", "an error of JAX"])
def test_a_fault_is_no_sentence(fault):
    def attend(query, key, value):
        if fault == "wrong":
            return query * 1.01
        raise TypeError("something from inside")

    arrays = transformations.operands(jnp.float32)
    expected = np.asarray(attention(*arrays, is_causal=True, backend="standard"))
    with pytest.raises((AssertionError, TypeError)):
        transformations.tried(attend, "jit", expected)
    assert transformations.tried(lambda *_: expected, "no jit", expected) == "yes"
