"""What Kvax 0.1.0 computes wrongly without a word, prevented; and without its guard each is wrong.

Thorough are those whose problem the conformance suite has too: before a change lands, it shows that they are prevented.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.backends import Layout, Target
from attnsuite.backends.kvax import KVAX, block_sizes, mesh
from attnsuite.backends.kvax import converted_layout as layouts
from attnsuite.testing import problems
from attnsuite.testing.checks import check_accuracy, check_unseen_does_not_matter, compiled
from declared import sized

pytestmark = pytest.mark.needs_kvax


def problem(*, ids=None, key_ids=None, positions=None, lengths=(384, 384), **changes):
    """One head over tokens of these lengths, causal."""
    has = {"has_segment_ids": ids is not None, "has_positions": positions is not None}
    spec = sized(*lengths, N=1, H=16, is_causal=True, **has, **changes)
    inputs = tuple(map(jnp.asarray, problems.drawn(spec)))
    row = lambda x: None if x is None else jnp.asarray(np.array(x, np.int32)[None])  # noqa: E731
    layout = Layout(
        query_segment_ids=row(ids),
        key_value_segment_ids=row(ids if key_ids is None else key_ids),
        query_positions=row(positions),
        key_value_positions=row(positions),
    )
    return problems.solve(spec, layout, inputs)


def run(case, **options):
    return compiled(KVAX, case, Target.here(), "interpret", options)


def check(case, **options):
    check_accuracy(run(case, **options)(*case.inputs), case)


SMALL = {"query_block_size": 64, "kv_block_size": 64, "backward_query_block_size": 64, "backward_kv_block_size": 64}
PACKED = np.repeat([1, 0], 192)
RETURNING = np.repeat([1, 0, 1], 128)
PADDED = np.repeat([0, 3, -1], [100, 140, 144])
ROTATED = np.roll(np.arange(384), 192)


@pytest.mark.thorough
def test_length_that_128_does_not_divide(monkeypatch):
    case = problem(lengths=(64, 64))
    check(case, **SMALL)
    monkeypatch.setattr(block_sizes, "PREPROCESS_BLOCK", 64)  # padded to the blocks alone
    with pytest.raises(AssertionError, match=r"dq: .*passed=False"):
        check(case, **SMALL)


def test_segment_ids_beyond_the_key_length(monkeypatch):
    case = problem(ids=np.where(PADDED < 0, PADDED, PADDED + 10**6))
    check(case)

    def unnamed(ids, wanted):
        return wanted, jnp.ones(wanted.shape, bool)

    monkeypatch.setattr(layouts, "convert", layouts.convert.__wrapped__)  # what was compiled has no fault
    monkeypatch.setattr(layouts, "first_slots", unnamed)
    monkeypatch.setattr(layouts, "_sees_a_key", lambda q_ids, *_: jnp.ones(q_ids.shape, bool))
    monkeypatch.setattr(layouts, "in_order", lambda segment, *_: jnp.ones(segment.shape[:1], bool))
    with pytest.raises(AssertionError, match="passed=False"):
        check(case)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param({"ids": RETURNING}, marks=pytest.mark.thorough),
        pytest.param({"positions": ROTATED}, marks=pytest.mark.thorough),
        {"positions": np.arange(384)[::-1], "ids": PACKED},
    ],
    ids=["segment that comes back", "rotated positions", "falling positions"],
)
def test_layout_out_of_the_order_that_kvax_assumes(monkeypatch, case):
    case = problem(**case)
    check(case, **SMALL)
    monkeypatch.setattr(mesh, "mask_everything_out_of_order", lambda bounds, *_: bounds)
    with pytest.raises(AssertionError, match="passed=False"):
        check(case, **SMALL)


def test_layout_in_order_is_not_masked_everywhere():
    for ids in (PACKED, PADDED, PADDED[::-1]):
        case = problem(ids=ids)
        converted = layouts.convert(case.spec, case.layout, 384, 384)
        assert converted.keys_in_order.all()
        assert converted.queries_in_order.all()


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_have_the_dtype_of_their_input(monkeypatch, dtype):
    case = problem(lengths=(128, 128), dtype=dtype)
    check(case)

    def as_kvax_gives_them(kernel):
        return kernel

    monkeypatch.setattr(mesh, "_in_the_dtype_of_its_input", as_kvax_gives_them)
    with pytest.raises((AssertionError, TypeError), match=r"dk: .*passed=False|dtype"):
        check(case)


def test_rows_that_see_nothing_are_zero(monkeypatch):
    # A segment that no key has.
    case = problem(ids=PADDED, key_ids=np.where(PADDED == 3, 5, PADDED))
    check(case)
    convert = layouts.convert
    monkeypatch.setattr(layouts, "convert", lambda *args: dataclasses.replace(convert(*args), seen=None))
    with pytest.raises(AssertionError, match=r"output: .*passed=False"):
        check(case)


def test_padding_does_not_match_padding(monkeypatch):
    case = problem(ids=PADDED)
    finer = {"query_block_size": 16}  # skips rows that the backward pass, in blocks of its own, does not
    check_unseen_does_not_matter(run(case, **finer), case, keys=False, finite=True)
    monkeypatch.setattr(layouts, "convert", layouts.convert.__wrapped__)  # what was compiled has no fault
    monkeypatch.setattr(layouts, "key_padding", lambda _: layouts.QUERY_PADDING)
    with pytest.raises(AssertionError):
        check_unseen_does_not_matter(run(case, **finer), case, keys=False, finite=True)


@pytest.mark.thorough
def test_fewer_keys_than_queries_in_the_backward_pass(monkeypatch):
    case = problem(lengths=(256, 128))
    check(case)

    def each_for_itself(spec, block_sizes, shards=1):
        return 256, 128

    monkeypatch.setattr(layouts, "padded_lengths", each_for_itself)
    with pytest.raises(AssertionError, match=r"dq: .*passed=False"):
        check(case)


def test_differentiating_what_was_planned_without_gradients_says_so():
    case = problem(lengths=(128, 128), needs_grad=False)
    plan = KVAX.plan(case.spec, case.layout, target=Target.here(), mode="interpret")
    with pytest.raises(ValueError, match="needs_grad=True"):
        jax.grad(lambda q: plan.run(q, *case.inputs[1:3])[0].sum())(case.inputs[0])
