"""What does not depend on the layer is done once per plan, not once per layer: counted over a plan of three layers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

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
    x = jax.ShapeDtypeStruct((2, 256, 2, 128), jnp.float32)
    return jax.eval_shape(layers, Layout(key_value_seq_lengths=lengths), x, x, x)


SPEC = sized(256, B=2, H=128, is_causal=True, has_seq_lengths=True)


def test_splash_reads_options_sorts_the_mask_and_makes_its_ids_once(counted):
    names = ("read_options", "segment_ids", "one_key_is_seen", "no_sinks")
    counts = counted(splash_blocks, *names)
    run_layers(splash.SPLASH, SPEC)
    assert counts == dict.fromkeys(names, 1)


def test_kascade_reads_schedule_and_blocks_and_plans_dense_layers_once(counted):
    counted(backend, "_roles", "resolve")
    counts = counted(pallas_tpu.TpuKernels, "cut")
    run_layers(
        KASCADE,
        dataclasses.replace(SPEC, needs_grad=False),
        options={"schedule": DENSE_TWICE, "top_k": 0.5, "min_keys": 0},
    )
    assert counts == {"_roles": 1, "resolve": 1, "cut": 1}
