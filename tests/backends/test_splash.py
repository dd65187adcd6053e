"""The splash backend through Pallas' interpreter: the contract, and what its kernel leaves to its caller."""

import dataclasses
import functools

import jax
import pytest

import left_out
from attnsuite.backends import Layout, Target, masks, support
from attnsuite.backends.devices import TPUS
from attnsuite.backends.splash import SPLASH
from attnsuite.backends.splash_operands import blocks_of
from attnsuite.testing import Conformance, problems
from attnsuite.testing.checks import check_accuracy, compiled
from declared import sized

pytestmark = [pytest.mark.splash, pytest.mark.foreign_numerics]  # JAX's kernel promotes dtypes and ranks by itself

V5E = Target("tpu", "v5e")


class TestSplash(Conformance):
    backend = "splash"
    mode = "interpret"
    cases = left_out.CASES
    # How JAX calls the kernels does not depend on what they mask.
    cases_for_eager = ("padding-both-ends",)
    cases_for_vmap = ("combination",)
    cases_for_traced_layouts = ("padding-both-ends", "ragged-causal")
    random_problems = (5, 0, 1, 2, 3)
    refuses = frozenset(
        (
            *("*-float16", "decode-4", "chunk-of-prefill"),
            *("positions-*", "rows-before-every-key", "combination-ragged", "function-positions"),
            *("mask-*", "bias-*", "log-sum-exp*", "sinks-log-sum-exp", "sinks-decode", "alibi*", "score*"),
            *("pages*", "kv-*", "values-in-keys*"),
        )
    )


spec_of = functools.partial(sized, B=2, N=4, K=2, H=32)
FUSED = {"fused_backward": True}
SMALL = {"block_q": 128, "block_kv": 256, "block_kv_compute": 128}
UNEVEN = {"block_q": 384, "block_kv": 128, "block_q_backward": 256, "block_kv_backward": 384}
BACKWARD = {"block_q": 128, "block_kv": 128, "fused_backward": True, "block_kv_backward": 256}


@pytest.mark.thorough
# Every choice on everything at once, and each other shape with the choice that its blocks fit least.
@pytest.mark.parametrize(
    ("case", "options"),
    [
        *(("combination", options) for options in (FUSED, SMALL, UNEVEN, BACKWARD)),
        *(("length-1000", UNEVEN), ("more-keys", SMALL), ("decode-1", BACKWARD)),
    ],
    ids=str,
)
def test_options_do_not_change_what_is_computed(case, options):
    problem = problems.problem(case, None)
    check_accuracy(compiled(SPLASH, problem, Target.here(), "interpret", options)(*problem.inputs), problem)


def test_positions_are_taken_where_nothing_is_about_them():
    assert support(SPLASH, spec_of(64, 64, has_positions=True), V5E)


@pytest.mark.parametrize("kind", TPUS)
def test_lengths_are_padded_by_less_than_a_lane_per_block(kind):
    for length in (1, 128, 129, 1000, 1153, 5000):
        blocks = blocks_of("splash", spec_of(length + 1, length), Target("tpu", kind), {})
        assert 0 <= blocks.lengths[0] - length - 1 < 128 * (blocks.lengths[0] // blocks.q)


def test_mask_function_that_hides_every_key_gives_zeros():
    """Of such a mask neither JAX nor tokamax makes a kernel. Causality hides here what the function shows."""
    spec = spec_of(24, 24, is_causal=True, mask_function=masks.Where(lambda q, k: k > q))
    plan = SPLASH.plan(spec, Layout(), target=Target.here(), mode="interpret")
    query, key, value, _ = problems.drawn(spec)
    out, gradient = jax.value_and_grad(lambda key: plan.run(query, key, value)[0].sum())(key)
    assert not out
    assert not gradient.any()


def test_notes_say_where_the_scale_rounds_the_query():
    for head_dim, dtype in ((64, "bfloat16"), (32, "float32")):
        exact = spec_of(16, 16, H=head_dim, dtype=dtype, needs_grad=False)
        assert not SPLASH.plan(exact, Layout(), target=Target.here(), mode="interpret").notes
    spec = spec_of(16, 16, dtype="bfloat16", needs_grad=False)
    plan = SPLASH.plan(spec, Layout(), target=Target.here(), mode="interpret")
    assert "0.1768 is no power of two" in plan.notes[0]
    query, key, value, _ = (
        size * x.astype(spec.dtype) for size, x in zip((4, 4, 1, 1), problems.drawn(spec), strict=True)
    )
    problem = problems.solve(dataclasses.replace(spec, needs_grad=True), Layout(), (query, key, value, query))
    assert not problem.verdict("output", plan.run(query, key, value)[0]).passed
