"""Kascade's gradient: that of dense attention under the mask of the pairs which were kept, by the float64 oracle."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.backends import Layout, MeshAxes, Target, attention, plan, support
from attnsuite.backends.kascade import KASCADE, manual, pallas_tpu
from attnsuite.backends.kascade.pallas_rows import PallasKernels, Queries, Visits
from attnsuite.backends.kascade.pallas_tpu import TpuKernels
from attnsuite.backends.kascade.pallas_triton import TritonKernels
from attnsuite.backends.kascade.selection import with_local
from attnsuite.testing import problems
from attnsuite.testing.checks import check_accuracy, check_quantity
from landing import is_landing, swept
from sparse_problems import FIRST, NATIVE, PROBLEMS, SETTINGS, cotangent, packed, runs_here, settings, solved, sparse

NAMES = ("dq", "dk", "dv")
both = pytest.mark.parametrize("kernel", ["xla", "flash_cpu"])


@functools.cache
def several_documents():
    """Tiles of 16 rows hold two documents: the first has 40 tokens."""
    return sparse(SETTINGS, layout=packed(4, 40, 2, 40, -1, 16))


def reuse(problem, options, mode="native"):
    """Output and gradients of a layer that reuses ``selection``, as a function of it and the operands."""
    spec = dataclasses.replace(problem.spec, needs_grad=True)
    schedule = manual((0,), num_layers=2, kv_heads=spec.num_kv_heads)
    chosen = problem.options | options | {"schedule": schedule}
    planned = KASCADE.plan(spec, problem.layout, target=Target("cpu"), mode=mode, options=chosen)

    @jax.jit
    def run(selection, d_out, *inputs):
        out, pull = jax.vjp(lambda *x: planned.run(*x, layer=1, carry=selection)[0], *inputs)
        return {"output": out, **dict(zip(NAMES, pull(d_out), strict=True))}

    return run


# Every layout, and each of the two kinds of unit: the forward pass is tried on all of PROBLEMS (test_sparse.py).
OTHERWISE_HELD = ("tiles", "more keys than queries", "ragged", "keys behind a cache", "decode keys")
FIRST_OF_XLA = ("heads alone, soft cap, value dim of its own", "packed keys")


@pytest.mark.parametrize("name", swept([name for name in PROBLEMS if name not in OTHERWISE_HELD], FIRST_OF_XLA))
def test_it_is_exact_for_the_pairs_that_were_kept(name):
    problem = PROBLEMS[name]()
    selection = problem.selection()
    results = reuse(problem, {})(selection, cotangent(problem), *problem.inputs)
    check_accuracy(results, solved(problem))


@pytest.mark.parametrize("name", swept(NATIVE, FIRST))
def test_native_kernels_have_the_same_gradient(name):
    problem = NATIVE[name]()
    selection = problem.selection()
    run = reuse(problem, {"kernel": "flash_cpu"})
    results = run(selection, cotangent(problem), *problem.inputs)
    check_accuracy(results, solved(problem))
    text = jax.make_jaxpr(run)(selection, cotangent(problem), *problem.inputs).pretty_print()
    assert text.count("attention_suite_flash_cpu_") == 2  # a kernel forward, a kernel backward


def test_gradient_of_a_pallas_kernel(monkeypatch):
    """A list that a TPU's scalar memory cannot hold is left to XLA."""
    problem = sparse(SETTINGS, T=64, batch=1, head_dim=64)
    operands = problem.selection(), cotangent(problem), *problem.inputs

    def kernels():
        run = reuse(problem, {"kernel": "pallas"}, "interpret")
        return run, str(jax.make_jaxpr(run)(*operands)).count("name=kascade_gradient_by_")

    run, found = kernels()
    assert found == 2
    if not is_landing():  # the kernels by themselves are judged below
        check_accuracy(run(*operands), solved(problem))
    monkeypatch.setattr(pallas_tpu, "LIST_BYTES", 16)
    assert kernels()[1] == 0


@both
def test_nan_reaches_no_gradient_of_a_row_that_does_not_see_it(kernel):
    """In padding, and in another document. Native kernels give rows without a finite output no gradient at all."""
    problem = several_documents()
    selection, d_out, run = problem.selection(), cotangent(problem), reuse(problem, {"kernel": kernel})
    before = run(selection, d_out, *problem.inputs)
    padding = (np.asarray(problem.layout.key_value_segment_ids) < 0)[..., None, None]
    poisoned = [np.where(padding, np.float32(np.nan), x) for x in problem.inputs]
    after = run(selection, np.where(padding, np.float32(9), d_out), *poisoned)
    for name, x in before.items():
        np.testing.assert_array_equal(x, after[name], err_msg=name)
        assert (np.asarray(x)[np.broadcast_to(padding, x.shape)] == 0).all()
    for number in (np.nan, np.inf):
        for operand, token in enumerate((3, 38, 38)):
            poisoned = [np.array(x) for x in problem.inputs]
            poisoned[operand][0, token] = number
            after = run(selection, d_out, *poisoned)
            for name, x in before.items():
                np.testing.assert_array_equal(after[name][0, 40:], x[0, 40:], err_msg=name)
                assert np.isfinite(after[name][0, :40]).all() == (kernel == "flash_cpu" and name != "output"), name


