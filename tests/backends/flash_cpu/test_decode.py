"""A decode step reads the cache where it lies, in either layout; planned for the other layout it would be copied."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("llvmlite", reason="the kernels are compiled by llvmlite")

from attnsuite.backends import Layout, Target, Terms, attention, masks, plan, registry
from attnsuite.backends.flash_cpu import decode_parts
from attnsuite.backends.flash_cpu.calls import Calls
from attnsuite.backends.layout import key_rows
from attnsuite.testing import layouts
from attnsuite.testing.caches import Cache
from attnsuite.testing.cases import case, leaning
from attnsuite.testing.problems import arrays, solve, spec_of
from declared import sized
from drawn import draw
from emitted import set_apart
from landing import swept

NHD = sized(1, 4096, B=2, N=8, K=4, needs_grad=False, has_seq_lengths=True)
HND = dataclasses.replace(NHD, kv_layout="HND")
PAGES = {"page_size": 16, "num_pages": 512}


def temporary_bytes(spec, swapped=False):
    """Scratch memory of a step over a cache that lies as ``spec`` says, or whose axes the caller swaps."""

    @jax.jit
    def step(query, key, value, lengths):
        key, value = (x.swapaxes(1, 2) if swapped else x for x in (key, value))
        made = plan(registry.get("flash_cpu"), spec, Layout(key_value_seq_lengths=lengths), target=Target.here())
        return made.run(query, key, value)[0]

    shape = (2, 4096, 4, 64) if (spec is NHD) != swapped else (2, 4, 4096, 64)
    cache, query = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct((2, 1, 8, 64), jnp.float32)
    compiled = step.lower(query, cache, cache, jax.ShapeDtypeStruct((2,), jnp.int32)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


CACHE_BYTES = 2 * 4096 * 4 * 64 * 4


@pytest.mark.parametrize("spec", [NHD, HND], ids=["NHD", "HND"])
def test_cache_whose_axes_the_caller_swaps_is_copied(spec):
    assert temporary_bytes(spec, swapped=True) >= CACHE_BYTES


@pytest.mark.parametrize("spec", [NHD, HND], ids=["NHD", "HND"])
@pytest.mark.parametrize(
    "cache",
    [{}, PAGES, {"kv_dtype": "int8"}, {**PAGES, "kv_dtype": "int8"}],
    ids=["plain", "pages", "int8", "int8-pages"],
)
def test_cache_of_any_kind_is_read_where_it_lies(spec, cache):
    spec = dataclasses.replace(spec, **cache)
    shape, dtype = (*key_rows(spec), 64), jnp.int8 if spec.kv_dtype else jnp.float32

    @jax.jit
    def step(query, key, value, lengths, table, scales):
        layout = Layout(key_value_seq_lengths=lengths, page_table=table if spec.page_size else None)
        terms = Terms(key_scales=scales, value_scales=scales) if spec.kv_dtype else Terms()
        return plan(registry.get("flash_cpu"), spec, layout, target=Target.here()).run(query, key, value, terms=terms)[
            0
        ]

    given = [((2, 1, 8, 64), jnp.float32), *[(shape, dtype)] * 2, ((2,), jnp.int32), ((2, 256), jnp.int32)]
    given.append((shape[:-1], jnp.float32))
    compiled = step.lower(*(jax.ShapeDtypeStruct(*x) for x in given)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < math.prod(shape) * jnp.dtype(dtype).itemsize / 4


@pytest.mark.parametrize("paged", [True, False])
def test_scan_over_layers_copies_no_cache_but_what_xla_cuts_out_for_a_layer(paged):
    """Caches of all layers are written in place. XLA cuts a layer's out of them, unless they are pages of one pool."""
    layers, batch, slots = 4, 2, 4096
    spec = dataclasses.replace(NHD, **{"page_size": slots, "num_pages": layers * batch} if paged else {"batch": batch})
    lead = (layers * batch,) if paged else (layers, batch)
    caches = jax.ShapeDtypeStruct((*lead, slots, 4, 64), jnp.float32)
    query, new = (jax.ShapeDtypeStruct((batch, 1, heads, 64), jnp.float32) for heads in (8, 4))

    def step(keys, values, query, new, at):
        def layer(x, i):
            keys, values, query = x
            written, place = (new, (i * batch, at, 0, 0)) if paged else (new[None], (i, 0, at, 0, 0))
            keys, values = (jax.lax.dynamic_update_slice(c, written, place) for c in (keys, values))
            pages = (i * batch + jnp.arange(batch))[:, None] if paged else None
            layout = Layout(page_table=pages, key_value_seq_lengths=jnp.full(batch, at + 1))
            made = plan(registry.get("flash_cpu"), spec, layout, target=Target.here())
            read = (keys, values) if paged else (keys[i], values[i])
            return (keys, values, made.run(query, *read)[0]), None

        return jax.lax.scan(layer, (keys, values, query), jnp.arange(layers))[0]

    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(caches, caches, query, new, 7)
    assert lowered.compile().memory_analysis().temp_size_in_bytes < (0.25 if paged else 3) * CACHE_BYTES


