"""The command that runs JAX's and flax's own tests: on sources written here, since theirs are not kept."""

import re
from pathlib import Path

import pytest

from script import python

pytestmark = pytest.mark.thorough
TOOL = Path(__file__).with_name("peers_own_tests.py")

JAX = """
import jax, jax.numpy as jnp, numpy as np

x = jnp.arange(64.0).reshape(1, 4, 2, 8) / 64

def testDotProductAttentionRuns():
    ours = jax.nn.dot_product_attention(x, x, x, is_causal=True, implementation="xla")
    np.testing.assert_allclose(ours, jax.nn.dot_product_attention(x, x, x, is_causal=True, implementation=None), 1e-5)

def testSoftmax():
    raise RuntimeError("not about attention")
"""

FLAX = """
import jax.numpy as jnp, pytest
from flax import nnx

def test_sown_weights():
    layer = nnx.MultiHeadAttention(num_heads=2, in_features=8, decode=False, rngs=nnx.Rngs(0))
    layer(jnp.ones((1, 4, 8)), sow_weights=True)

def test_skipped_by_itself():
    pytest.skip("needs a GPU")
"""

LINEN = """
import jax.numpy as jnp
from flax import linen

x = jnp.ones((1, 4, 2, 8))

def test_runs():
    linen.dot_product_attention(x, x, x)
"""

FAILURES = """
def test_wrong_number():
    assert linen.dot_product_attention(x, x, x).sum() == 0

def test_refused_for_a_reason_that_is_not_listed():
    linen.dot_product_attention(*[x[0, 0, 0]] * 3)

def test_error_inside_jax_with_the_words_of_a_refusal():
    linen.dot_product_attention(x, x, x, promote_dtype=deeper)

def deeper(arrays, dtype):
    raise ValueError("dtype='float64' is not supported")
"""


def run(directory, *, jax=JAX, linen=LINEN):
    sources = {"nn_test.py": jax, "nnx/nn/attention_test.py": FLAX, "linen/linen_attention_test.py": linen}
    for name, text in sources.items():
        path = directory / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return python(TOOL, "--jax", directory, "--flax", directory, "--backend", "standard", folder=directory)


def test_what_passes_and_what_is_refused_with_its_reason_is_no_failure(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"XFAIL .*attention_test.py::test_sown_weights - sown weights: a fused kernel", done.stdout)
    assert re.search(r"SKIPPED .*attention_test.py.*: needs a GPU", done.stdout)
    assert "2 passed, 1 skipped, 1 deselected, 1 xfailed" in done.stdout


def test_everything_else_is_a_failure(tmp_path):
    done = run(tmp_path, jax="import jax.nowhere", linen=LINEN + FAILURES)
    assert done.returncode == 1
    failed = sorted(line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR")))
    expected = [
        "ERROR .*nn_test.py",
        "FAILED .*::test_error_inside_jax_with_the_words_of_a_refusal - ValueError: dtype='float64'",
        "FAILED .*::test_refused_for_a_reason_that_is_not_listed - ValueError: query .* the same rank",
        "FAILED .*::test_wrong_number - AssertionError",
    ]
    for line, pattern in zip(failed, expected, strict=True):
        assert re.match(pattern, line)
    assert "No module named 'jax.nowhere'" in done.stdout