def test_a_stack_of_roles_has_the_gradient_of_its_parts():
    """Dense, anchor, reuse: each layer's query is the output of the one before, so the gradient passes all three."""
    problem = sparse(SETTINGS)
    spec = dataclasses.replace(problem.spec, needs_grad=True)
    schedule = manual((0, 1), num_layers=3, kv_heads=2)
    planned = KASCADE.plan(
        spec, problem.layout, target=Target("cpu"), options=problem.options | {"kernel": "xla", "schedule": schedule}
    )
    d_out = cotangent(problem)

    @jax.jit
    def ours(*inputs):
        def forward(query, key, value):
            carry = ()
            selections = []
            for layer in range(3):
                query, carry = planned.run(query, key, value, layer=layer, carry=carry)
                selections.append(carry)
            return query, selections

        _, pull, selections = jax.vjp(forward, *inputs, has_aux=True)
        return pull(d_out), selections

    gradients, selections = ours(*problem.inputs)
    causal = jnp.tril(jnp.ones((96, 96), bool))[None, None]
    masks = [causal, *(problem.mask(selection) for selection in selections[1:])]

    def through_masks(query, key, value):
        for mask in masks:
            query = attention(query, key, value, mask=mask, backend="standard")
        return query

    expected = jax.jit(lambda *x: jax.vjp(through_masks, *x)[1](d_out))(*problem.inputs)
    for found, wanted in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-4 * float(jnp.abs(wanted).max()))
    assert not np.array_equal(masks[0], masks[1])


@both
@pytest.mark.parametrize(
    "schedule",
    [None, pytest.param(manual((0, 1), num_layers=2, kv_heads=2), marks=pytest.mark.thorough)],
    ids=["anchor", "dense layer"],
)
def test_a_layout_may_be_an_argument_of_the_compiled_function(schedule, kernel):
    """As in a training step on packed rows, with a checkpoint: the ids come with each batch."""
    problem = several_documents()
    spec, ids = dataclasses.replace(problem.spec, needs_grad=True), problem.layout.query_segment_ids
    options = problem.options | ({} if schedule is None else {"schedule": schedule})

    def loss(query, ids):
        layout = Layout(query_segment_ids=ids, key_value_segment_ids=ids)
        planned = KASCADE.plan(spec, layout, target=Target("cpu"), options=options | {"kernel": kernel})
        return (planned.run(query, *problem.inputs[1:], layer=0)[0] * cotangent(problem)).sum()

    right = solved(problem) if schedule is None else dense(problem)
    check_quantity("dq", jax.jit(jax.grad(jax.checkpoint(loss)))(problem.query, ids), right)


@functools.cache
def dense(problem):
    spec = dataclasses.replace(problem.spec, needs_grad=True)
    return problems.solve(spec, problem.layout, (*problem.inputs, cotangent(problem)))


@both
def test_float32_with_x64_enabled(kernel):
    problem = several_documents()
    ids = problem.layout.query_segment_ids
    options, right = problem.options | {"kernel": kernel}, solved(problem)
    call = {"is_causal": True, "query_segment_ids": ids, "key_value_segment_ids": ids, "backend_options": options}

    def loss(query):
        return (attention(query, *problem.inputs[1:], backend="kascade", **call) * right.inputs[3]).sum()

    with jax.enable_x64(new_val=True):
        gradient = jax.jit(jax.grad(loss))(problem.query)
    assert gradient.dtype == np.float32
    check_quantity("dq", gradient, right)


def test_forward_mode_says_what_to_use():
    problem = sparse(SETTINGS)
    spec = dataclasses.replace(problem.spec, needs_grad=True)
    planned = plan(KASCADE, spec, problem.layout, target=Target("cpu"), options=problem.options)
    with pytest.raises(TypeError, match="backend='standard'"):
        jax.jvp(lambda q: planned.run(q, *problem.inputs[1:])[0], (problem.query,), (problem.query,))


def test_dealt_heads_have_no_gradient():
    mesh = jax.make_mesh((1,), ("model",))
    dealt = KASCADE.sharded(mesh, MeshAxes(heads="model"))
    found = support(dealt, dataclasses.replace(sparse().spec, needs_grad=True), Target("cpu"))
    assert any("gradients" in reason for reason in found.reasons)


# The backward pass of the Pallas kernels, in the interpreter, natively on their own device.

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
@pytest.mark.parametrize("case", swept(CASES, ("heads alone, soft cap, value dim of its own",)))
def test_pallas_kernels_are_exact_for_the_pairs_that_were_kept(case, kernels):
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
