"""JAX's flash attention for TPUs through the interpreter: the judge, why rows that see nothing are masked, refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.backends import Layout, Target, plan, tpu_flash_attention
from attnsuite.backends.contract import may_attend
from attnsuite.backends.splash_operands import rows_that_see, segment_ids
from attnsuite.backends.tpu_flash_attention import TPU_FLASH_ATTENTION
from attnsuite.testing import problems
from attnsuite.testing.checks import check_accuracy, compiled
from declared import sized

pytestmark = [pytest.mark.splash, pytest.mark.foreign_numerics]  # JAX's kernel promotes dtypes and ranks by itself

V5E = Target("tpu", "v5e")
SPEC = sized(160, N=4, K=2, H=32, is_causal=True)


def test_bias_that_hides_keys_and_its_gradient_pass_the_judge():
    """Of whole blocks: a key of padding would hide that a row of minus infinity gives NaN, or one of -1e9 garbage."""
    name = "bias-of-minus-infinity"
    case = dataclasses.replace(problems.CASES[name], sizes=(1, 128, 128, 2, 1, 32, 32))
    layout, terms, inputs = problems.arrays(case, name)
    terms = dataclasses.replace(terms, bias=jnp.asarray(terms.bias).at[:, :, 10].set(-1e9))
    problem = problems.solve(problems.spec_of(case, layout, terms, inputs), layout, inputs, terms)
    assert problem.unseen_rows.any()
    check_accuracy(run_of(problem)(*problem.inputs), problem)


def run_of(problem):
    return compiled(TPU_FLASH_ATTENTION, problem, Target.here(), "interpret")


def test_vmap_of_a_gradient_lowers_for_the_interpreter():
    """It does not know the axis that ``jax.vmap`` would add to a grid."""
    spec = dataclasses.replace(SPEC, query_length=9, key_value_length=9)

    def loss(x):
        made = plan(TPU_FLASH_ATTENTION, spec, target=Target.here(), mode="interpret")
        return made.run(x, x[:, :, :2], x[:, :, :2])[0].sum()

    jax.jit(jax.vmap(jax.grad(loss))).lower(jnp.ones((2, 1, 9, 4, 32)))


@pytest.mark.thorough
def test_kernel_alone_gives_an_average_where_a_row_sees_nothing(monkeypatch):
    """The control of the zero rows."""
    problem = problems.problem("padding-both-ends")
    forward = dataclasses.replace(problem, spec=dataclasses.replace(problem.spec, needs_grad=False))
    monkeypatch.setattr(tpu_flash_attention, "rows_that_see", lambda ids, rows, **_: jnp.ones((len(ids.q), rows), bool))
    plan = TPU_FLASH_ATTENTION.plan(forward.spec, problem.layout, target=Target.here(), mode="interpret")
    out = plan.run(*problem.inputs[:3])[0]
    assert jnp.abs(out[problem.unseen_rows]).max() > 0
    assert not problem.verdict("output", out).passed


@pytest.mark.parametrize("causal", [False, True])
def test_rows_that_see_a_key_are_those_of_the_mask_and_no_array_is_quadratic(causal):
    rng, (batch, length) = np.random.default_rng(0), (8, 64)
    spec = sized(length, B=batch, N=1, H=8, is_causal=causal, has_segment_ids=True, has_seq_lengths=True)
    draw = lambda low, high, *shape: jnp.asarray(rng.integers(low, high, shape), jnp.int32)  # noqa: E731
    ids = draw(-1, 6, batch, length), draw(-1, 6, batch, length)

    def found(*arrays):
        layout = Layout(query_segment_ids=arrays[0], key_value_segment_ids=arrays[1], key_value_seq_lengths=arrays[2])
        return rows_that_see(segment_ids(spec, layout, (128, 128)), length, causal=causal)

    lengths = draw(0, length, batch)
    layout = Layout(query_segment_ids=ids[0], key_value_segment_ids=ids[1], key_value_seq_lengths=lengths)
    expected = may_attend(spec, layout).any((1, 3))
    assert expected.any()
    assert not expected.all()
    np.testing.assert_array_equal(found(*ids, lengths), expected)
    text = str(jax.make_jaxpr(found)(*ids, lengths))
    assert "128,128]" not in text
    assert f"{length},{length}]" not in text
