"""The backward pass of Kascade's Pallas kernels, in the interpreter, natively on their own device.

It is held to float64 under the mask of the kept pairs. Every control spoils the backward pass alone.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from attnsuite.backends.kascade.pallas_rows import PallasKernels, Queries, Visits
from attnsuite.backends.kascade.pallas_tpu import TpuKernels
from attnsuite.backends.kascade.pallas_triton import TritonKernels
from attnsuite.backends.kascade.selection import with_local
from attnsuite.testing.checks import check_accuracy
from landing import swept
from sparse_problems import PROBLEMS, cotangent, runs_here, settings, solved, sparse

NAMES = ("dq", "dk", "dv")
BLOCKS = {"block_q": 32, "block_kv_sparse": 64, "block_kv_compute": 32}
CASES = {
    name: PROBLEMS[name]
    for name in (
        *("query tile of two tiles", "tile of four query tiles", "one query per tile", "more queries than keys"),
        *("heads alone, soft cap, value dim of its own", "packed", "behind a cache", "decode", "bfloat16"),
        "keys that nobody selects",
    )
} | {
    "blocks smaller than their tiles": lambda: sparse(
        settings(query_tile=128, tile_size=128, **BLOCKS), T=300, batch=1, num_kv_heads=1
    ),
    "no tile but its own": lambda: sparse(settings(tile_size=128, query_tile=128), T=100),
    "controls": lambda: sparse(T=60, batch=1, logits_soft_cap=20.0),
}
every = pytest.mark.parametrize("kernels", [TpuKernels, TritonKernels], ids=["tpu", "triton"])


@functools.cache
def problem_of(case):
    return CASES[case]()


def made(kernels, problem):
    spec = dataclasses.replace(problem.spec, needs_grad=True)
    native = runs_here(kernels, spec, problem.settings)
    return kernels(spec, problem.tiling, problem.settings, interpret=not native)


@functools.cache
def forward(kernels, problem):
    """The list, and what the forward pass gives and keeps for it."""
    listed = with_local(problem.tiling, problem.tile_layout, problem.selection())
    attend = functools.partial(made(kernels, problem).attend_with_residuals, problem.tile_layout)
    return listed, *jax.jit(attend)(*problem.inputs, listed)


@functools.cache
def backward(kernels, problem):
    """The backward pass, compiled once; ``backward.__wrapped__`` traces it anew."""
    return jax.jit(lambda *x: made(kernels, problem).gradients(problem.tile_layout, *x))


def judge(kernels, problem, wrong=lambda listed: listed, pass_back=backward):
    """Judge output and gradients, the latter by a list that ``wrong`` makes of the right one."""
    listed, out, kept = forward(kernels, problem)
    found = pass_back(kernels, problem)(*problem.inputs, wrong(listed), kept, cotangent(problem))
    results = {"output": out, **dict(zip(NAMES, found, strict=True))}
    check_accuracy(results, solved(problem))
    return results


@every
@pytest.mark.parametrize("case", swept(CASES, ("heads alone, soft cap, value dim of its own", "decode")))
def test_it_is_exact_for_the_pairs_that_were_kept(case, kernels):
    judge(kernels, problem_of(case))


# Controls


def pair_with(log_sum=1.0, mean=1.0, cap=1.0):
    """The tile's mathematics with one of its terms changed."""
    right = PallasKernels.pair

    def wrong(self, query, d_out, log_sums, means, *keys):
        spec = self.spec
        if cap != 1.0:
            self = dataclasses.replace(self, spec=dataclasses.replace(spec, logits_soft_cap=cap * spec.logits_soft_cap))
        return right(self, query, d_out, log_sum * log_sums, mean * means, *keys)

    return PallasKernels, "pair", wrong


def see_everything(_queries, place, slot, _ids):
    return jnp.ones(jnp.broadcast_shapes(place.shape, slot.shape), bool)


def every_slot_counts(listed, units, by, right=Visits.of):
    visits = right(listed, units, by)
    return visits._replace(starts=visits.starts.at[:, -1].set(visits.codes.shape[1]))


def others_of_queries_alone(listed, units, by, right=Visits.of):
    """An inverse list that was forgotten: keys take the lists of queries for their own."""
    return right(listed, units, "query")._replace(others=right(listed, units, by).others)


SPOILT = {
    "no mask": (Queries, "visible", see_everything),
    "all seen behind the diagonal": (Queries, "all_see", lambda _queries, end: end > 0),
    "another log-sum": pair_with(log_sum=0.9),
    "no mean": pair_with(mean=0.0),
    "another cap": pair_with(cap=0.5),
    "unused slots count": (Visits, "of", staticmethod(every_slot_counts)),
    "no inverse list": (Visits, "of", staticmethod(others_of_queries_alone)),
}


# Both forms share what is spoilt here; that Triton's form reads masks and inverse lists is shown once more.
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "kernels"),
    [*((name, TpuKernels) for name in SPOILT), ("no mask", TritonKernels), ("no inverse list", TritonKernels)],
)
def test_kernel_that_is_wrong_fails(name, kernels, monkeypatch):
    forward(kernels, problem_of("controls"))
    monkeypatch.setattr(*SPOILT[name])
    with pytest.raises(AssertionError, match=r"dq|dk|dv") as caught:
        judge(kernels, problem_of("controls"), pass_back=backward.__wrapped__)
    assert "output" not in str(caught.value)


@pytest.mark.thorough
@every
@pytest.mark.parametrize(
    "wrong",
    [
        lambda listed: listed[:, ::-1],
        lambda listed: jnp.where(listed > 0, listed - 1, listed),
        lambda listed: jnp.roll(listed.at[..., 0].set(-1), -1, axis=-1),
        lambda listed: jnp.roll(listed, 1, axis=-1).at[..., 0].set(listed[..., 0]),
    ],
    ids=["heads swapped", "one tile off", "one tile less", "one tile twice"],
)
def test_another_list_than_that_of_the_forward_pass_fails(wrong, kernels):
    def longer(listed):  # by a slot that is not used, so that all of these are lists of one program
        return jnp.pad(listed, ((0, 0),) * 3 + ((0, 1),), constant_values=-1)

    judge(kernels, problem_of("controls"), longer)
    with pytest.raises(AssertionError, match=r"dq|dk|dv") as caught:
        judge(kernels, problem_of("controls"), lambda listed: wrong(longer(listed)))
    assert "output" not in str(caught.value)