def test_mapped_step_over_pages_reads_the_pool_of_its_problem():
    query, *pool = draw(3, 1, 1, 4, 16), draw(3, 5, 8, 2, 16, seed=1), draw(3, 5, 8, 2, 16, seed=2)
    tables = jnp.asarray([[[0, 4]], [[3, 1]], [[2, 2]]], jnp.int32)

    def mapped(backend):
        run = lambda q, k, v, table: attention(q, k, v, page_table=table, backend=backend, needs_grad=False)  # noqa: E731
        return jax.vmap(run)(query, *pool, tables)

    np.testing.assert_allclose(mapped("flash_cpu"), mapped("standard"), atol=2e-6)


# With what is added to scores, and with functions: bias, mask and slope arrays are read in place.


def step(*terms, T=4, S=299, **options):
    """A step of two sequences behind caches that end inside a vector of keys."""
    layout = layouts.together(layouts.decoding(299, 90), *terms)
    return case(T=T, S=S, N=4, K=2, is_causal=True, layout=layout, **{"needs_grad": False, **options})


STEPS = {
    "alibi": step(layouts.alibi),
    "alibi-pages": step(layouts.alibi, T=1, S=304, cache=Cache(page_size=16)),
    "bias": step(layouts.bias(heads=True)),
    "bias-broadcast": step(layouts.bias(heads=False), T=1, logits_soft_cap=4.0),
    "bias-of-minus-infinity": step(layouts.closing_bias),
    "mask": step(layouts.mask(heads=True), T=1),
    "everything": step(
        layouts.mask(heads=True), layouts.bias(heads=True), layouts.alibi, layouts.sinks, T=16,
        score_function=leaning, logits_soft_cap=3.0,
    ),
    "score": step(score_function=leaning),
    "sinks": step(layouts.sinks, T=1, return_log_sum_exp=True),
    "function": step(T=1, mask_function=masks.Dilated(2), dtype="bfloat16"),
}  # fmt: skip


@functools.cache
def problem(name, kv_layout="NHD"):
    given = dataclasses.replace(STEPS[name], options={**STEPS[name].options, "kv_layout": kv_layout})
    layout, terms, inputs = arrays(given, name)
    return solve(spec_of(given, layout, terms, inputs), layout, inputs, terms)


@pytest.fixture
def decode_alone(monkeypatch):
    def not_asked(*_, **__):
        raise AssertionError("the forward kernel is made for many queries")

    monkeypatch.setattr(Calls, "forward", not_asked)


