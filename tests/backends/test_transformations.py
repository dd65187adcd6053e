"""The table of JAX's transformations is what docs/transformations.md shows, without a fault."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.backends import attention
from attnsuite.testing import transformations

pytestmark = [pytest.mark.backends, pytest.mark.newest]
PAGE = Path(__file__).parents[2] / "docs" / "transformations.md"


def test_table_is_the_one_of_the_page():
    pytest.importorskip("llvmlite", reason="flash_cpu is compiled by llvmlite")
    command = [sys.executable, "-m", "attnsuite.testing.transformations", "standard", "chunked", "flash_cpu"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    made = re.sub(r"on cpu:[^:]*: ", "on this CPU: ", found.stdout.strip())  # the processor's name
    assert made in PAGE.read_text()


@pytest.mark.parametrize("fault", ["wrong", "an error of JAX"])
def test_a_fault_is_no_sentence(fault):
    def attend(query, key, value):
        if fault == "wrong":
            return query * 1.01
        raise TypeError("something from inside")

    arrays = transformations.operands(jnp.float32)
    expected = np.asarray(attention(*arrays, is_causal=True, backend="standard"))
    with pytest.raises((AssertionError, TypeError)):
        transformations.tried(attend, "jit", expected)
    assert transformations.tried(lambda *_: expected, "no jit", expected) == "yes"
