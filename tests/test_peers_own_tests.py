"""The command that runs JAX's and flax's own tests: on sources written here, since theirs are not kept."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

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

def test_runs():
    linen.dot_product_attention(*[jnp.ones((1, 4, 2, 8))] * 3)
"""

FAILURES = """
def test_wrong_number():
    assert linen.dot_product_attention(*[jnp.ones((1, 4, 2, 8))] * 3).sum() == 0

def test_refused_for_a_reason_that_is_not_listed():
    linen.dot_product_attention(*[jnp.ones((8,))] * 3)

def test_error_inside_jax_with_the_words_of_a_refusal():
    linen.dot_product_attention(*[jnp.ones((1, 4, 2, 8))] * 3, promote_dtype=deeper)

def deeper(arrays, dtype):
    raise ValueError("dtype='float64' is not supported")
"""


def run(directory: Path, *, jax: str = JAX, linen: str = LINEN) -> subprocess.CompletedProcess[str]:
    for name, text in {
        "tests/nn_test.py": jax,
        "tests/nnx/nn/attention_test.py": FLAX,
        "tests/linen/linen_attention_test.py": linen,
    }.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    command = [sys.executable, TOOL, "--jax", directory, "--flax", directory, "--backend", "standard"]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=directory)


def test_what_passes_and_what_is_refused_with_its_reason_is_no_failure(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "refused  attention_test.py::test_sown_weights: sown weights: a fused kernel never forms them" in done.stdout
    assert "skipped  attention_test.py::test_skipped_by_itself: needs a GPU" in done.stdout
    assert done.stdout.rstrip().endswith("2 passed, 1 refused, 1 skipped, 0 failed")


@pytest.mark.thorough
def test_everything_else_is_a_failure(tmp_path: Path) -> None:
    done = run(tmp_path, jax="import jax.nowhere", linen=LINEN + FAILURES)
    assert done.returncode == 1
    failed = sorted(line for line in done.stdout.splitlines() if line.startswith("failed"))
    expected = [
        "a file: ImportError .* No module named 'jax.nowhere'",
        "linen_attention_test.py::test_error_inside_jax_with_the_words_of_a_refusal: ValueError: dtype='float64'",
        "linen_attention_test.py::test_refused_for_a_reason_that_is_not_listed: ValueError: query .* the same rank",
        "linen_attention_test.py::test_wrong_number: AssertionError",
    ]
    for line, pattern in zip(failed, expected, strict=True):
        assert re.match(f"failed   {pattern}", line)


def test_folder_without_the_tests_is_refused(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, TOOL, "--jax", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"no such file: {tmp_path / 'tests' / 'nn_test.py'}" in done.stderr
