"""The chunked backend: the contract, block sizes that do not change results, and memory that grows linearly."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import left_out
from attnsuite.backends import Layout, Target, Terms, attention, chunked_passes, make_spec, plan, registry
from attnsuite.testing import Conformance, cases, problems
from attnsuite.testing.checks import check_accuracy, check_quantity, compiled
from declared import sized
from landing import swept

pytestmark = pytest.mark.chunked

CHUNKED = registry.get("chunked")


class TestChunked(Conformance):
    backend = "chunked"
    cases = left_out.CASES
    cases_for_traced_layouts = left_out.TRACED
    cases_for_vmap = left_out.MAPPED
    # A gradient in half precision, wrong where the output is rounded before the sink takes its share.
    random_problems = (*Conformance.random_problems, 311)


@pytest.mark.parametrize(
    ("case", "plain"),
    [("few-queries-16", True), ("few-queries-17", False), ("length-128", True), ("length-129", False)],
)
@pytest.mark.parametrize("gradient", [False, True])
def test_a_plan_says_where_it_takes_the_plain_formula(case, plain, gradient):
    """The conformance suite has a case on each side of the switch."""
    problem = problems.problem(case, None)
    spec = dataclasses.replace(problem.spec, needs_grad=gradient)
    notes = plan(CHUNKED, spec, problem.layout, target=Target.here()).notes
    assert any("chunked takes XLA's plain formula" in note for note in notes) is plain


def test_gradient_of_the_values_holds_where_the_two_passes_round_a_score_otherwise(monkeypatch):
    """As on a device whose products have not the same bits in both passes; one key has nearly all of its row."""
    monkeypatch.setattr(
        chunked_passes, "_scores", lambda rows, columns: chunked_passes._dot("hrd,hcd->hrc", rows, columns)
    )
    case = cases.case(T=60, S=60, N=4, K=2, H=64, magnitude=8.0, is_causal=True)
    layout, _, inputs = problems.arrays(case, "a")
    problem = problems.solve(make_spec(*inputs[:3], layout, **case.options), layout, inputs)
    # XLA's CPU compiler computes the scores of the two passes by different kernels, if it is let.
    options = {"block_q": 72, "block_kv": 8, "block_backward": 24}
    check_quantity("dv", compiled(CHUNKED, problem, Target.here(), "native", options)(*inputs)["dv"], problem)


@pytest.mark.parametrize(
    "options",
    [{"block_q": 12}, {"block_kv": 0}, {"block_backward": 8.0}, {"heads_per_tile": 0}, {"heads_per_tile": True}],
    ids=str,
)
@pytest.mark.parametrize("length", [1024, 8])  # for so few queries the plain formula runs
def test_block_size_that_does_not_fit_is_refused_by_name(options, length):
    with pytest.raises(ValueError, match=f"{next(iter(options))}=.*is not accepted"):
        CHUNKED.plan(_spec(length), Layout(), target=Target.here(), options=options)


@pytest.mark.parametrize("gradient", swept([False, True], [True]), ids=["forward", "forward+backward"])
def test_temporary_memory_is_at_most_an_eighth_of_the_standards(gradient):
    assert _temporary_bytes("chunked", 4096, gradient) * 8 <= _temporary_bytes("standard", 4096, gradient)


@pytest.mark.thorough
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "forward+backward"])
def test_temporary_memory_grows_linearly_with_the_length(gradient):
    lengths = (2048, 4096, 8192)
    sizes = [_temporary_bytes("chunked", length, gradient) for length in lengths]
    slope = np.polyfit(np.log(lengths), np.log(sizes), 1)[0]
    assert slope < 1.1
    standard = [_temporary_bytes("standard", length, gradient) for length in lengths[:2]]
    assert standard[1] / standard[0] > 3.5  # the same measurement sees a quadratic one


@pytest.mark.parametrize("gradient", swept([False, True], [True]), ids=["forward", "forward+backward"])
def test_scores_are_computed_only_for_blocks_in_which_something_is_visible(monkeypatch, gradient):
    passes = 2 if gradient else 1
    causal, whole = (_scores_computed(monkeypatch, gradient, is_causal=triangle) for triangle in (True, False))
    assert whole == passes * 2 * 512 * 512
    assert causal == whole * 36 // 64  # of 8 x 8 blocks those on the diagonal and below


def _spec(length, *, needs_grad=True):
    return sized(length, N=8, is_causal=True, needs_grad=needs_grad)


def _temporary_bytes(name, length, gradient):
    """Compiled only, never run."""
    plan = registry.get(name).plan(_spec(length, needs_grad=gradient), Layout(), target=Target.here())

    def attend(query, key, value, cotangent):
        if not gradient:
            return plan.run(query, key, value)[0]
        output, pullback = jax.vjp(lambda q, k, v: plan.run(q, k, v)[0], query, key, value)
        return output, pullback(cotangent)

    x = jax.ShapeDtypeStruct((1, length, 8, 64), jnp.float32)
    return jax.jit(attend).lower(x, x, x, x).compile().memory_analysis().temp_size_in_bytes


def _scores_computed(monkeypatch, gradient, *, is_causal):
    x = jnp.ones((1, 512, 2, 16))
    spec = make_spec(x, x, x, is_causal=is_causal, needs_grad=gradient)
    plan = CHUNKED.plan(
        spec, Layout(), target=Target.here(), options={"block_q": 64, "block_kv": 64, "block_backward": 64}
    )
    sizes = []
    of_a_block = chunked_passes._scores

    def counted(rows, columns):
        scores = of_a_block(rows, columns)
        jax.debug.callback(lambda: sizes.append(scores.size))
        return scores

    with monkeypatch.context() as patch:
        patch.setattr(chunked_passes, "_scores", counted)
        jax.jit(jax.grad(lambda q: plan.run(q, x, x)[0].sum()) if gradient else lambda q: plan.run(q, x, x)[0])(x)
        jax.effects_barrier()
    return sum(sizes)


SMALL = {"block_q": 24, "block_kv": 48, "block_backward": 32}  # none of them divides the lengths
FORMS = [(1, 1, 1, 100), (2, 1, 1, 100), (2, 1, 72, 100), (1, 4, 72, 100), (2, 4, 72, 100), (2, 4, 72, 1)]


@pytest.mark.thorough
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_mask_and_bias_of_every_form_are_read_and_differentiated(form):
    rng = np.random.default_rng(form)
    case = cases.case(T=72, S=100, H=16)
    _, _, inputs = problems.arrays(case, "forms")
    layout, terms = Layout(mask=jax.device_put(rng.random(form) < 0.3)), Terms()
    if form[-1] > 1:  # a bias that is the same for all keys of a row changes no softmax, and its gradient is zero
        terms = Terms(bias=jax.device_put(rng.standard_normal(form).astype(np.float32)))
    problem = problems.solve(make_spec(*inputs[:3], layout, terms), layout, inputs, terms)
    check_accuracy(compiled(CHUNKED, problem, Target.here(), "native", SMALL)(*inputs), problem)


def test_row_whose_bias_hides_every_key_is_zero_and_one_of_finite_numbers_is_not():
    case = cases.case(T=72, S=100, H=16)
    _, _, inputs = problems.arrays(case, "hidden")
    bias = np.zeros((1, 1, 72, 100), np.float32)
    bias[:, :, 5], bias[:, :, 7] = -np.inf, np.finfo(np.float32).min
    terms = Terms(bias=jax.device_put(bias))
    problem = problems.solve(make_spec(*inputs[:3], Layout(), terms), Layout(), inputs, terms)
    results = compiled(CHUNKED, problem, Target.here(), "native", SMALL)(*inputs)
    check_accuracy(results, problem)
    assert not results["output"][:, 5].any()
    assert results["output"][:, 7].all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_product_with_a_hessian_is_that_of_the_formula_or_refused(dtype):
    """XLA computes the distances of slopes twice, and a bfloat16 is carried as bits, which have no derivative."""
    x, slopes = jnp.sin(jnp.arange(136, dtype=dtype)).reshape(1, 17, 2, 4), jnp.asarray([0.1, 0.3])

    def product(backend):
        options = {"block_q": 8, "block_kv": 8, "block_backward": 8} if backend == "chunked" else None
        attend = functools.partial(attention, is_causal=True, alibi=slopes, backend=backend, backend_options=options)
        return jax.jit(lambda x: jax.jvp(jax.grad(lambda x: (attend(x, x, x) ** 2).sum()), (x,), (x,))[1])(x)

    if dtype == "bfloat16":
        with pytest.raises(TypeError, match="second derivatives"):
            product("chunked")
    else:
        np.testing.assert_allclose(product("chunked"), product("standard"), atol=1e-5)


@pytest.mark.parametrize("cache", [{}, {"page_table": np.array([[0]])}], ids=["decode", "pages"])
def test_gradient_where_needs_grad_is_false_is_refused_by_name(cache):
    """JAX would speak of loops instead, and bits of pages have a derivative of zero."""
    step = functools.partial(attention, backend="chunked", needs_grad=False, **cache)
    keys = jnp.ones((1, 8, 2, 4))
    with pytest.raises(ValueError, match="needs_grad=True"):
        jax.grad(lambda query: step(query, keys, keys).sum())(keys[:, :1])
