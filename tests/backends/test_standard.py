"""The standard backend: the contract, with and without LLVM's optimisation."""

import os
import subprocess
import sys

import pytest

from attnsuite.testing import Conformance

pytestmark = pytest.mark.standard


class TestStandard(Conformance):
    backend = "standard"


def test_gradient_is_finite_where_xla_computes_the_logits_twice():
    """Without LLVM's optimisation the second computation rounds otherwise, and no logit equals the largest one."""
    script = """
from attnsuite.testing import problems
from attnsuite.testing.checks import check_accuracy
problem = problems.problem("mask-and-bias")
check_accuracy(problem.standard_run(*problem.inputs), problem)
"""
    flags = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | flags, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
