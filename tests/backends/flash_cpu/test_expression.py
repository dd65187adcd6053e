"""Functions of positions and of scores inside of the kernels: every operation against JAX, and what is unsupported."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("llvmlite", reason="the kernels are compiled by llvmlite")

from attnsuite.backends import Target, attention, masks, registry, scores
from attnsuite.backends.flash_cpu import expression
from attnsuite.backends.flash_cpu.emit import Function, Value, f32, i32, ptr, vector
from attnsuite.testing import checks, problems
from attnsuite.testing.cases import case
from drawn import draw
from emitted import ISAS, compiled, set_apart

TABLE, LARGE = np.arange(8, dtype=np.float32), np.zeros(2**16 + 1, np.int32)
# ruff: noqa: ARG005 (a score function has five arguments)
SCORES = {
    "arithmetic": lambda s, b, h, q, k: s * 0.5 - b + h / 7 + (q - k) * 0.25 - (-s) ** 3 + (2 + s * s) ** -2,
    "integers": lambda s, b, h, q, k: s + (q // 3 - k % 5 + abs(q - k) // 2 + jax.lax.rem(q, k) + jax.lax.div(k, q)),
    "divisor-of-0-and-minus-1": lambda s, b, h, q, k: s + jax.lax.div(q, k % 3 - 1) + jax.lax.rem(q, k % 3 - 1),
    "comparisons": lambda s, b, h, q, k: jnp.where((q >= k) & ~(h == 1) | (q != k) ^ (b < 1), s, 2 * s) + (k <= q),
    "bounds": lambda s, b, h, q, k: jnp.clip(s, -1.0, 1.5) + jnp.maximum(s, 0.3) + jnp.minimum(q, k) + jnp.sign(q - k),
    "rounding": lambda s, b, h, q, k: s + jnp.floor(s) - jnp.ceil(s) + jnp.round(s * 2) + (s * 3).astype(jnp.int32),
    "roots": lambda s, b, h, q, k: jnp.sqrt(1 + s * s) + jax.lax.rsqrt(2 + s * s) + jnp.square(s) + jnp.cbrt(3 + s),
    "exponentials": lambda s, b, h, q, k: jnp.exp(s / 4) + jnp.exp2(s / 4) + jnp.log1p(s * s) + jnp.expm1(-s * s),
    "logarithms": lambda s, b, h, q, k: jnp.log(3 + s * s) + jnp.power(1 + s * s, 0.3) + jax.nn.sigmoid(s),
    "powers": lambda s, b, h, q, k: s * 0.9 ** jnp.abs(q - k) + jnp.power(1.01, q - k),
    "bools": lambda s, b, h, q, k: s * jnp.maximum(q >= k, k < 3) + jnp.minimum(q > 5, k > 5) + ((q > 5) <= (k > 5)),
    "circular": lambda s, b, h, q, k: jnp.sin(s) + jnp.cos(q / 9) + jnp.tan(s / 9) + jnp.arctan2(s, 1.0 + q * q),
    "hyperbolic": lambda s, b, h, q, k: jnp.tanh(s) + jnp.sinh(s / 4) + jnp.arcsinh(s) + jnp.arctan(s),
    "conditions": lambda s, b, h, q, k: jnp.where(jnp.isfinite(s / q), s, -s) + jax.nn.relu(s) + jnp.abs(s),
    "constants": lambda s, b, h, q, k: s + TABLE[3],
    "no-gradient": lambda s, b, h, q, k: s * jax.lax.stop_gradient(jnp.tanh(s)),
}
UNSUPPORTED = {
    "large": (lambda q, k: jnp.asarray(LARGE)[q] == k, "it holds an array int32.65537., and the kernels read"),
    "of half": (lambda q, k: jnp.asarray(TABLE.astype(np.float16))[q] > 0, "it holds an array float16"),
    "changed": (lambda q, k: (jnp.asarray(LARGE[:9]) + q)[k] > 0, "it uses add of"),
    "of a block": (lambda q, k: q[:, :1] == k, "it cannot be traced with one pair"),
    "choice": (
        lambda q, k: jax.lax.select_n(q % 3, q, k, -k) > 0,
        "it chooses by int32, and the kernels choose by a bool",
    ),
    "loop": (lambda q, k: jax.lax.fori_loop(0, 3, lambda _, x: x + 1, q) > k, "it uses scan"),
    "condition": (lambda q, k: jax.lax.cond(q > 3, lambda: k, lambda: -k) > 0, "it uses cond"),
    "too long": (masks.Tree(tuple(range(-1, 60))), "more than 4000"),
}
MASKS = (
    masks.Dilated(3) | masks.Neighbourhood(4, 2),
    ~masks.Tree((-1, 0, 0, 1, 1, 2)) & masks.Chunk(5),
    masks.Where(lambda q, k: (q * k) % 7 < 4),
    masks.Where(lambda q, k: jnp.asarray(TABLE)[q % 8 - 3] == jnp.asarray(TABLE)[k % 8]),
)


def evaluated(isa, code, arguments):
    """The results of emitted code for arrays of ``isa.lanes`` numbers."""
    results = [np.zeros(isa.lanes, np.float32) for _ in code.results]

    def build(module):
        with Function(module, "run", [ptr] * (len(arguments) + len(results))) as (e, places):
            kinds = [f32 if x.dtype == np.float32 else i32 for x in arguments]
            given = [p.load(vector(kind, isa.lanes)) for p, kind in zip(places, kinds, strict=False)]
            for x, place in zip(expression.emit(e, isa, code, *given), places[len(given) :], strict=True):
                number = x if x.is_float else Value(e, e.builder.uitofp(x.raw, vector(f32, isa.lanes)))
                place.store(number)
        return e.function

    compiled(isa, build)(*arguments, *results)
    return results


def numbers(lanes, seed):
    rng = np.random.default_rng(seed)
    score = rng.standard_normal(lanes).astype(np.float32)
    return score, *(rng.integers(low, 40, lanes).astype(np.int32) for low in (0, 0, -40, -40))


@pytest.mark.parametrize("isa", ISAS[-1:], ids=lambda isa: isa.name)
@pytest.mark.parametrize("name", SCORES)
def test_score_and_its_derivative_are_those_of_jax(name, isa):
    with jax.numpy_dtype_promotion("standard"):
        code = expression.of_score(SCORES[name])
    derived = jax.jit(lambda *arguments: scores.derived(SCORES[name], *arguments))
    for seed in range(4):
        arguments = numbers(isa.lanes, seed)
        with jax.numpy_dtype_promotion("standard"):
            expected = derived(*arguments)
        for x, right in zip(evaluated(isa, code, arguments), expected, strict=True):
            np.testing.assert_allclose(x, right, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("mask", MASKS, ids=["named", "tree", "users", "table"])
def test_mask_is_that_of_jax(mask):
    code = expression.of_mask(mask)
    for isa in ISAS:
        for seed in range(4):
            _, _, _, query, key = numbers(isa.lanes, seed)
            np.testing.assert_array_equal(evaluated(isa, code, (query, key))[0] == 1, mask(query, key))


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_function_that_the_kernels_do_not_have_is_unsupported_with_its_reason(name):
    function, clause = UNSUPPORTED[name]
    words = f"mask_function=.* is not supported by flash_cpu: .*{clause}"
    with pytest.raises(expression.UnsupportedError, match=words):
        expression.of_mask(function)


def test_traced_array_is_unsupported():
    def of_table(table):
        return expression.of_mask(lambda q, k: table[q] == k)

    with pytest.raises(expression.UnsupportedError, match=r"it holds an array int32\[9\] that is traced"):
        jax.jit(of_table)(jnp.arange(9))


KINDS = jnp.arange(256) % 3
BY_DISTANCE = jnp.asarray(np.random.default_rng(0).standard_normal((4, 48)), jnp.float32)
FAR = jnp.arange(256) > 200


def by_table(score, batch, head, query, key):
    of_distance, of_key = (BY_DISTANCE[at].astype(score.dtype) for at in ((head, (query - key) % 48), (0, key % 48)))
    return score * (1 + 0.1 * of_distance) + of_key


READING = case(
    T=130,
    mask_function=masks.Causal() & masks.Where(lambda q, k: (KINDS[q] == KINDS[k]) | FAR[k]),
    score_function=by_table,
)


def _of_tables():
    layout, terms, inputs = problems.arrays(READING, "tables")
    given = problems.solve(problems.spec_of(READING, layout, terms, inputs), layout, inputs, terms)
    checks.check_accuracy(checks.compiled(registry.get("flash_cpu"), given, Target.here())(*inputs), given)


def test_functions_that_read_arrays_pass_the_judge():
    _of_tables()


@pytest.mark.thorough
def test_rows_of_a_table_taken_for_its_columns_fail(monkeypatch, tmp_path):
    set_apart(monkeypatch, tmp_path, "tables read by columns")
    look_up = expression._OPERATIONS["dynamic_slice"]
    monkeypatch.setitem(expression._OPERATIONS, "dynamic_slice", lambda lanes, *x: look_up(lanes, x[0], *x[:0:-1]))
    with pytest.raises(AssertionError, match="passed=False"):
        _of_tables()


def test_function_means_the_same_where_python_numbers_are_of_64_bits():
    def softer(score, batch, head, query, key):
        return score / (1 + 0.01 * jnp.abs(query - key))

    with jax.numpy_dtype_promotion("standard"):
        code = expression.of_score(softer)
        with jax.enable_x64(new_val=True):
            assert expression.of_score(softer) == code


@pytest.mark.parametrize("hidden_by", ["mask_function", "mask and bias"])
def test_score_that_is_not_finite_where_nobody_looks_changes_nothing(hidden_by):
    def score(score, batch, head, query, key):
        return score / (key - 70.0) + score * 0.0 / (key - 130.0)

    x = draw(1, 160, 2, 16)
    pairs = jnp.broadcast_to(jnp.arange(160), (1, 2, 160, 160))
    hiding = {
        "mask_function": {"mask_function": masks.Where(lambda q, k: (q * 0 + k != 70) & (k != 130))},
        "mask and bias": {"mask": pairs != 70, "bias": jnp.where(pairs == 130, -jnp.inf, 0.0)},
    }
    given = hiding[hidden_by] | {"score_function": score}

    def gradients(name):
        def loss(*operands):
            return (attention(*operands, **given, backend=name, on_unavailable="raise") ** 2).sum()

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(x, x, x)

    with jax.numpy_dtype_promotion("standard"):
        found, expected = (jax.tree.leaves(gradients(name)) for name in ("flash_cpu", "chunked"))
    assert all(np.isfinite(right).all() for right in expected)
    for one, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, right, rtol=2e-4, atol=2e-4)
