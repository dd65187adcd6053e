"""JAX's paged decode kernel for TPUs through the interpreter: the judge, what it cannot read, and every refusal."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import paged_attention as kernels

from attnsuite.backends import Layout, Target, Terms, paged_attention
from attnsuite.backends.paged_attention import PAGED_ATTENTION
from attnsuite.testing import problems
from attnsuite.testing.checks import check_accuracy, compiled
from declared import sized

pytestmark = [pytest.mark.splash, pytest.mark.foreign_numerics]  # JAX's kernel promotes dtypes and ranks by itself

V5E = Target("tpu", "v5e")
# Eight query heads on each KV head, for which the kernel has a layout of its own, and three pages in blocks of two.
SPEC = sized(
    1,
    48,
    B=4,
    N=16,
    K=2,
    H=128,
    dtype="bfloat16",
    scale=0.2,
    logits_soft_cap=4.0,
    is_causal=True,
    has_positions=True,
    has_seq_lengths=True,
    needs_grad=False,
    page_size=16,
    num_pages=14,
)
RNG = np.random.default_rng(0)
INPUTS = tuple(
    jnp.asarray(RNG.standard_normal(shape), jnp.bfloat16)
    for shape in ((4, 1, 16, 128), (14, 16, 2, 128), (14, 16, 2, 128), (4, 1, 16, 128))
)
TABLE = RNG.permutation(14)[:12].reshape(4, 3).astype(np.int32)


@pytest.mark.parametrize(
    ("lengths", "ahead", "reverse"),
    [
        ([48, 17, 1, 33], 0, False),
        ([0, 60, 0, -2], 0, False),  # more slots than there are, fewer than none
        ([32, 0, 0, 0], 0, False),
        ([48, 17, 1, 33], -4, False),  # of these slots the last four lie in the future
        ([48, 17, 1, 33], -6, True),  # the first six do
    ],
)
def test_one_compiled_step_serves_any_lengths(lengths, ahead, reverse):
    layout = layout_of(lengths, ahead)
    if reverse:
        layout = dataclasses.replace(layout, key_value_positions=layout.key_value_positions[:, ::-1].copy())
    check_accuracy(run(layout, *INPUTS), problems.solve(SPEC, layout, INPUTS))


def test_contiguous_cache_is_read_as_pages_in_a_row():
    spec = dataclasses.replace(SPEC, page_size=None, num_pages=None, num_heads=2)
    shapes = ((4, 1, 2, 128), (4, 48, 2, 128), (4, 48, 2, 128), (4, 1, 2, 128))
    inputs = tuple(jnp.asarray(RNG.standard_normal(shape), jnp.bfloat16) for shape in shapes)
    problem = problems.solve(spec, dataclasses.replace(layout_of([48, 17, 0, 33]), page_table=None), inputs)
    run = compiled(PAGED_ATTENTION, problem, Target.here(), "interpret")
    check_accuracy(run(*inputs), problem)


def layout_of(lengths, ahead=0):
    filled = np.array(lengths, np.int32)
    slots = np.broadcast_to(np.arange(48, dtype=np.int32), (4, 48))
    return Layout(
        query_positions=np.clip(filled, 0, 48)[:, None] - 1 + ahead,
        key_value_positions=slots,
        key_value_seq_lengths=filled,
        page_table=TABLE,
    )


def run(layout, *inputs):
    return problems.traced(PAGED_ATTENTION, SPEC, Target.here(), "interpret")(layout, Terms(), *inputs)


def test_only_heads_that_see_a_bad_slot_are_nan():
    """A page outside the pool, and a NaN in one KV head of one slot; others of the same step keep their bits."""
    layout = layout_of([48, 17, 1, 33])
    plain = np.asarray(run(layout, *INPUTS)["output"])
    query, key, value, cotangent = INPUTS
    spoilt = value.at[TABLE[0, 2], 15, 1].set(jnp.nan)  # slot 47 of the first sequence
    spoilt = spoilt.at[TABLE[1, 1], 1, 0].set(jnp.nan)  # slot 17 of the second, behind its length
    table = TABLE.copy()
    table[2, 1:], table[3, 2] = -1, 14  # the third sequence sees one page, the fourth sees all
    layout = dataclasses.replace(layout, page_table=table)
    assert np.isnan(np.asarray(run(layout, *INPUTS)["output"])).all((1, 2, 3)).tolist() == [False, False, False, True]
    found = np.asarray(run(layout, query, key, spoilt, cotangent)["output"])
    bad = np.zeros((4, 1, 16), bool)
    bad[0, :, 8:] = bad[3] = True
    assert np.isnan(found[bad]).all()
    np.testing.assert_array_equal(found[~bad], plain[~bad])


def test_query_that_is_not_finite_is_nan_unless_it_sees_nothing():
    query, *others = INPUTS
    query = query.at[0, 0, 3].set(jnp.inf).at[1, 0, 3].set(jnp.nan)
    found = np.asarray(run(layout_of([48, 0, 1, 33]), query, *others)["output"])
    assert np.isnan(found[0, 0, 3]).all()
    assert np.isfinite(np.delete(found[0, 0], 3, 0)).all()
    assert not found[1].any()


@pytest.mark.thorough
def test_why_the_query_is_given_in_float32(monkeypatch):
    """With eight heads in a group the kernel rounds its output to the query's dtype after every block."""
    pages, step = 32, {"batch": 1, "key_value_length": 512, "num_heads": 8, "num_kv_heads": 1, "num_pages": 32}
    spec = dataclasses.replace(SPEC, scale=None, logits_soft_cap=None, has_positions=False, is_causal=False, **step)
    shapes = ((1, 1, 8, 128), (pages, 16, 1, 128), (pages, 16, 1, 128), (1, 1, 8, 128))
    inputs = tuple(jnp.asarray(RNG.standard_normal(shape), jnp.bfloat16) for shape in shapes)
    layout = Layout(key_value_seq_lengths=np.array([512]), page_table=np.arange(pages)[None])
    problem = problems.solve(spec, layout, inputs)

    def check():
        cache = (x[:, :, 0] for x in inputs[1:3])
        table = jnp.arange(pages, dtype=jnp.int32)[None, None]
        how = {"per_block": 1, "interpreted": pltpu.force_tpu_interpret_mode}
        out = paged_attention._decode(spec, jnp.array([512]), table, inputs[0], *cache, **how)
        check_accuracy({"output": out}, problem)

    check()
    in_float32 = kernels.paged_attention
    monkeypatch.setattr(
        kernels, "paged_attention", lambda q, *rest, **how: in_float32(q.astype("bfloat16"), *rest, **how)
    )
    with pytest.raises(AssertionError, match=r"output: .*passed=False"):
        check()
