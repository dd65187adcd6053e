"""Kvax's own kernels against the oracle: executed on a CPU, and natively where there is an NVIDIA GPU."""

import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.backends import Layout, Target
from attnsuite.backends.kvax import KVAX
from attnsuite.testing import Conformance, problems
from attnsuite.testing.checks import check_accuracy, check_nan_is_let_in, compiled
from attnsuite.testing.problems import CASES
from declared import sized
from landing import swept

# Kvax's dq kernel multiplies the query by the scale and rounds the product to half precision before it recomputes the
# scores, which the forward pass does not: where logits are large its probabilities are not those of the forward pass.
# Nothing outside of the kernel can mend that; docs/explanation/kvax.md says so.
LOSES_DQ = ("big-logits-bfloat16", "big-logits-float16")


@pytest.mark.needs_kvax
class TestKvax(Conformance):
    backend = "kvax"
    mode = "interpret"
    # Interpreted, length-2100 takes 14 s, and has no kind of block that length-1000 and segments-1300 lack.
    cases = tuple(case for case in CASES if case not in (*LOSES_DQ, "length-2100"))
    random_problems = (4, 1, 5, 8)  # others lose dq
    refuses = frozenset(
        (
            *("head-dim-33", "head-dim-72", "head-dim-80", "head-dim-96", "head-dim-192", "value-dim-narrower"),
            *("window-*", "decode-window", "chunk-causal", "chunk-bidirectional", "chunk-1", "soft-cap*"),
            *("positions-shuffled", "positions-negative-chunks", "combination*", "mask-*", "bias-*", "log-sum-exp*"),
            *("sinks*", "alibi*", "function-*", "score*", "pages*", "kv-*", "values-in-keys*"),
        )
    )
    cases_for_eager = ("causal", "padding-both-ends")
    cases_for_vmap = ("causal", "ragged")
    cases_for_traced_layouts = (
        "segments-causal",
        "padding-both-ends",
        "ragged-causal",
        "positions-reversed",
        "decode-4",
    )


class TestKvaxNative(Conformance):
    """Support is judged for an H100 everywhere; the numbers need an NVIDIA GPU."""

    backend = "kvax"
    target = Target("cuda", "h100")
    dtype = "bfloat16"
    cases = tuple(case for case in CASES if not case.startswith("big-logits"))  # all are bfloat16 here
    refuses = TestKvax.refuses


@pytest.mark.needs_kvax
@pytest.mark.parametrize("case", swept(LOSES_DQ, LOSES_DQ[:1]))
def test_only_dq_suffers_from_big_logits_in_half_precision(case):
    assert passed(problems.problem(case)) == {"output": True, "dq": False, "dk": True, "dv": True}


@pytest.mark.thorough
@pytest.mark.needs_kvax
@pytest.mark.parametrize(("magnitude", "largest_logit", "dq"), [(2, 18, True), (4, 72, False)])
def test_dq_leaves_the_noise_floor_between_logits_of_18_and_72(magnitude, largest_logit, dq):
    spec = sized(256, K=1, dtype="bfloat16", is_causal=True)
    rng = np.random.default_rng(0)
    shapes = (((1, 256, 2, 64), magnitude), ((1, 256, 1, 64), magnitude), ((1, 256, 1, 64), 1), ((1, 256, 2, 64), 1))
    inputs = tuple(jnp.asarray((rng.standard_normal(s) * size).astype(jnp.bfloat16)) for s, size in shapes)
    query, key = (np.asarray(x)[0, :, 0].astype(np.float64) for x in inputs[:2])
    assert round(np.abs(query @ key.T / 8).max()) == largest_logit
    assert passed(problems.solve(spec, Layout(), inputs)) == {"output": True, "dq": dq, "dk": True, "dv": True}


def passed(problem):
    """Which quantities pass the judge."""
    results = compiled(KVAX, problem, Target.here(), "interpret")(*problem.inputs)
    return {
        name: problems.judge(name, results[name], expected, problem.standard[name], problem.spec).passed
        for name, expected in problem.expected.items()
    }


SMALL_BLOCKS = {
    "query_block_size": 32,
    "kv_block_size": 64,
    "backward_query_block_size": 64,
    "backward_kv_block_size": 32,
}  # so small that a short sequence has many


@pytest.mark.thorough
@pytest.mark.needs_kvax
@pytest.mark.parametrize("case", ["segments-returning", "padding-both-ends", "ragged-causal", "positions-reversed"])
def test_small_blocks_compute_the_same(case):
    problem = problems.problem(case)
    check_accuracy(compiled(KVAX, problem, Target.here(), "interpret", SMALL_BLOCKS)(*problem.inputs), problem)


@pytest.mark.needs_kvax
def test_nan_behind_the_lengths_reaches_other_rows():
    check_nan_is_let_in("kvax")
