"""JAX's serving kernel for TPUs through the interpreter: mixed batches by the judge, and every refusal."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.backends import Layout, Target, Terms, plan, ragged_paged_attention, support
from attnsuite.backends.kv_cache import quantize, ragged_layout
from attnsuite.backends.ragged_paged_attention import RAGGED_PAGED_ATTENTION
from attnsuite.testing import problems
from attnsuite.testing.checks import check_accuracy, check_unseen_does_not_matter, compiled
from declared import sized

pytestmark = [pytest.mark.splash, pytest.mark.foreign_numerics]  # JAX's kernel promotes dtypes and ranks by itself

V5E = Target("tpu", "v5e")
TOKENS, PAGE, SEQUENCES = 24, 16, 3
SPEC = sized(
    TOKENS,
    SEQUENCES * 3 * PAGE,
    N=4,
    K=2,
    H=128,
    dtype="bfloat16",
    is_causal=True,
    local_window_size=(20, 5),
    logits_soft_cap=4.0,
    scale=0.2,
    has_segment_ids=True,
    has_positions=True,
    needs_grad=False,
    page_size=PAGE,
    num_pages=11,
)
OPTIONS = (("sequences", SEQUENCES),)
RNG = np.random.default_rng(0)
SHAPES = ((1, TOKENS, 4, 128), (11, PAGE, 2, 128), (11, PAGE, 2, 128), (1, TOKENS, 4, 128))
INPUTS = tuple(jnp.asarray(RNG.standard_normal(shape), jnp.bfloat16) for shape in SHAPES)
TABLE = RNG.permutation(11)[:9].reshape(SEQUENCES, 3).astype(np.int32)


def layout_of(lengths, starts):
    return ragged_layout(TABLE, np.array(lengths), np.array(starts), page_size=PAGE, num_tokens=TOKENS)


def run(layout, *inputs):
    step = problems.traced(RAGGED_PAGED_ATTENTION, SPEC, Target.here(), "interpret", OPTIONS)
    return step(layout, Terms(), *inputs)


BATCHES = {
    "mixed": ([48, 17, 30], [0, 13, 14, 24]),
    "padding and one that rests": ([40, 9, 16], [0, 1, 1, 17]),
    "empty ones": ([0, 0, 20], [0, 0, 0, 20]),
    "last one empty": ([48, 5, 0], [0, 1, 6, 6]),
}


@pytest.mark.parametrize("batch", BATCHES)
def test_one_compiled_step_serves_any_mixture(batch):
    layout = layout_of(*BATCHES[batch])
    assert fits(layout)
    check_accuracy(run(layout, *INPUTS), problems.solve(SPEC, layout, INPUTS))


FOUND = jax.jit(ragged_paged_attention._found, static_argnums=(0, 2))


def fits(layout, spec=SPEC, sequences=SEQUENCES):
    """Whether the kernel computes the batch, and not chunked."""
    bare = dataclasses.replace(spec, page_size=None, num_pages=None)
    return bool(FOUND(bare, layout, sequences).fits)


def test_slots_that_nobody_sees_do_not_matter():
    problem = problems.solve(SPEC, layout_of(*BATCHES["padding and one that rests"]), INPUTS)
    check_unseen_does_not_matter(lambda *inputs: run(problem.layout, *inputs), problem)


@functools.cache
def mixed():
    """The layout of the first batch, of NumPy's arrays."""
    return jax.tree.map(np.asarray, layout_of(*BATCHES["mixed"]))


def but(array, place, value):
    """The array with another value at one place of its row."""
    changed = array.copy()
    changed[0, place] = value
    return changed


