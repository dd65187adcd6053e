"""The log-sum-exp of the public call has a gradient under jit, grad and vmap, and puts parts of the keys together."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.backends import attention, merge_parts
from attnsuite.testing import problems

pytestmark = [pytest.mark.standard, pytest.mark.newest]

# llvmlite compiles flash_cpu. JAX rebuilds its dataclass of arrays with placeholders, which checked annotations refuse.
FLASH_CPU = [pytest.param("flash_cpu", marks=pytest.mark.wrong_types)] if importlib.util.find_spec("llvmlite") else []
# Further programs that take long to compile: its gradients of a log-sum-exp are in the conformance suite.
CHUNKED = pytest.param("chunked", marks=pytest.mark.thorough)
SPLIT = 96  # keys of the first part
SINKS = np.array([-1.0, 0.5, 1.0, 2.0], np.float32)


def arrays():
    rng = np.random.default_rng(0)
    shapes = ((1, 130, 4, 16), (1, 160, 2, 16), (1, 160, 2, 16))
    return tuple(jnp.asarray(rng.standard_normal(shape).astype(np.float32)) for shape in shapes)


def in_parts(query, key, value, sinks, backend):
    """Causal attention with sinks, the keys in two parts; the first 30 rows see nothing of the second."""
    parts = []
    for keys, of_part in ((slice(0, SPLIT), sinks), (slice(SPLIT, None), None)):
        positions = {"query_positions": jnp.arange(66, 196)[None], "key_value_positions": jnp.arange(160)[keys][None]}
        arguments = {"is_causal": True, "sinks": of_part, "backend": backend, **positions}
        part = attention(query, key[:, keys], value[:, keys], **arguments, return_log_sum_exp=True)
        parts.append(part)
    return merge_parts(parts)


@pytest.mark.parametrize("backend", ["standard", CHUNKED, *FLASH_CPU])
def test_two_parts_of_the_keys_give_the_whole_with_its_gradients(backend):
    operands = (*arrays(), SINKS)
    whole = functools.partial(
        attention,
        is_causal=True,
        query_positions=jnp.arange(66, 196)[None],
        backend="standard",
        return_log_sum_exp=True,
    )
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(lambda q, k, v, s: whole(q, k, v, sinks=s), *operands)
    cotangents = tuple(jnp.asarray(rng.standard_normal(x.shape).astype(np.float32)) for x in shapes)

    @functools.partial(jax.jit, static_argnums=0)
    def compared(run, *operands):
        results, pullback = jax.vjp(run, *operands)
        return results, pullback(cotangents)

    expected = compared(lambda q, k, v, s: whole(q, k, v, sinks=s), *operands)
    found = compared(functools.partial(in_parts, backend=backend), *operands)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * float(jnp.abs(other).max()))


@pytest.mark.wrong_types  # vmap of a gradient puts plain objects into chunked's layout while it looks for axes
@pytest.mark.parametrize("backend", [CHUNKED, *FLASH_CPU])
def test_the_log_sum_exp_of_the_call_is_float32_with_the_oracles_gradient_under_vmap(backend):
    problem = problems.problem("log-sum-exp-bfloat16")
    ids = problem.layout.query_segment_ids

    @jax.jit
    @jax.vmap
    def gradients(query, key, value, cotangent):
        run = functools.partial(
            attention,
            is_causal=True,
            query_segment_ids=ids,
            key_value_segment_ids=ids,
            backend=backend,
            on_unavailable="raise",
            return_log_sum_exp=True,
        )
        results, pullback = jax.vjp(run, query, key, value)
        return *results, *pullback((cotangent, problems.cotangent_of_log_sum_exp(cotangent)))

    found = gradients(*(jnp.stack([x, x[::-1]]) for x in problem.inputs))
    for name, result in zip(("output", "log_sum_exp", "dq", "dk", "dv"), found, strict=True):
        assert problem.verdict(name, result[0]).passed, name


def test_rows_that_see_nothing_of_any_part_stay_zero_and_give_finite_gradients():
    nothing = (jnp.zeros((1, 2, 1, 4)), jnp.full((1, 2, 1), -jnp.inf))
    out, log_sum_exp = jax.jit(merge_parts)([nothing, nothing])
    assert not out.any()
    assert jnp.isneginf(log_sum_exp).all()
    gradients = jax.jit(jax.grad(lambda parts: sum(x.sum() for x in merge_parts(parts))))([nothing, nothing])
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(gradients))


def test_parts_in_float64_are_merged_in_float64() -> None:
    with jax.enable_x64(new_val=True):
        x = jnp.linspace(-1.0, 1.0, 6 * 4).reshape(1, 6, 1, 4)
        assert x.dtype == jnp.float64
        parts = [attention(x, y, y, return_log_sum_exp=True, backend="standard") for y in (x[:, :2], x[:, 2:])]
        np.testing.assert_allclose(merge_parts(parts)[0], attention(x, x, x, backend="standard"), rtol=1e-13)


@pytest.mark.wrong_types
def test_what_is_no_part_is_refused_in_a_sentence():
    part = (jnp.zeros((1, 2, 1, 4)), jnp.zeros((1, 2, 1)))
    for parts in ([], part, None, [([1.0], [2.0])]):
        with pytest.raises(ValueError, match="parts is empty or no list of pairs; give at least one pair"):
            merge_parts(parts)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"part 1 is bfloat16\[1, 2, 1, 4\] .* expected float32\[1, 2, 1, 4\]"):
        merge_parts([part, (part[0].astype(jnp.bfloat16), part[1])])
