"""A decode step reads the cache where it lies, in either layout; the other layout costs a copy of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("llvmlite", reason="the kernels are compiled by llvmlite")

from attnsuite.backends import AttentionSpec, Layout, Target, plan, registry

SPEC = AttentionSpec(
    batch=2, query_length=1, key_value_length=4096, num_heads=8, num_kv_heads=4, head_dim=64, needs_grad=False,
    has_seq_lengths=True,
)  # fmt: skip
RNG = np.random.default_rng(0)
QUERY, KEY, VALUE = (
    jnp.asarray(RNG.standard_normal((2, length, heads, 64)).astype(np.float32))
    for length, heads in ((1, 8), (4096, 4), (4096, 4))
)
LENGTHS = jnp.asarray([4096, 3000], jnp.int32)


def _step(stored, planned_for):
    """A compiled step over a cache that is ``stored`` so and planned for so, and the cache."""

    @jax.jit
    def step(query, key, value, lengths):
        if stored == "heads_first":
            key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
        options = {"cache_layout": planned_for}
        made = plan(
            registry.get("flash_cpu"),
            SPEC,
            Layout(key_value_seq_lengths=lengths),
            target=Target.here(),
            options=options,
        )
        return made.run(query, key, value)[0]

    cache = tuple(x.swapaxes(1, 2) if stored == "heads_first" else x for x in (KEY, VALUE))
    return step, cache


def _temporary_bytes(stored, planned_for):
    step, cache = _step(stored, planned_for)
    return step.lower(QUERY, *cache, LENGTHS).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("layout", ["heads_first", "length_first"])
def test_cache_is_not_copied_in_the_layout_that_is_planned_for(layout):
    assert _temporary_bytes(layout, layout) < KEY.nbytes / 4


@pytest.mark.parametrize(("stored", "planned_for"), [("heads_first", "length_first"), ("length_first", "heads_first")])
def test_cache_of_the_other_layout_is_copied(stored, planned_for):
    assert _temporary_bytes(stored, planned_for) >= KEY.nbytes


def test_both_layouts_give_the_same_bits():
    results = []
    for layout in ("heads_first", "length_first"):
        step, cache = _step(layout, layout)
        results.append(np.asarray(step(QUERY, *cache, LENGTHS)))
    np.testing.assert_array_equal(*results)
