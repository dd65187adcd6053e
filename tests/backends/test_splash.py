"""The splash backend through Pallas' interpreter: the contract, and what its kernel leaves to its caller."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import splash_attention

import left_out
from attnsuite.backends import Layout, Target, masks, oracle, support
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
        {
            "*-float16",
            "decode-4",
            "chunk-of-prefill",
            "positions-*",
            "rows-before-every-key",
            "combination-ragged",
            "mask-*",
            "bias-*",
            "log-sum-exp*",
            "sinks-log-sum-exp",
            "sinks-decode",
            "alibi*",
            "function-positions",
            "score*",
            "pages*",
            "kv-*",
            "values-in-keys*",
        }
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


@pytest.mark.parametrize(
    ("changes", "target", "mode"),
    [
        ({}, V5E, "native"),
        ({"dtype": "bfloat16"}, Target("tpu", "v4"), "compile"),
        ({"has_positions": True}, V5E, "native"),  # nothing here is about positions
        ({"query_length": 1, "is_causal": True, "has_positions": True}, V5E, "native"),
        ({"dtype": "bfloat16"}, Target("cpu"), "interpret"),
    ],
)
def test_takes_what_the_kernel_has(changes, target, mode):
    assert support(SPLASH, spec_of(64, 64) if not changes else _changed(changes), target, mode)


def _changed(changes):
    return dataclasses.replace(spec_of(64, 64), **changes)


def test_mask_is_sorted_once_for_all_layers_passes_and_traces(monkeypatch):
    sorted_masks = []
    real = splash_attention.make_splash_mha_single_device

    def counted(*arguments, **options):
        sorted_masks.append(1)
        return real(*arguments, **options)

    monkeypatch.setattr(splash_attention, "make_splash_mha_single_device", counted)
    spec = spec_of(333, 333, is_causal=True)  # a length that no other test has

    def layers(query, key, value):
        plan = SPLASH.plan(spec, Layout(), target=Target.here(), mode="interpret")
        for layer in range(3):
            query, _ = plan.run(query, key, value, layer=layer)
        return query

    query, key, value, _ = problems.drawn(spec)
    eager = layers(query, key, value)
    np.testing.assert_allclose(jax.jit(layers)(query, key, value), eager, atol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.checkpoint(layers))(query, key, value), eager, atol=1e-6)
    assert len(sorted_masks) == 1


@pytest.mark.parametrize("kind", TPUS)
def test_lengths_are_padded_by_less_than_a_lane_per_block(kind):
    for length in (1, 128, 129, 1000, 1153, 5000):
        blocks = blocks_of("splash", spec_of(length + 1, length), Target("tpu", kind), {})
        assert 0 <= blocks.lengths[0] - length - 1 < 128 * (blocks.lengths[0] // blocks.q)


@pytest.mark.thorough
def test_kernel_alone_gives_garbage_where_a_row_sees_nothing():
    """The control of the zero rows: what the conformance suite would have caught without the sink."""
    problem = problems.problem("segments-unmatched")
    spec, layout = problem.spec, problem.layout
    kernel = splash_attention.make_splash_mha_single_device(
        splash_attention.MultiHeadMask([splash_attention.FullMask((256, 256))]), interpret=True
    )
    query, key, value = (jnp.pad(x[0].swapaxes(0, 1), ((0, 0), (0, 96), (0, 0))) for x in problem.inputs[:3])
    ids = splash_attention.SegmentIds(
        jnp.pad(layout.query_segment_ids[0], (0, 96), constant_values=-1),
        jnp.pad(layout.key_value_segment_ids[0], (0, 96), constant_values=-2),
    )
    alone = kernel(query * spec.softmax_scale, key, value, ids).swapaxes(0, 1)[:160]
    blind = problem.unseen_rows[0]
    assert blind.any()
    assert np.abs(np.asarray(alone)[blind]).min(-1).max() > 0
    ours = SPLASH.plan(spec, layout, target=Target.here(), mode="interpret").run(*problem.inputs[:3])[0]
    assert not np.asarray(ours)[0][blind].any()
    expected = oracle.forward(spec, layout, *problem.inputs[:3])[0]
    np.testing.assert_allclose(np.asarray(alone)[~blind], expected[~blind], atol=1e-5)


def test_mask_function_that_hides_every_key_gives_zeros():
    """Of such a mask neither JAX nor tokamax makes a kernel. Causality hides here what the function shows."""
    spec = spec_of(24, 24, is_causal=True, mask_function=masks.Where(lambda q, k: k > q))
    plan = SPLASH.plan(spec, Layout(), target=Target.here(), mode="interpret")
    query, key, value, _ = problems.drawn(spec)
    out, gradient = jax.value_and_grad(lambda key: plan.run(query, key, value)[0].sum())(key)
    assert not out
    assert not gradient.any()


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "bfloat16"), (32, "float32")])
def test_notes_are_silent_where_the_scale_rounds_nothing(head_dim, dtype):
    spec = spec_of(16, 16, H=head_dim, dtype=dtype, needs_grad=False)
    assert not SPLASH.plan(spec, Layout(), target=Target.here(), mode="interpret").notes


def test_notes_say_that_the_scale_rounds_the_query():
    spec = spec_of(16, 16, dtype="bfloat16", needs_grad=False)
    plan = SPLASH.plan(spec, Layout(), target=Target.here(), mode="interpret")
    assert "0.1768 is no power of two" in plan.notes[0]
    query, key, value, _ = (
        size * x.astype(spec.dtype) for size, x in zip((4, 4, 1, 1), problems.drawn(spec), strict=True)
    )
    problem = problems.solve(dataclasses.replace(spec, needs_grad=True), Layout(), (query, key, value, query))
    assert not problem.verdict("output", plan.run(query, key, value)[0]).passed
