"""What each Pallas kernel of JAX and tokamax is held to in its interpreter; more of each is in a file of its own."""

import os

import jax
import jax.numpy as jnp
import pytest

from attnsuite.backends import Target, plan, registry, tokamax_splash, tokamax_triton
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
    reasons = ABSENT.get(request.getfixturevalue("name"))
    if reasons and "ATTNSUITE_REQUIRE_TOKAMAX" not in os.environ:
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
        ("tpu_flash_attention", "padding-both-ends", None, None),
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
