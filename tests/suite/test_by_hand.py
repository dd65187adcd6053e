"""The tax of the interface: the compiled program of a backend against the library called by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from attnsuite.backends import Target, registry
from attnsuite.suite.compile.by_hand import BY_HAND, by_hand
from attnsuite.suite.compile.programs import op_program
from attnsuite.suite.kinds.attention_call import OpCase
from attnsuite.suite.measure import lint
from attnsuite.suite.measure.program import Program

CASE = OpCase(kind="op_forward", sequence=128)


def operations(program):
    return lint.operations(jax.jit(program.function).lower(*program.arguments).compile())


def within(own, other):
    """The bound: no conditional, at most one more fusion, at most 5% more bytes."""
    return (
        own.conditionals == 0 and own.fusions <= other.fusions + 1 and own.bytes_accessed <= 1.05 * other.bytes_accessed
    )


def test_standard_is_the_program_of_jax_nn():
    target = Target.here()
    own = operations(op_program(CASE, registry.get("standard"), target))
    other = operations(by_hand(CASE, "standard", target))
    assert within(own, other), f"{own} against {other}"


@pytest.mark.parametrize("planted", ["copy", "conditional"])
def test_what_is_planted_is_over_the_bound(planted):
    target = Target.here()
    library = by_hand(CASE, "standard", target)

    def taxed(query, key, value):
        if planted == "copy":
            key = jax.lax.optimization_barrier(key[:, ::-1])[:, ::-1]
            return library.function(query, key, value)
        bad = ~jnp.isfinite(value).all()
        return jax.lax.cond(bad, lambda: query, lambda: library.function(query, key, value))

    assert not within(operations(Program(taxed, library.arguments)), operations(library))


@pytest.mark.parametrize("backend", sorted(BY_HAND))
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_a_call_by_hand_takes_and_gives_the_arrays_of_the_backend(backend, kv_heads):
    target = Target("tpu", "v5e") if "splash" in backend or "tpu" in backend else Target("cuda", "h100")
    case = OpCase(kind="op_forward", sequence=1024, heads=8, kv_heads=kv_heads, head_dim=128, dtype="bfloat16")
    own, other = op_program(case, registry.get(backend), target), by_hand(case, backend, target)
    assert jax.eval_shape(other.function, *other.arguments) == jax.eval_shape(own.function, *own.arguments)


def test_a_case_that_the_library_cannot_say_has_no_program_by_hand():
    target = Target.here()
    assert by_hand(OpCase(kind="op_forward", sequence=64, documents=2), "standard", target) is None
    assert by_hand(OpCase(kind="op_forward", sequence=64, soft_cap=3.0), "standard", target) is None
    assert by_hand(OpCase(kind="op_forward", sequence=64, mask="causal | prefix(8)"), "standard", target) is None
    assert by_hand(OpCase(kind="op_forward", sequence=64), "chunked", target) is None
    assert by_hand(OpCase(kind="op_forward", sequence=64), "pallas_flash", Target("cuda", "h100")) is None
    assert set(BY_HAND) <= set(registry.names())