@pytest.mark.parametrize("kv_layout", swept(["NHD", "HND"], ["HND"]))
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.usefixtures("decode_alone")
def test_step_with_terms_takes_the_decode_kernel_and_passes_the_judge(name, kv_layout):
    given = problem(name, kv_layout)
    made = plan(registry.get("flash_cpu"), given.spec, given.layout, target=Target.here())
    found = jax.tree.leaves(made.run(*given.inputs[:3], terms=given.terms)[0])
    quantities = ("output", "log_sum_exp")[: 1 + given.spec.return_log_sum_exp]
    for quantity, result in zip(quantities, found, strict=True):
        verdict = given.verdict(quantity, result)
        assert verdict.passed, verdict


@pytest.mark.parametrize("name", ["mask", "bias"])
@pytest.mark.usefixtures("decode_alone")
def test_a_block_that_the_last_head_does_not_see_is_seen_by_the_others(name):
    rng = np.random.default_rng(0)
    query, key, value = draw(2, 1, 4, 32), draw(2, 256, 4, 32, seed=1), draw(2, 256, 4, 32, seed=2)
    seen = np.repeat(rng.random((2, 4, 1, 4)) < 0.5, 64, 3)
    seen[:, :, :, -1], seen[:, -1, :, :-1] = True, False
    array = {"mask": jnp.asarray(seen), "bias": jnp.asarray(np.where(seen, 0, -np.inf), jnp.float32)}[name]
    run = functools.partial(attention, query, key, value, needs_grad=False, **{name: array})
    np.testing.assert_allclose(run(backend="flash_cpu"), run(backend="standard"), atol=2e-6)


@pytest.mark.parametrize("queries", [1, 40])
def test_a_row_whose_keys_are_all_at_the_least_number_averages_them(queries):
    query, key, value = draw(1, queries, 2, 32), draw(1, 40, 2, 32, seed=1), draw(1, 40, 2, 32, seed=2)
    bias = jnp.full((1, 1, queries, 40), jnp.finfo(jnp.float32).min)
    out = attention(query, key, value, bias=bias, backend="flash_cpu", needs_grad=False)
    np.testing.assert_allclose(out, jnp.broadcast_to(value.mean(1, keepdims=True), out.shape), atol=1e-6)


@pytest.mark.parametrize("queries", [1, 40])
def test_a_key_at_the_largest_number_takes_its_rows(queries):
    query, key, value = draw(1, queries, 2, 32), draw(1, 40, 2, 32, seed=1), draw(1, 40, 2, 32, seed=2)
    bias = jnp.zeros((1, 1, queries, 40)).at[..., 3].set(jnp.finfo(jnp.float32).max)
    out = attention(query, key, value, bias=bias, backend="flash_cpu", needs_grad=False)
    np.testing.assert_allclose(out, jnp.broadcast_to(value[:, 3:4], out.shape), atol=1e-6)


def _hidden_from_one_head(keys=99):
    """A step whose second head may not see a slot that its group's first head sees, where the value is NaN."""
    rng = np.random.default_rng(0)
    query, key, value = (
        rng.standard_normal((1, n, heads, 32), np.float32) for n, heads in ((1, 2), (keys, 1), (keys, 1))
    )
    value[0, 40] = np.nan
    mask = np.ones((1, 2, 1, keys), bool)
    mask[0, 1, 0, 40] = False
    run = functools.partial(attention, jnp.asarray(query), jnp.asarray(key), mask=jnp.asarray(mask), needs_grad=False)
    return (np.asarray(run(jnp.asarray(x), backend="flash_cpu"))[0, 0] for x in (value, np.nan_to_num(value)))


@pytest.mark.usefixtures("decode_alone")
def test_nan_reaches_no_row_that_a_mask_hides_it_from():
    out, right = _hidden_from_one_head()
    assert np.isnan(out[0]).all()
    np.testing.assert_array_equal(out[1], right[1])


def test_nan_would_reach_it_if_hidden_keys_had_the_weight_zero(monkeypatch, tmp_path):
    set_apart(monkeypatch, tmp_path, "decode, fault: weight of zero")
    monkeypatch.setattr(decode_parts, "_NO_WEIGHT", 0.0)
    assert np.isnan(next(_hidden_from_one_head(keys=98))).all()  # a program of its own
