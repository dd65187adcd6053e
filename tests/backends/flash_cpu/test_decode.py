"""A decode step reads the cache where it lies, in either layout; planned for the other layout it would be copied."""

import dataclasses
import fnmatch

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("llvmlite", reason="the kernels are compiled by llvmlite")

from attnsuite.backends import AttentionSpec, Layout, Target, attention, plan, registry
from attnsuite.backends.flash_cpu.calls import Calls
from attnsuite.testing.problems import CASES, problem

NHD = AttentionSpec(
    batch=2, query_length=1, key_value_length=4096, num_heads=8, num_kv_heads=4, head_dim=64, needs_grad=False,
    has_seq_lengths=True,
)  # fmt: skip
HND = dataclasses.replace(NHD, kv_layout="HND")
DECODING = [
    name
    for name in CASES
    if "hnd" not in name and any(fnmatch.fnmatch(name, x) for x in ("decode*", "log-sum-exp-decode*"))
]


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
def test_cache_is_not_copied(spec):
    assert temporary_bytes(spec) < CACHE_BYTES / 4


@pytest.mark.parametrize("spec", [NHD, HND], ids=["NHD", "HND"])
def test_cache_whose_axes_the_caller_swaps_is_copied(spec):
    assert temporary_bytes(spec, swapped=True) >= CACHE_BYTES


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


@pytest.mark.parametrize("name", DECODING)
def test_heads_before_slots_pass_the_judge(name):
    """Slots before heads are what the conformance suite asks of every backend."""
    given = problem(name)
    spec = dataclasses.replace(given.spec, kv_layout="HND", needs_grad=False, return_log_sum_exp=False)
    query, *cache, _ = given.inputs
    key, value = (None if x is None else jnp.swapaxes(x, 1, 2) for x in cache)
    backend = registry.get("flash_cpu")
    made = plan(backend, spec, given.layout, target=Target.here())
    verdict = given.verdict("output", made.run(query, key, value, terms=given.terms)[0])
    assert verdict.passed, verdict


def test_unknown_layout_is_refused():
    with pytest.raises(ValueError, match=r"kv_layout='BHSD' is not supported; use 'NHD' \(\[batch, length"):
        dataclasses.replace(NHD, kv_layout="BHSD")


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("backend", ["flash_cpu", "chunked"])
def test_step_with_a_gradient_has_the_kernels_output_and_the_plain_gradient(backend, kv_layout):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))  # noqa: E731
    query, cache = draw(2, 1, 4, 32), (draw(2, 700, 2, 32), draw(2, 700, 2, 32))
    cache = cache if kv_layout == "NHD" else tuple(x.swapaxes(1, 2) for x in cache)
    lengths = jnp.asarray([700, 301], jnp.int32)

    def run(name, *arrays, **options):
        options = {"key_value_seq_lengths": lengths, "kv_layout": kv_layout, "on_unavailable": "raise", **options}
        return attention(*arrays, backend=name, **options)

    def gradients(name):
        return jax.grad(lambda *arrays: (run(name, *arrays) ** 2).sum(), (0, 1, 2))(query, *cache)

    np.testing.assert_array_equal(run(backend, query, *cache), run(backend, query, *cache, needs_grad=False))
    np.testing.assert_allclose(run(backend, query, *cache), run("standard", query, *cache), atol=2e-6)
    for found, expected in zip(gradients(backend), gradients("standard"), strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize(
    "more", [{"sinks": True}, {"log_sum_exp": True}, {"sinks": True, "log_sum_exp": True}], ids=str
)
def test_step_with_sinks_or_a_log_sum_exp_takes_the_decode_kernel(monkeypatch, more):
    def not_asked(*_):
        raise AssertionError("the forward kernel is made for many queries")

    monkeypatch.setattr(Calls, "forward", not_asked)
    rng = np.random.default_rng(0)
    query, key = (jnp.asarray(rng.standard_normal((2, n, 4, 32)), jnp.float32) for n in (1, 300))
    sinks = jnp.linspace(-1.0, 2.0, 4) if "sinks" in more else None
    results = (
        attention(
            query, key, key, sinks=sinks, needs_grad=False, return_log_sum_exp="log_sum_exp" in more, backend=name
        )
        for name in ("flash_cpu", "standard")
    )
    for x, right in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(x, right, atol=2e-6)
