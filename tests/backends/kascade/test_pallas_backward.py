"""The backward pass of Kascade's Pallas kernels, in the interpreter.

It is held to float64 under the mask of the kept pairs. Every control spoils the backward pass alone.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.backends import Layout
from attnsuite.backends.kascade.pallas_rows import PallasKernels, Queries, Visits
from attnsuite.backends.kascade.pallas_tpu import TpuKernels
from attnsuite.backends.kascade.pallas_triton import TritonKernels
from attnsuite.backends.kascade.selection import with_own
from attnsuite.testing import problems
from attnsuite.testing.checks import check_accuracy
from sparse_problems import PROBLEMS, cached, settings, sparse

NAMES = ("dq", "dk", "dv")
BLOCKS = {"block_q": 32, "block_kv_sparse": 64, "block_kv_compute": 32}
CASES = {name: made for name, made in PROBLEMS.items() if made().settings.granularity == "tile"} | {
    "blocks smaller than their tiles": lambda: sparse(
        settings(query_tile=128, tile_size=128, **BLOCKS), T=300, batch=1, num_kv_heads=1
    ),
    "no tile but its own": lambda: sparse(settings(tile_size=128, query_tile=128), T=100),
}
every = pytest.mark.parametrize("kernels", [TpuKernels, TritonKernels], ids=["tpu", "triton"])


def made(kernels, problem):
    spec = dataclasses.replace(problem.spec, needs_grad=True)
    return kernels(spec, problem.tiling, problem.settings, interpret=True)


def gradients(kernels, problem, spoil=None):
    """Output and gradients; ``spoil`` changes the kernels, or the list, before the backward pass is traced."""
    rng, this = np.random.default_rng(5), made(kernels, problem)
    d_out = rng.standard_normal((*problem.query.shape[:3], problem.value.shape[3])).astype(problem.query.dtype)

    @jax.jit
    def run(d_out, listed, *inputs):
        out, kept = this.keeping(problem.places, *inputs, listed)
        changed = spoil(listed) if spoil else None
        visited = listed if changed is None else changed
        return out, this.gradients(problem.places, *inputs, visited, kept, d_out)

    out, found = run(d_out, with_own(problem.tiling, problem.places, problem.selection()), *problem.inputs)
    return {"output": out, **dict(zip(NAMES, found, strict=True))}, d_out


def solved(problem, d_out):
    """The same pairs as an explicit mask, solved by the oracle."""
    bare = ("is_causal", "has_segment_ids", "has_positions", "has_seq_lengths")
    spec = dataclasses.replace(problem.spec, needs_grad=True, has_mask=True, **dict.fromkeys(bare, False))
    layout = Layout(mask=problem.mask(problem.selection()))
    return problems.solve(spec, layout, (*problem.inputs, jax.device_put(d_out)))


def judge(kernels, problem, spoil=None):
    results, d_out = gradients(kernels, problem, spoil)
    check_accuracy(results, solved(problem, d_out))


@every
@pytest.mark.parametrize("case", CASES)
def test_it_is_exact_for_the_pairs_that_were_kept(case, kernels):
    judge(kernels, CASES[case]())


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


@every
@pytest.mark.parametrize("name", SPOILT)
def test_kernel_that_is_wrong_fails(name, kernels, monkeypatch):
    if (name, kernels) == ("all seen behind the diagonal", TritonKernels):
        pytest.skip("Triton's form masks every block")
    problem = sparse(settings(tile_size=16, query_tile=16), T=60, batch=1, logits_soft_cap=20.0)
    judge(kernels, problem)
    with pytest.raises(AssertionError, match=r"dq|dk|dv") as caught:
        judge(kernels, problem, lambda _: monkeypatch.setattr(*SPOILT[name]))
    assert "output" not in str(caught.value)


@every
@pytest.mark.parametrize(
    "wrong",
    [
        lambda listed: listed[:, ::-1],
        lambda listed: jnp.where(listed > 0, listed - 1, listed),
        lambda listed: listed[..., 1:],
        lambda listed: jnp.concatenate([listed[..., :1], listed], axis=-1),
    ],
    ids=["heads swapped", "one tile off", "one tile less", "one tile twice"],
)
def test_another_list_than_that_of_the_forward_pass_fails(wrong, kernels):
    with pytest.raises(AssertionError, match=r"dq|dk|dv"):
        judge(kernels, sparse(settings(), T=60, batch=1), wrong)


@every
def test_keys_outside_of_the_selection_get_no_gradient(kernels):
    problem = sparse(settings(top_k=0.2), T=32, S=160, layout=cached(32, 160, 160))
    results, _ = gradients(kernels, problem)
    kept = np.asarray(problem.mask(problem.selection())).any(2).reshape(2, 2, 2, 160).any(2)  # by KV head
    assert not kept.all()
    for name in ("dk", "dv"):
        gradient = np.asarray(results[name]).swapaxes(1, 2)
        assert (gradient[~kept] == 0).all()
        assert (np.abs(gradient[kept]).max(-1) > 0).all()
