"""The tax of the interface: the compiled program of a backend against the library called by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from attnsuite.backends import Target, registry
from attnsuite.suite.absent.by_hand import BY_HAND, by_hand
from attnsuite.suite.absent.programs import AbstractProgram, op_program
from attnsuite.suite.kinds.attention import OpCase
from attnsuite.suite.measure import lint

CASES = [
    OpCase(kind=kind, sequence=128, causal=causal, window_size=window)
    for kind in ("op_forward", "op_forward_backward")
    for causal, window in ((True, None), (False, None), (True, 64))
]


def operations(program):
    return lint.operations(jax.jit(program.function).lower(*program.arguments).compile())


def within(own, other):
    """The bound: no conditional, at most one more fusion, at most 5% more bytes."""
    return (
        own.conditionals == 0 and own.fusions <= other.fusions + 1 and own.bytes_accessed <= 1.05 * other.bytes_accessed
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_standard_is_the_program_of_jax_nn(case):
    target = Target.here()
    own = operations(op_program(case, registry.get("standard"), target))
    other = operations(by_hand(case, "standard", target))
    assert within(own, other), f"{own} against {other}"


@pytest.mark.parametrize("planted", ["copy", "conditional"])
def test_what_is_planted_is_over_the_bound(planted):
    target, case = Target.here(), CASES[0]
    library = by_hand(case, "standard", target)

    def taxed(query, key, value):
        if planted == "copy":
            key = jax.lax.optimization_barrier(key[:, ::-1])[:, ::-1]
            return library.function(query, key, value)
        bad = ~jnp.isfinite(value).all()
        return jax.lax.cond(bad, lambda: query, lambda: library.function(query, key, value))

    assert not within(operations(AbstractProgram(taxed, library.arguments)), operations(library))


def test_a_case_that_the_library_cannot_say_has_no_program_by_hand():
    target = Target.here()
    assert by_hand(OpCase(kind="op_forward", sequence=64, documents=2), "standard", target) is None
    assert by_hand(OpCase(kind="op_forward", sequence=64, soft_cap=3.0), "standard", target) is None
    assert by_hand(OpCase(kind="op_forward", sequence=64), "chunked", target) is None
    assert set(BY_HAND) <= set(registry.names())
