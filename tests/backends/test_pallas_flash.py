"""JAX's Pallas attention for GPUs through the interpreter: forward in half precision, and every refusal."""

import dataclasses
import fnmatch

import jax
import pytest

from attnsuite.backends import Target, make_spec, oracle, pallas_flash, support
from attnsuite.backends.pallas_flash import PALLAS_FLASH
from attnsuite.testing import problems
from landing import swept

H100 = Target("cuda", "h100")
pytestmark = [pytest.mark.splash, pytest.mark.foreign_numerics]  # JAX's kernel promotes dtypes and ranks by itself

TAKEN = (
    *("plain", "causal", "gqa-8", "mqa", "scale", "head-dim-33", "head-dim-128", "head-dim-256"),
    *("length-1", "length-128", "length-129", "big-logits-bfloat16"),
)
CASES = (*((case, "bfloat16") for case in TAKEN), ("causal", "float16"))
FIRST = tuple((case, "bfloat16") for case in ("plain", "gqa-8", "scale")) + CASES[-1:]


# In another dtype, length, head dimension or number of heads.
LIKE_THESE = (
    *("gqa-[14]", "heads-equal*", "head-dim-*", "length-*"),
    *("causal-*float16", "causal-1000-bfloat16", "big-logits-*"),
)


def problem_in(case, dtype):
    solved = problems.problem(case, dtype)
    return solved, dataclasses.replace(solved.spec, needs_grad=False)


def run(spec, problem):
    plan = PALLAS_FLASH.plan(spec, problem.layout, target=Target.here(), mode="interpret")
    return lambda q, k, v: plan.run(q, k, v)[0]


@pytest.mark.parametrize(("case", "dtype"), swept(CASES, FIRST))
def test_output_passes_the_judge(case, dtype):
    problem, spec = problem_in(case, dtype)
    assert support(PALLAS_FLASH, spec, Target.here(), "interpret")
    out = jax.jit(run(spec, problem))(*problem.inputs[:3])
    verdict = oracle.judge(out, problem.expected["output"], problem.standard["output"], dtype)
    assert verdict.passed, verdict


@pytest.mark.parametrize("case", sorted(set(problems.CASES) - set(TAKEN)))
def test_every_other_problem_is_refused(case):
    layout, terms, inputs = problems.arrays(problems.CASES[case], case, "bfloat16")
    spec = make_spec(*inputs[:3], layout, terms, **problems.CASES[case].options | {"needs_grad": False})
    is_like_these = any(fnmatch.fnmatchcase(case, pattern) for pattern in LIKE_THESE)
    assert is_like_these or not support(PALLAS_FLASH, spec, H100), f"{case} is taken and nowhere judged"


@pytest.mark.thorough
def test_why_gradients_are_refused():
    """The kernel's own dq at large logits, which the judge does not pass; at ordinary ones it does."""
    verdicts = {}
    for case in ("causal-bfloat16", "big-logits-bfloat16"):
        problem = problems.problem(case)
        kernel = pallas_flash.kernel_module().mha
        group, behind = problem.spec.group_size, -problem.spec.query_length % 128
        query, key, value, d_out = (jax.numpy.pad(x, ((0, 0), (0, behind), (0, 0), (0, 0))) for x in problem.inputs)

        def attend(query, key, value, kernel=kernel, group=group, scale=problem.spec.softmax_scale):
            key, value = (jax.numpy.repeat(x, group, axis=2) for x in (key, value))
            return kernel(query, key, value, None, sm_scale=scale, causal=True, interpret=True)

        dq = jax.vjp(attend, query, key, value)[1](d_out)[0][:, : problem.spec.query_length]
        verdicts[case] = oracle.judge(dq, problem.expected["dq"], problem.standard["dq"], "bfloat16", "gradient")
    assert verdicts["causal-bfloat16"].passed
    assert not verdicts["big-logits-bfloat16"].passed
