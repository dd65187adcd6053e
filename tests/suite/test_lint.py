"""What the text of a compiled program shows: each fact is planted in one program and left out of another."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.backends import Target, make_spec, registry
from attnsuite.suite.cell import Means
from attnsuite.suite.compile.by_hand import BY_HAND, by_hand
from attnsuite.suite.compile.programs import op_program as compiled_program
from attnsuite.suite.kinds.attention_call import OpCase, op_program, spec_of
from attnsuite.suite.measure import execution, lint
from attnsuite.suite.measure.program import Program

MEANS = Means(reference=None, memory_limit=2**33)


def read(function, dtype="float32", kv_heads=2):
    query, key = jnp.ones((1, 128, 4, 16), dtype), jnp.ones((1, 128, kv_heads, 16), dtype)
    text = jax.jit(function).lower(query, key, key).compile().as_text()
    return lint.read(text, make_spec(query, key, key))


def naive(query, key, value):
    key, value = (jnp.repeat(x, 2, axis=2) for x in (key, value))
    weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", query, key))
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def linear(query, key, value):
    """Attention without a softmax: the scores are never formed."""
    state = jnp.einsum("bskh,bskv->bkhv", key, value)
    return jnp.einsum("btnh,bkhv->btnv", query, state)


def test_array_of_the_size_of_the_scores_is_found():
    assert read(naive).score_arrays > 0
    assert read(linear).score_arrays == 0


def test_blocks_of_scores_are_no_array_of_the_size_of_the_scores():
    case = OpCase(kind="op_forward", sequence=4096, heads=2, kv_heads=2, head_dim=16)
    found = {}
    for name in ("standard", "chunked"):
        program = op_program(case, registry.get(name), "native", Target.here())
        text = jax.jit(program.function).lower(*program.arguments).compile().as_text()
        found[name] = lint.read(text, spec_of(case)).score_arrays
    assert found["standard"] > found["chunked"] == 0


def test_product_that_accumulates_in_half_precision_is_told_from_one_in_float32():
    def product(out):
        return lambda query, key, _: jnp.einsum("btnh,bskh->bts", query, key, preferred_element_type=out)

    assert read(product("bfloat16"), "bfloat16").products == {"bf16 x bf16 -> bf16": 1}
    accumulated = {words.partition(" -> ")[2] for words in read(product("float32"), "bfloat16").products}
    assert accumulated == {"f32"}


def test_copy_of_the_keys_is_found():
    def copied(query, key, value):
        return query.sum() + value.sum() + jax.lax.optimization_barrier(jnp.swapaxes(key, 1, 3) * 2).sum()

    def summed(query, key, value):
        return query.sum() + key.sum() + value.sum()

    assert read(copied).copies > 0
    assert read(summed).copies == 0
    assert read(lambda a, b, c: a.sum() + b.sum() + c.sum()).copies is None  # nothing says which argument the keys are


def test_what_the_text_cannot_tell_is_not_counted():
    query = jnp.ones((1, 16, 2, 16))  # scores and keys have as many elements
    text = jax.jit(linear).lower(query, query, query).compile().as_text()
    assert lint.read(text, make_spec(query, query, query)).score_arrays is None


def test_memory_of_a_core_is_no_copy_and_a_kernel_goes_by_its_name():
    text = """HloModule planted
ENTRY %main (key.1: f32[1,128,2,16]) -> f32[1,128,2,16] {
  %key.1 = f32[1,128,2,16]{3,2,1,0:T(8,128)} parameter(0), metadata={op_name="key"}
  %move = (f32[1,128,2,16]{3,2,1,0:T(8,128)S(1)}, f32[1,128,2,16]{3,2,1,0:T(8,128)}, u32[]) copy-start(%key.1)
  %turned = f32[1,128,2,16]{1,3,2,0:T(8,128)} copy(%key.1)
  ROOT %out = (f32[1,128,2,16]{3,2,1,0}, f32[4]{0}) custom-call(%turned), custom_call_target="tpu_custom_call"
}
"""
    query = jnp.ones((1, 128, 4, 16))
    found = lint.read(text, make_spec(query, query[:, :, :2], query[:, :, :2]))
    assert (found.copies, found.products) == (1, {"kernel tpu_custom_call": 1})


@pytest.mark.parametrize("repeats", [True, False])
def test_program_whose_second_run_differs_in_a_bit_is_found(repeats):
    calls = itertools.count()

    def last_bit(x):
        return np.nextafter(x, np.float32(np.inf)) if not repeats and next(calls) % 2 else x

    def function(query):
        return jax.pure_callback(last_bit, jax.ShapeDtypeStruct(query.shape, query.dtype), query)

    assert execution.execute(Program(function, (jnp.ones((2, 2)),)), MEANS)[2].repeats is repeats


# The tax of the interface: the program of a backend against the library called by hand.

CALL = OpCase(kind="op_forward", sequence=128)


def operations(program):
    return lint.operations(jax.jit(program.function).lower(*program.arguments).compile())


def within(own, other):
    """The bound: no conditional, at most one more fusion, at most 5% more bytes."""
    return (
        own.conditionals == 0 and own.fusions <= other.fusions + 1 and own.bytes_accessed <= 1.05 * other.bytes_accessed
    )


def test_standard_is_the_program_of_jax_nn():
    target = Target.here()
    own = operations(compiled_program(CALL, registry.get("standard"), target))
    other = operations(by_hand(CALL, "standard", target))
    assert within(own, other), f"{own} against {other}"


@pytest.mark.parametrize("planted", ["copy", "conditional"])
def test_what_is_planted_is_over_the_bound(planted):
    target = Target.here()
    library = by_hand(CALL, "standard", target)

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
    own, other = compiled_program(case, registry.get(backend), target), by_hand(case, backend, target)
    assert jax.eval_shape(other.function, *other.arguments) == jax.eval_shape(own.function, *own.arguments)


def test_a_case_that_the_library_cannot_say_has_no_program_by_hand():
    target = Target.here()
    assert by_hand(OpCase(kind="op_forward", sequence=64, documents=2), "standard", target) is None
    assert by_hand(OpCase(kind="op_forward", sequence=64, soft_cap=3.0), "standard", target) is None
    assert by_hand(OpCase(kind="op_forward", sequence=64, mask="causal | prefix(8)"), "standard", target) is None
    assert by_hand(OpCase(kind="op_forward", sequence=64), "chunked", target) is None
    assert by_hand(OpCase(kind="op_forward", sequence=64), "pallas_flash", Target("cuda", "h100")) is None
    assert set(BY_HAND) <= set(registry.names())
