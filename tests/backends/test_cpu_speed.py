"""What CI can hold of the speed on a noisy machine: a ratio of two programs that take turns in one process.

The bound stands far from what is measured (0.2 to 0.45 on two machines, quiet or loaded): it catches the loss of more
than half of the speed, not of a percent. Two deliberately bad plans, at 1.4 and more on the same machines, show that it
can. One block for the whole problem is not among them: it loses the skipped half, and takes from 0.68 to 0.92 of the
standard's time, by the machine; that the half is skipped is held without a clock (test_chunked.py).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.backends import AttentionSpec, Layout, Target, registry
from attnsuite.suite.measure import speed

ROUNDS = 5
ROUNDS_OF_A_BAD_PLAN = 3  # a ratio of 1.4 and more needs fewer samples to stand above the bound
BOUND = 0.75  # time relative to standard

pytestmark = [
    *(pytest.mark.standard, pytest.mark.speed),
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="a claim about CPUs"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "forward+backward"])
def test_chunked_takes_well_below_the_standards_time(dtype, gradient):
    # On a shared machine a minute may be slow for one of the two: what is above the bound is measured once more.
    assert ratio(dtype, gradient) < BOUND or ratio(dtype, gradient) < BOUND


@pytest.mark.parametrize(
    "options", [{"block_q": 8, "block_kv": 8}, {"block_q": 2048, "block_kv": 8}], ids=["tiny blocks", "thin blocks"]
)
def test_bad_block_sizes_are_seen(options):
    assert ratio("float32", gradient=False, options=options, rounds=ROUNDS_OF_A_BAD_PLAN) > BOUND


def ratio(dtype, gradient, options=None, rounds=ROUNDS):
    spec = AttentionSpec(batch=1, query_length=2048, key_value_length=2048, num_heads=4, num_kv_heads=4, head_dim=64,
                         dtype=dtype, is_causal=True, needs_grad=gradient)  # fmt: skip
    rng = np.random.default_rng(0)
    arrays = tuple(jnp.asarray(rng.standard_normal((1, 2048, 4, 64), np.float32), dtype) for _ in range(4))
    samples = {}
    calls = {}
    for name in ("standard", "chunked"):
        plan = registry.get(name).plan(
            spec, Layout(), target=Target.here(), options=options if name == "chunked" else None
        )
        calls[name] = speed.compile_program(program(plan, gradient), arrays).call
        speed.sample(calls[name], lambda _: arrays, 1)  # to warm up, not counted
        samples[name] = []
    for _ in range(rounds):
        for name, call in calls.items():
            samples[name].append(speed.sample(call, lambda _: arrays, 1).seconds)
    return np.median(np.array(samples["chunked"]) / np.array(samples["standard"]))


def program(plan, gradient):
    def run(query, key, value, d_out):
        if not gradient:
            return plan.run(query, key, value)[0]
        out, pull_back = jax.vjp(lambda q, k, v: plan.run(q, k, v)[0], query, key, value)
        return out, *pull_back(d_out)

    return run
