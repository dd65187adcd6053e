"""A decode step reads the cache where it lies, in either layout; planned for the other layout it would be copied."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("llvmlite", reason="the kernels are compiled by llvmlite")

from attnsuite.backends import Layout, Target, Terms, attention, plan, registry
from attnsuite.backends.kv_cache import quantize
from attnsuite.backends.layout import key_rows
from declared import sized
from drawn import draw
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


def test_scan_over_layers_whose_caches_are_pages_copies_none():
    """The caches are one pool, with a page for each layer and sequence."""
    layers, batch, slots = 4, 2, 4096
    spec = dataclasses.replace(NHD, page_size=slots, num_pages=layers * batch)
    pool = jax.ShapeDtypeStruct((layers * batch, slots, 4, 64), jnp.float32)
    query, new = (jax.ShapeDtypeStruct((batch, 1, heads, 64), jnp.float32) for heads in (8, 4))

    def step(keys, values, query, new, at):
        def layer(x, i):
            keys, values, query = x
            keys, values = (jax.lax.dynamic_update_slice(c, new, (i * batch, at, 0, 0)) for c in (keys, values))
            pages = (i * batch + jnp.arange(batch))[:, None]
            layout = Layout(page_table=pages, key_value_seq_lengths=jnp.full(batch, at + 1))
            made = plan(registry.get("flash_cpu"), spec, layout, target=Target.here())
            return (keys, values, made.run(query, keys, values)[0]), None

        return jax.lax.scan(layer, (keys, values, query), jnp.arange(layers))[0]

    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(pool, pool, query, new, 7)
    assert lowered.compile().memory_analysis().temp_size_in_bytes < CACHE_BYTES / 4


CACHES = ((13, None, 2, 1), (104, None, 8, 2), (8, "int8", 2, 3), (0, "int8", 8, 1), (16, "int8", 1, 1))
EITHER = [(*cache, kv_layout) for cache in CACHES for kv_layout in ("NHD", "HND")]


# Before a change lands each cache in one layout; pages, and int8, are in both.
@pytest.mark.parametrize(
    ("page_size", "kv_dtype", "kv_heads", "tokens", "kv_layout"), swept(EITHER, [EITHER[i] for i in (0, 3, 4, 7, 9)])
)
def test_cache_of_any_kind_gives_what_the_plain_formula_gives(page_size, kv_dtype, kv_heads, tokens, kv_layout):
    """Heads of 40 numbers end inside a vector; entries behind the lengths are no pages."""
    rng, slots, lengths = np.random.default_rng(0), 208, jnp.asarray([203, 77])
    shape, options = (2, slots, kv_heads, 40), {"key_value_seq_lengths": lengths}
    if page_size:
        pages = 2 * slots // page_size
        table = rng.permutation(pages).reshape(2, -1)
        table[1, -(-77 // page_size) :] = -1
        shape, options["page_table"] = (pages, page_size, kv_heads, 40), jnp.asarray(table, jnp.int32)
    query, key, value = draw(2, tokens, 8, 40), draw(*shape, seed=1), draw(*shape, seed=2)
    if kv_dtype:
        key, options["key_scales"] = quantize(key, kv_dtype)
        value, options["value_scales"] = quantize(value, kv_dtype)
    if kv_layout == "HND":
        key, value = (x.swapaxes(1, 2) for x in (key, value))
        options |= {name: x.swapaxes(1, 2) for name, x in options.items() if name.endswith("scales")}
    options |= {"is_causal": True, "query_positions": lengths[:, None] - tokens + jnp.arange(tokens)[None]}
    options |= {"kv_layout": kv_layout, "needs_grad": False, "return_log_sum_exp": True}
    found, right = (attention(query, key, value, backend=name, **options) for name in ("flash_cpu", "standard"))
    for x, y in zip(found, right, strict=True):
        np.testing.assert_allclose(x, y, atol=3e-6)


def test_mapped_step_over_pages_reads_the_pool_of_its_problem():
    query, *pool = draw(3, 1, 1, 4, 16), draw(3, 5, 8, 2, 16, seed=1), draw(3, 5, 8, 2, 16, seed=2)
    tables = jnp.asarray([[[0, 4]], [[3, 1]], [[2, 2]]], jnp.int32)

    def mapped(backend):
        run = lambda q, k, v, table: attention(q, k, v, page_table=table, backend=backend, needs_grad=False)  # noqa: E731
        return jax.vmap(run)(query, *pool, tables)

    np.testing.assert_allclose(mapped("flash_cpu"), mapped("standard"), atol=2e-6)


def test_scan_over_layers_copies_the_layer_that_it_reads_and_no_other():
    """XLA cuts a layer's keys and values out of the stacked caches, which are written in place."""
    layers, spec = 4, dataclasses.replace(NHD, has_seq_lengths=False)
    of_layers = jax.ShapeDtypeStruct((layers, 2, 4096, 4, 64), jnp.float32)
    query, new = (jax.ShapeDtypeStruct((2, 1, heads, 64), jnp.float32) for heads in (8, 4))

    def step(keys, values, query, new, at):
        def layer(x, i):
            keys, values, query = x
            keys, values = (jax.lax.dynamic_update_slice(c, new[None], (i, 0, at, 0, 0)) for c in (keys, values))
            made = plan(registry.get("flash_cpu"), spec, target=Target.here())
            return (keys, values, made.run(query, keys[i], values[i])[0]), None

        return jax.lax.scan(layer, (keys, values, query), jnp.arange(layers))[0]

    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(of_layers, of_layers, query, new, 7)
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 3 * CACHE_BYTES


def test_unknown_layout_is_refused():
    with pytest.raises(ValueError, match=r"kv_layout='BHSD' is not supported; use 'NHD' \(\[batch, length"):
        dataclasses.replace(NHD, kv_layout="BHSD")


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_step_with_a_gradient_has_the_kernels_output_and_the_plain_gradient(kv_layout):
    query, cache = draw(2, 1, 4, 32), (draw(2, 700, 2, 32, seed=1), draw(2, 700, 2, 32, seed=2))
    cache = cache if kv_layout == "NHD" else tuple(x.swapaxes(1, 2) for x in cache)
    lengths = jnp.asarray([700, 301], jnp.int32)

    def run(name, *arrays, **options):
        options = {"key_value_seq_lengths": lengths, "kv_layout": kv_layout, "on_unavailable": "raise", **options}
        return attention(*arrays, backend=name, **options)

    @jax.jit
    def gradients(*arrays):
        names = ("standard", "flash_cpu", "chunked")
        return [jax.grad(lambda *x, name=name: (run(name, *x) ** 2).sum(), (0, 1, 2))(*arrays) for name in names]

    for backend in ("flash_cpu", "chunked"):
        output = run(backend, query, *cache)
        np.testing.assert_array_equal(output, run(backend, query, *cache, needs_grad=False))
        np.testing.assert_allclose(output, run("standard", query, *cache), atol=2e-6)
    expected, *all_found = gradients(query, *cache)
    for found in all_found:
        for x, right in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, right, atol=2e-6)
