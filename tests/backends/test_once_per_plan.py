"""What does not depend on the layer is done once per plan, not once per layer: counted over a plan of three layers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas.ops.tpu import splash_attention

from attnsuite.backends import Layout, Target, plan, splash, splash_blocks
from attnsuite.backends.kascade import KASCADE, LayerRole, Schedule, backend, pallas_tpu
from declared import sized

LAYERS = 3
DENSE_TWICE = Schedule((LayerRole("dense", 0), LayerRole("reuse", 0), LayerRole("dense", 2)))


@pytest.fixture
def counted(monkeypatch):
    """Counts the calls of functions that stay what they are."""
    counts = {}

    def count(module, *names):
        for name in names:
            counts[name] = 0
            monkeypatch.setattr(module, name, functools.partial(called, name, getattr(module, name)))
        return counts

    def called(name, inner, *args, **options):
        counts[name] += 1
        return inner(*args, **options)

    return count


def run_layers(attention, spec, **planned):
    """Shapes alone: what is counted happens while a program is traced."""

    def layers(layout, query, key, value):
        made, carry = plan(attention, spec, layout, target=Target("cpu"), mode="interpret", **planned), ()
        for layer in range(LAYERS):
            query, carry = made.run(query, key, value, layer=layer, carry=carry)
        return query

    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    x = jax.ShapeDtypeStruct((2, spec.query_length, 2, 128), jnp.float32)
    return jax.eval_shape(layers, Layout(key_value_seq_lengths=lengths), x, x, x)


SPEC = sized(256, B=2, H=128, is_causal=True, has_seq_lengths=True)


def test_splash_reads_options_and_makes_its_ids_once_and_sorts_the_mask_once_for_all_plans(counted):
    per_plan, per_mask = ("read_options", "segment_ids", "one_key_is_seen", "no_sinks"), "make_splash_mha_single_device"
    counts = counted(splash_blocks, *per_plan)
    counted(splash_attention, per_mask)
    spec = dataclasses.replace(SPEC, query_length=333, key_value_length=333)  # a length that no other test has
    for _ in range(2):
        counts |= dict.fromkeys(per_plan, 0)
        run_layers(splash.SPLASH, spec)
        assert counts == dict.fromkeys((*per_plan, per_mask), 1)


def test_kascade_reads_schedule_and_blocks_and_plans_dense_layers_once(counted):
    counted(backend, "_roles", "resolve")
    counts = counted(pallas_tpu.TpuKernels, "cut")
    run_layers(
        KASCADE,
        dataclasses.replace(SPEC, needs_grad=False),
        options={"schedule": DENSE_TWICE, "top_k": 0.5, "min_keys": 0},
    )
    assert counts == {"_roles": 1, "resolve": 1, "cut": 1}
