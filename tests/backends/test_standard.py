"""The standard backend: the contract, with and without LLVM's optimisation."""

import pytest

import left_out
from attnsuite.testing import Conformance
from script import printed

pytestmark = pytest.mark.standard


class TestStandard(Conformance):
    backend = "standard"
    cases_for_traced_layouts = left_out.TRACED
    cases_for_vmap = left_out.MAPPED


def test_gradient_is_finite_where_xla_computes_the_logits_twice():
    """Without LLVM's optimisation the second computation rounds otherwise, and no logit equals the largest one."""
    script = """
from attnsuite.testing import problems
from attnsuite.testing.checks import check_accuracy
problem = problems.problem("mask-and-bias")
check_accuracy(problem.standard_run(*problem.inputs), problem)
"""
    printed(script, XLA_FLAGS="--xla_backend_optimization_level=0")
