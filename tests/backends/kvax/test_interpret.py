"""The interpreter's corrections: without each, Kvax's kernels compute something else than on a GPU.

With them they pass the conformance suite (``test_conformance.py``).
"""

import contextlib
import functools
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from attnsuite.backends import Target, attention
from attnsuite.backends.kvax import KVAX, availability
from attnsuite.testing import problems
from attnsuite.testing.checks import check_accuracy, compiled

pytestmark = pytest.mark.needs_kvax


@pytest.fixture(autouse=True)
def triton():
    return pytest.importorskip("triton", reason="; ".join(availability.missing("interpret")))


@pytest.fixture
def interpret(triton):
    from attnsuite.backends.kvax import interpret

    return interpret


def check(case):
    problem = problems.problem(case)
    check_accuracy(compiled(KVAX, problem, Target.here(), "interpret")(*problem.inputs), problem)


@pytest.mark.thorough
def test_and_of_two_masks_is_taken_element_by_element(monkeypatch, interpret):
    def as_python(both, first, *rest):
        result = first
        for thunk in rest:
            result = (result and thunk()) if both else (result or thunk())
        return result

    monkeypatch.setattr(interpret, "logical", as_python)
    with pytest.raises(AssertionError, match=r"output: .*passed=False"):
        check("segments-causal")


@pytest.mark.thorough
def test_products_of_bfloat16_are_of_values_and_not_of_bit_patterns(monkeypatch, interpret):
    monkeypatch.delattr(interpret.Builder, "create_dot")
    with pytest.raises(AssertionError, match=r"output: .*passed=False"):
        check("causal-bfloat16")


def test_bfloat16_rounds_to_nearest_even(interpret):
    from triton import language as tl
    from triton.runtime import interpreter

    numbers = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    handle = interpreter.TensorHandle(numbers, tl.float32)
    expected = numbers.astype(ml_dtypes.bfloat16)

    def rounded(builder):
        return builder.cast_impl(handle, tl.bfloat16).data.view(ml_dtypes.bfloat16)

    np.testing.assert_array_equal(rounded(interpret.Builder()), expected)
    truncated = rounded(interpreter.InterpreterBuilder())
    assert np.mean(truncated != expected) > 0.3


def test_arithmetic_on_bfloat16_is_refused_rather_than_done_on_bit_patterns(interpret):
    from triton import language as tl
    from triton.runtime import interpreter

    one = interpreter.TensorHandle(np.ones(4, ml_dtypes.bfloat16).view(np.uint16), tl.bfloat16)
    with pytest.raises(NotImplementedError, match="bfloat16"):
        interpret.Builder().binary_op(one, one, np.add)
    assert interpreter.InterpreterBuilder().binary_op(one, one, np.add).data[0] == 2 * 0x3F80  # what upstream does


@pytest.mark.thorough
def test_scalar_is_an_index_whatever_numpy_says(monkeypatch, interpret):
    check("causal")
    monkeypatch.setattr(interpret, "_index", lambda scalar: int(scalar.handle.data))  # Triton 3.6
    if np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        with pytest.raises(Exception, match="only 0-dimensional arrays can be converted"):
            check("causal")


@pytest.mark.thorough
def test_sums_are_not_the_interpreters_own_rounding(monkeypatch, interpret):
    check("ragged")

    def narrow(self, x):
        return self.to_tensor(np.sum(x.handle.data, axis=self.axis, keepdims=self.keep_dims), x.dtype)

    def narrow_dot(self, a, b, d, *_):
        return type(d)(a.data @ b.data + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpret, "_sum", narrow)
    monkeypatch.setattr(interpret.Builder, "create_dot", narrow_dot)
    with pytest.raises(AssertionError, match=r"dk: .*passed=False"):
        check("ragged")


def test_what_a_kernel_leaves_unwritten_is_not_a_number(interpret, triton):
    from attnsuite.backends.kvax import upstream

    seen = []
    kvax = upstream.load(lambda *_, kernel, **__: seen.append(kernel) or [jnp.zeros(1)] * 4)
    ids = jnp.zeros((1, 128), jnp.int32)
    kvax.mask_one_device(ids, ids, ids, ids, kv_block_size=128, query_block_size=128)
    shape = [np.zeros((1, 1, 1), np.float32)] * 4
    none_run = interpret.launch(
        *(ids,) * 4,
        kernel=seen[0],
        out_shape=shape,
        grid=(0, 1),
        zeroed_outputs=(1,),
        **dict.fromkeys(seen[0].arg_names[8:], 1),
    )
    assert [bool(np.isnan(x).all()) for x in none_run] == [True, False, True, True]


@pytest.mark.parametrize("fails", [False, True])
def test_triton_and_jax_are_as_before(monkeypatch, interpret, fails):
    import sys

    import jax.experimental.shard_map
    from triton import language as tl
    from triton.runtime import interpreter

    def state():
        modules = (tl, tl.core, tl.standard, tl.math, tl.tensor, interpreter, interpreter.ReduceOps)
        return [{name: id(member) for name, member in vars(module).items()} for module in modules]

    before = state()
    if fails:
        monkeypatch.setattr(interpret, "logical", lambda *_: 1 / 0)
    with pytest.raises(Exception, match="division by zero") if fails else contextlib.nullcontext():
        check("causal")
    assert state() == before
    assert not [name for name in sys.modules if name.partition(".")[0] in {"kvax", "jax_triton"}]
    assert not hasattr(jax.experimental.shard_map, "Specs")


def test_threads_do_not_disturb_each_other():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((1, 128, 2, 16)).astype(np.float32))
    run = functools.partial(attention, x, x, x, is_causal=True, backend="kvax", mode="interpret")
    expected = run()
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: run(), range(4)):
            np.testing.assert_array_equal(found, expected)
