"""What each Pallas kernel of JAX and tokamax is held to in its interpreter; more of most is in a file of its own."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import pytest

from attnsuite.backends import Layout, Target, plan, registry, tokamax_splash, tokamax_triton
from attnsuite.backends.splash_operands import rows_that_see, segment_ids
from attnsuite.backends.tpu_flash_attention import TPU_FLASH_ATTENTION
from attnsuite.testing import problems
from attnsuite.testing.checks import (
    LETS_NAN_IN,
    check_accuracy,
    check_nan_is_let_in,
    check_unseen_does_not_matter,
    compiled,
)
from declared import sized

# These kernels promote dtypes and ranks by themselves.
pytestmark = [pytest.mark.splash, pytest.mark.foreign_numerics]

ABSENT = {"tokamax_splash": tokamax_splash.missing(), "tokamax_triton": tokamax_triton.missing()}


@pytest.fixture(autouse=True)
def needs_its_package(request):
    named = request.node.callspec.params.get("name") if hasattr(request.node, "callspec") else None
    if (reasons := ABSENT.get(named)) and "ATTNSUITE_REQUIRE_TOKAMAX" not in os.environ:
        pytest.skip("; ".join(reasons))


@pytest.mark.parametrize(
    ("name", "case", "dtype", "options"),
    [
        ("paged_attention", "pages-decode", None, None),
        ("tokamax_splash", "combination", None, None),  # grouped queries, window, soft cap, padding, scale
        ("tokamax_splash", "sinks-of-nothing", None, None),
        ("tokamax_splash", "decode-window", None, None),
        (
            "tokamax_splash",
            "more-keys",
            None,
            {"block_kv": 256, "block_kv_compute": 128, "block_kv_backward": 128, "block_q_backward": 256},
        ),
        ("tokamax_triton", "ragged-causal", "bfloat16", None),  # a sequence of 160 tokens, of one key, and of none
        pytest.param("tpu_flash_attention", "padding-both-ends", None, None, marks=pytest.mark.thorough),
    ],
)
def test_problem_passes_the_judge_and_what_nobody_sees_does_not_matter(name, case, dtype, options):
    problem = problems.problem(case, dtype)
    run = compiled(registry.get(name), problem, Target.here(), "interpret", options)
    results = run(*problem.inputs)
    check_accuracy(results, problem)
    check_unseen_does_not_matter(run, problem, results, finite=name in LETS_NAN_IN)


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(LETS_NAN_IN - {"kvax"}))
def test_nan_behind_the_lengths_reaches_other_rows(name):
    check_nan_is_let_in(name, "bfloat16" if name == "tokamax_triton" else "float32")


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, "interpret") for name in ("pallas_flash", "splash", "tokamax_splash", "tokamax_triton")),
        *(("tpu_flash_attention", "interpret"), ("chunked", "native"), ("kascade", "native")),
    ],
)
def test_differentiating_what_was_planned_without_gradients_says_so(name, mode):
    spec = sized(256, K=1, dtype="bfloat16", is_causal=True, needs_grad=False)
    query, key = jnp.ones((1, 256, 2, 64), jnp.bfloat16), jnp.ones((1, 256, 1, 64), jnp.bfloat16)
    made = plan(registry.get(name), spec, target=Target.here(), mode=mode)
    with pytest.raises(ValueError, match="needs_grad=True"):
        jax.grad(lambda q: made.run(q, key, key)[0].astype(jnp.float32).sum())(query)


# JAX's flash attention for TPUs


def test_bias_that_hides_keys_and_its_gradient_pass_the_judge():
    """Of whole blocks: a key of padding would hide that a row of minus infinity gives NaN, or one of -1e9 garbage."""
    name = "bias-of-minus-infinity"
    case = dataclasses.replace(problems.CASES[name], sizes=(1, 128, 128, 2, 1, 32, 32))
    layout, terms, inputs = problems.arrays(case, name)
    terms = dataclasses.replace(terms, bias=jnp.asarray(terms.bias).at[:, :, 10].set(-1e9))
    problem = problems.solve(problems.spec_of(case, layout, terms, inputs), layout, inputs, terms)
    assert problem.unseen_rows.any()
    check_accuracy(compiled(TPU_FLASH_ATTENTION, problem, Target.here(), "interpret")(*problem.inputs), problem)


def test_vmap_of_a_gradient_lowers_for_the_interpreter():
    """It does not know the axis that ``jax.vmap`` would add to a grid."""
    spec = sized(9, N=4, K=2, H=32, is_causal=True)

    def loss(x):
        made = plan(TPU_FLASH_ATTENTION, spec, target=Target.here(), mode="interpret")
        return made.run(x, x[:, :, :2], x[:, :, :2])[0].sum()

    jax.jit(jax.vmap(jax.grad(loss))).lower(jnp.ones((2, 1, 9, 4, 32)))


@pytest.mark.parametrize("causal", [False, True])
def test_rows_that_see_a_key_are_found_without_a_quadratic_array(causal):
    length = 64
    spec = sized(length, B=8, N=1, H=8, is_causal=causal, has_segment_ids=True, has_seq_lengths=True)

    def found(ids, of_keys, lengths):
        layout = Layout(query_segment_ids=ids, key_value_segment_ids=of_keys, key_value_seq_lengths=lengths)
        return rows_that_see(segment_ids(spec, layout, (128, 128)), length, causal=causal)

    ids, lengths = jax.ShapeDtypeStruct((8, length), jnp.int32), jax.ShapeDtypeStruct((8,), jnp.int32)
    text = str(jax.make_jaxpr(found)(ids, ids, lengths))
    assert "128,128]" not in text
    assert f"{length},{length}]" not in text
