"""Paged and quantised caches: what the named problems cannot say, and the sentences that refuse a cache."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.backends import Layout, Target, Terms, make_spec, oracle, plan, registry
from attnsuite.backends.contract import NO_TERMS
from attnsuite.backends.kv_cache import quantize, ragged_layout
from declared import sized

PAGE = 4
SPEC = sized(3, 12, B=2, K=1, H=8, needs_grad=False, page_size=PAGE, num_pages=9)
RNG = np.random.default_rng(0)
QUERY, KEYS, VALUES = (
    RNG.standard_normal(shape).astype(np.float32) for shape in ((2, 3, 2, 8), (9, PAGE, 1, 8), (9, PAGE, 1, 8))
)
TABLE, LENGTHS = np.array([[7, 2, -1], [4, 0, 5]], np.int32), np.array([6, 12], np.int32)


def run(backend, query, key, value, layout, terms=NO_TERMS, **options):
    spec = make_spec(query, key, value, layout, terms, needs_grad=False, **options)
    return np.asarray(_run(backend, spec)(layout, terms, query, key, value))


@functools.cache
def _run(backend, spec):
    """Compiled once for all layouts and terms."""

    @jax.jit
    def run(layout, terms, *operands):
        return plan(registry.get(backend), spec, layout, target=Target.here()).run(*operands, terms=terms)[0]

    return run


def test_ragged_batch_gives_each_sequence_what_it_gets_alone():
    table, lengths = np.array([[7, 2, 1], [4, 0, 5], [3, 3, 3], [8, 6, 1]]), np.array([6, 12, 0, 5])
    starts, tokens = np.array([0, 3, 4, 4, 9]), 11  # a chunk of prefill, a decode step, nothing, a prefill, padding
    query = RNG.standard_normal((1, tokens, 2, 8)).astype(np.float32)

    @jax.jit  # the next batch has other lengths
    def together(table, lengths, starts):
        layout = ragged_layout(table, lengths, starts, page_size=PAGE, num_tokens=tokens)
        spec = make_spec(query, KEYS, VALUES, layout, needs_grad=False, is_causal=True)
        return plan(registry.get("standard"), spec, layout, target=Target.here()).run(query, KEYS, VALUES)[0]

    found = np.asarray(together(table, lengths, starts))
    for i, (first, end) in enumerate(itertools.pairwise(starts)):
        slots = np.arange(lengths[i])
        keys, values = (x[table[i, slots // PAGE], slots % PAGE][None] for x in (KEYS, VALUES))
        if end > first:
            placed = (lengths[i] - (end - first) + np.arange(end - first))[None]
            of_one = Layout(query_positions=placed)
            spec = make_spec(query[:, first:end], keys, values, of_one, is_causal=True)
            alone = oracle.forward(spec, of_one, query[:, first:end], keys, values)
            np.testing.assert_allclose(found[:, first:end], alone, atol=1e-6)
    assert not found[:, starts[-1] :].any()


@pytest.mark.parametrize("backend", ["standard", "chunked", "flash_cpu"])
def test_only_rows_that_see_a_bad_slot_are_nan(backend):
    """A slot of a page outside the pool, one with a NaN, and one whose scale is NaN."""
    layout = Layout(page_table=TABLE, key_value_seq_lengths=LENGTHS, query_positions=np.array([[3, 4, 5], [3, 4, 9]]))
    numbers, scales = quantize(KEYS, "int8")
    of_values = quantize(VALUES, "int8")
    terms = Terms(key_scales=scales, value_scales=of_values[1])
    plain = run(backend, QUERY, KEYS, VALUES, layout, is_causal=True)
    eight = run(backend, QUERY, numbers, of_values[0], layout, terms, is_causal=True)
    assert np.isfinite(plain).all()
    assert np.isfinite(eight).all()  # the entry -1 has no slot that is seen
    nowhere = dataclasses.replace(layout, page_table=np.array([[7, 99, -1], [4, 0, 5]]))
    spoilt = VALUES.copy()
    spoilt[2, 0] = np.nan  # slot 4 of the first sequence
    spoilt[5, 3] = np.nan  # slot 11 of the second sequence, behind the position of every row
    damaged = dataclasses.replace(terms, key_scales=jnp.asarray(scales).at[2, 0].set(jnp.nan))
    for expected, found in (
        (plain, run(backend, QUERY, KEYS, VALUES, nowhere, is_causal=True)),
        (plain, run(backend, QUERY, KEYS, spoilt, layout, is_causal=True)),
        (eight, run(backend, QUERY, numbers, of_values[0], layout, damaged, is_causal=True)),
    ):
        assert np.isnan(found[0, 1:]).all()
        if backend == "chunked":  # the others let NaN in the slots of later positions through a causal mask
            np.testing.assert_array_equal(found[0, :1], expected[0, :1])
            np.testing.assert_array_equal(found[1], expected[1])


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="XLA of JAX 0.10.1 copies the pages into the loop")
def test_chunked_writes_no_contiguous_copy_of_the_pages():
    spec = dataclasses.replace(
        SPEC, key_value_length=8192, page_size=16, num_pages=1024, head_dim=64, value_head_dim=64, has_seq_lengths=True
    )
    pages = jax.ShapeDtypeStruct((1024, 16, 1, 64), jnp.float32)
    query = jax.ShapeDtypeStruct((2, 3, 2, 64), jnp.float32)
    temporary = {}
    for backend in ("standard", "chunked"):

        def step(query, key, value, table, lengths, backend=backend):
            layout = Layout(page_table=table, key_value_seq_lengths=lengths)
            return plan(registry.get(backend), spec, layout, target=Target.here()).run(query, key, value)[0]

        ids = jax.ShapeDtypeStruct((2, 512), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
        compiled = jax.jit(step).lower(query, pages, pages, *ids).compile()
        temporary[backend] = compiled.memory_analysis().temp_size_in_bytes
    cache = 2 * 1024 * 16 * 64 * 4
    assert temporary["chunked"] < cache / 8 < cache / 2 < temporary["standard"]


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("axes", [(3,), (1, 3)])
def test_quantised_numbers_times_scales_are_near(kv_dtype, axes):
    x = np.concatenate([KEYS, np.zeros_like(KEYS[:1])])
    numbers, scales = quantize(x, kv_dtype, axes=axes)
    back = np.asarray(numbers).astype(np.float64) * np.asarray(scales)[..., None]
    largest = np.abs(x).max(axes, keepdims=True)
    step = largest / 127 / 2 if kv_dtype == "int8" else np.maximum(np.abs(x) / 16, largest / 448 / 512)
    assert (np.abs(back - x) <= 1.001 * step).all()
    assert not back[-1].any()


def planned(table=TABLE, **changes):
    spec, layout = dataclasses.replace(SPEC, **changes), Layout(page_table=table)
    return plan(registry.get("standard"), spec, layout, target=Target.here())


def scaled(key_scales, value_scales=None):
    numbers, terms = KEYS.astype(np.int8), Terms(key_scales=key_scales, value_scales=value_scales)
    return planned(kv_dtype="int8").run(jnp.asarray(QUERY), numbers, numbers, terms=terms)


SCALES = np.ones((1, 1, 1), np.float32)
REFUSED = {
    "page_size=4 asks for a cache, which has no gradient; give needs_grad=False": lambda: planned(needs_grad=True),
    "kv_dtype='int8' asks for a cache, which has no gradient": lambda: planned(needs_grad=True, kv_dtype="int8"),
    "page_size=4 and num_pages=None go together": lambda: planned(num_pages=None),
    "key_value_length=12 must be a multiple of page_size=5": lambda: planned(page_size=5),
    "page_size=0 must be an integer of at least 1": lambda: planned(page_size=0),
    "kv_dtype='float16' is not supported; use one of int8, float8_e4m3fn, or None": lambda: planned(kv_dtype="float16"),
    "kv_dtype='int4' is not supported; use one of int8, float8_e4m3fn": lambda: quantize(KEYS, "int4"),
    "lacks 3": lambda: quantize(KEYS, "int8", axes=(0, 1, 2)),  # a scale for each channel
    "the spec says page_size=4, but the layout brings no page_table": lambda: planned(None),
    r"page_table has shape \(2, 2\); expected \(2, 3\)": lambda: planned(TABLE[:, :2]),
    "page_table has dtype float32; expected an integer dtype": lambda: planned(TABLE.astype(np.float32)),
    "the layout brings page_table, but the spec says page_size=None": lambda: planned(page_size=None, num_pages=None),
    "kv_dtype='int8' asks for key_scales, but it is None; give key_scales=...": lambda: scaled(None),
    r"key_scales has shape \(2, 1, 1\); expected 3 dimensions": lambda: scaled(SCALES.repeat(2, 0), SCALES),
    "key_scales has dtype float16; expected float32": lambda: scaled(np.ones((9, 4, 1), np.float16), SCALES),
    "key_scales is given, but keys and values are not quantised": lambda: make_spec(
        QUERY, QUERY, QUERY, Layout(), Terms(key_scales=SCALES)
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_cache_that_there_cannot_be_is_refused(words):
    with pytest.raises(ValueError, match=words):
        REFUSED[words]()
