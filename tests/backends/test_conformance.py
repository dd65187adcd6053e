"""A conformance test that passes has claimed something: none returns early, each judges or is reported as skipped."""

import dataclasses
import re

import numpy as np
import pytest

import left_out
from attnsuite.backends import Target, registry, support
from attnsuite.testing import orders, problems, random_specs
from attnsuite.testing.conformance import held
from script import python

pytestmark = pytest.mark.newest


def test_a_pass_without_a_claim_fails():
    with pytest.raises(pytest.fail.Exception, match="passed without a claim"), held("test_random_problem"):
        pass


@pytest.mark.parametrize(("error", "passes"), [(1.274e-6, True), (1.6e-6, False)])
def test_a_lucky_order_of_sums_in_standard_fails_nobody(error, passes):
    """chunked on an EPYC was off by 1.274e-6 where standard was off by 3.7e-7; 12 orders of the sum reach 4.2e-7."""
    problem = problems.problem("positions-query-ahead")
    standard = dataclasses.replace(problem.standard["output"], max_error=3.68e-7)
    lucky = dataclasses.replace(problem, standard=problem.standard | {"output": standard})
    output = problem.expected["output"].copy()
    output[1, 16, 0, 0] += error * np.abs(output).max()
    output = output.astype(np.float32)
    assert not lucky.verdict("output", output).passed
    assert orders.verdicts(lucky, {"output": output})["output"].passed == passes


def test_problem_that_slow_backends_leave_out_has_no_feature_that_the_other_lacks():
    def found(case):
        layout, terms, inputs = problems.arrays(problems.CASES[case], case)
        spec = problems.spec_of(problems.CASES[case], layout, terms, inputs)
        given = frozenset(name for name in layout.__dataclass_fields__ if getattr(layout, name) is not None)
        return spec, frozenset(spec.features()), given

    slow = {"chunked": "native", "splash": "interpret"}
    for case, other in left_out.HELD_BY.items():
        (spec, features, given), (other_spec, more, as_given) = found(case), found(other)
        assert (spec.dtype, given) == (other_spec.dtype, as_given & given), (case, other)
        assert features <= more, (case, other, features - more)
        for backend, mode in slow.items():
            taken, stand_in = (support(registry.get(backend), made, Target("cpu"), mode) for made in (spec, other_spec))
            assert stand_in or not taken, (backend, case, other)
    assert not set(left_out.HELD_BY.values()) & set(left_out.HELD_BY)


def test_features_of_the_contract_are_all_drawn():
    backend, here = registry.get("standard"), Target.here()
    drawn = [random_specs.draw(number, 0, backend, here, "native") for number in range(60)]
    asked = set().union(*(each.spec.features() for each in drawn))
    # Slopes are not drawn: where all visible keys are equally far, their gradient is exactly zero, without a bound.
    assert asked == set(backend.takes(here, "native").features) - {"alibi"}


VACUOUS = """
from attnsuite.testing import Conformance

class TestVacuous(Conformance):
    backend = "standard"
    cases = cases_for_eager = cases_for_forward_alone = cases_for_vmap = ("length-1",)
    takes_traced_layouts = False
    random_problems = (0,)

    def test_matches_the_oracle(self, taken):
        pass

    def test_random_problem(self, number):
        for spec in ():
            self.run(spec)
"""


@pytest.mark.thorough
def test_every_conformance_test_of_a_backend_judges_or_is_reported_as_skipped(tmp_path):
    """In a folder of somebody else's, with no plugin. Of a class with two tests that claim nothing these two fail."""
    (tmp_path / "test_vacuous.py").write_text(VACUOUS, encoding="utf-8")
    done = python("-m", "pytest", "-v", "-p", "no:cacheprovider", tmp_path, folder=tmp_path)
    outcomes = dict(re.findall(r"::(test_\w+)\S* (PASSED|FAILED|SKIPPED)", done.stdout))
    assert outcomes == {
        "test_every_declared_refusal_names_a_case": "SKIPPED",
        "test_takes_or_refuses_as_declared": "SKIPPED",
        "test_matches_the_oracle": "FAILED",
        "test_forward_alone_matches_the_oracle": "PASSED",
        "test_eager_agrees_with_jit": "PASSED",
        "test_vmap_adds_an_axis": "PASSED",
        "test_layout_may_be_traced": "SKIPPED",
        "test_carry_is_handed_on": "PASSED",
        "test_unknown_option_is_refused": "PASSED",
        "test_random_problem": "FAILED",
    }, done.stdout + done.stderr
    assert done.stdout.count("passed without a claim; it has to judge a result") >= 2