@pytest.mark.parametrize(
    "changes",
    [
        lambda x: {"key_value_positions": x.key_value_positions[:, ::-1]},
        lambda x: {"key_value_positions": but(x.key_value_positions, 3, 30)},
        lambda x: {"query_positions": but(x.query_positions, 5, x.query_positions[0, 5] - 1)},
        lambda x: {"query_positions": x.query_positions + 1},  # the last rows stand behind their slots
        lambda x: {"query_segment_ids": x.query_segment_ids[:, ::-1]},
        lambda x: {"query_segment_ids": but(x.query_segment_ids, 3, 1)},
        lambda x: {"query_segment_ids": but(x.query_segment_ids, 20, 0)},
        lambda x: {"key_value_segment_ids": but(x.key_value_segment_ids, 3, -1)},
        lambda x: {
            "key_value_segment_ids": but(x.key_value_segment_ids, 3, -1),
            "query_positions": x.query_positions - 1,
        },
        lambda x: {"key_value_segment_ids": but(x.key_value_segment_ids, 47, 1)},
        lambda x: {"key_value_segment_ids": np.minimum(x.key_value_segment_ids, 1)},
    ],
)
def test_batch_that_is_not_of_sequences_in_a_row_is_not_given_to_the_kernel(changes):
    layout = dataclasses.replace(mixed(), **changes(mixed()))
    assert not fits(layout)
    check_accuracy(run(layout, *INPUTS), problems.solve(SPEC, layout, INPUTS))


def test_row_of_a_sequence_without_slots_is_zero():
    layout = dataclasses.replace(mixed(), query_segment_ids=but(mixed().query_segment_ids, 23, 7))
    assert fits(layout)
    check_accuracy(run(layout, *INPUTS), problems.solve(SPEC, layout, INPUTS))


def test_rows_of_a_padded_batch_behind_the_length_are_not_given_to_the_kernel():
    spec = dataclasses.replace(SPEC, batch=2, query_length=9, has_segment_ids=False, has_seq_lengths=True)
    at, lengths = np.array([[39], [8]]) + np.arange(9), np.array([48, 17])
    assert fits(Layout(query_positions=at, key_value_seq_lengths=lengths), spec, 1)
    assert not fits(Layout(query_positions=at, key_value_seq_lengths=lengths - 1), spec, 1)


def test_chunk_of_prefill_behind_a_quantised_cache_passes_the_judge():
    sizes = {"batch": 2, "query_length": 9, "key_value_length": 40, "num_kv_heads": 4}
    pages = {"page_size": None, "num_pages": None, "has_segment_ids": False, "has_seq_lengths": True}
    spec = dataclasses.replace(SPEC, **sizes, **pages, dtype="bfloat16", kv_dtype="int8", local_window_size=None)
    layout = Layout(query_positions=np.array([[31], [3]]) + np.arange(9), key_value_seq_lengths=np.array([40, 12]))
    query, key, value = (jnp.asarray(RNG.standard_normal((2, n, 4, 128)), jnp.bfloat16) for n in (9, 40, 40))
    (key, of_keys), (value, of_values) = quantize(key, "int8"), quantize(value, "int8")
    terms = Terms(key_scales=of_keys, value_scales=of_values)
    problem = problems.solve(spec, layout, (query, key, value, query), terms)
    check_accuracy(compiled(RAGGED_PAGED_ATTENTION, problem, Target.here(), "interpret")(*problem.inputs), problem)


def test_vmap_lowers_for_a_tpu():
    """Mosaic refuses the axis that ``jax.vmap`` would add to the pages, from which the kernel copies by itself."""
    sizes = {"batch": 1, "query_length": 9, "key_value_length": 48, "page_size": None, "num_pages": None}
    spec = dataclasses.replace(SPEC, **sizes, has_segment_ids=False, has_positions=False)
    arrays = (
        jax.ShapeDtypeStruct((3, 1, n, heads, 128), spec.dtype)
        for n, heads in ((9, spec.num_heads), (48, spec.num_kv_heads), (48, spec.num_kv_heads))
    )

    def run(query, key, value):
        return plan(RAGGED_PAGED_ATTENTION, spec, Layout(), target=V5E, mode="compile").run(query, key, value)[0]

    v5e = jax.sharding.AbstractDevice("TPU v5 lite", 1, "tpu")
    automatic = (jax.sharding.AxisType.Auto,)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("device",), automatic, abstract_device=v5e)):
        lowered = jax.jit(jax.vmap(run)).trace(*arrays).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" in lowered.as_text()


def test_segments_without_the_number_of_sequences_are_refused():
    (reason,) = support(RAGGED_PAGED_ATTENTION, SPEC, V5E).reasons
    assert "backend_options={'sequences': n}" in reason
