"""One suite that every backend passes, for pytest.

A backend's test file inherits :class:`Conformance` and says which named problems (``problems.CASES``) the backend
refuses; a problem that is refused without being named there is a failure, and so is one that is named and taken.
``checks.py`` holds the claims. A test that ends without having judged anything fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnsuite.backends import AttentionSpec, Backend, Target, plan, registry
from attnsuite.backends.features import Mode

from . import checks, problems, random_specs
from .checks import Results, Run, check_accuracy, check_unseen_does_not_matter, compiled
from .problems import CASES, Problem

# Their claim is an assertion of their own.
UNJUDGED = ("test_every_declared_refusal_names_a_case", "test_carry_is_handed_on", "test_unknown_option_is_refused")


@contextlib.contextmanager
def held(test: str) -> Iterator[None]:
    """Fail where a test of the suite ends without having judged anything: a pass that claims nothing is no pass.

    Every test of a conformance class runs in it. A test that has nothing to judge skips.
    """
    with (
        mock.patch.object(checks, "check_quantity", wraps=checks.check_quantity) as quantity,
        mock.patch.object(checks, "check_support", wraps=checks.check_support) as supported,
    ):
        yield
    if test not in UNJUDGED and not (quantity.called or supported.called):
        pytest.fail(f"{test} passed without a claim; it has to judge a result, or to skip and say why.")


def _hold(cls: type) -> None:
    """Let the tests that a class defines run inside :func:`held`."""
    for name, test in list(vars(cls).items()):
        if name.startswith("test_") and inspect.isfunction(test):
            setattr(cls, name, _holding(test))


def _holding(test: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        with held(test.__name__):
            test(*arguments, **named)

    return run


class Conformance:
    """The suite. Subclasses set ``backend``, and the rest where it differs."""

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        _hold(cls)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Deal the cases to the tests that take one: those to ask about, or those that the backend takes.

        A case that is taken is asked about by the plan of :meth:`test_matches_the_oracle`, which raises where it is
        refused; of a device that is not here nothing is run, and all cases are asked about.
        """
        if "case" in metafunc.fixturenames:
            cases = [case for case in self.cases if self.target is not None or self.is_refused(case)]
            metafunc.parametrize("case", cases)
        if "taken" in metafunc.fixturenames:
            metafunc.parametrize("taken", self.taken(metafunc.function))
        if "number" in metafunc.fixturenames:
            metafunc.parametrize("number", self.random_problems)

    backend: ClassVar[str]
    mode: ClassVar[Mode] = "native"
    options: ClassVar[Mapping[str, Any] | None] = None  # that every plan is made with
    target: ClassVar[Target | None] = None  # None: this machine
    cases: ClassVar[tuple[str, ...]] = tuple(CASES)
    dtype: ClassVar[str | None] = None  # run every case in this dtype instead of its own
    refuses: ClassVar[frozenset[str]] = frozenset()  # names of cases, or patterns of them ("mask-*")
    takes_traced_layouts: ClassVar[bool] = True  # whether segment ids and such may be arguments of a jit
    # Numbers, of seed 0. The last two have logits of 44 and 140: gradients are wrong where passes round them otherwise.
    random_problems: ClassVar[tuple[int, ...]] = (6, 0, 1, 3, 4, 5, 7, 9, 53, 193)

    # Each of these costs one more compilation per case.
    cases_for_eager: ClassVar[tuple[str, ...]] = (
        "causal",
        "window-asymmetric",
        "padding-both-ends",
        "decode-4",
        "bias-broadcast",
        "log-sum-exp",
    )
    cases_for_forward_alone: ClassVar[tuple[str, ...]] = (
        *fnmatch.filter(CASES, "decode-*"),
        "causal",
        "gqa-8",
        "combination",
        "padding-both-ends",
        "log-sum-exp",
        "log-sum-exp-decode",
        "sinks-decode",
        "alibi-decode",
        "function-decode",
        "score-decode",
        "values-in-keys-decode",
    )
    cases_for_vmap: ClassVar[tuple[str, ...]] = ("causal", "gqa-8", "combination", "decode-1", "ragged")
    cases_for_traced_layouts: ClassVar[tuple[str, ...]] = (
        "segments-causal",
        "padding-both-ends",
        "ragged-causal",
        "positions-shuffled",
        "decode-4",
        "combination-ragged",
        "mask-per-head",
        "bias-per-head",
        "log-sum-exp-of-nothing",
        "alibi-soft-cap",
        "function-positions",
        "score-soft-cap",
        "pages",
        "pages-ragged",
    )

    @classmethod
    def is_refused(cls, case: str) -> bool:
        """Whether the class declares the case as refused."""
        return any(fnmatch.fnmatchcase(case, pattern) for pattern in cls.refuses)

    @classmethod
    def taken(cls, test: Callable[..., None]) -> list[str]:
        """The cases that a test runs: those of the class that it does not refuse, or the test's own choice of them."""
        choice = {
            "test_eager_agrees_with_jit": cls.cases_for_eager,
            "test_forward_alone_matches_the_oracle": cls.cases_for_forward_alone,
            "test_vmap_adds_an_axis": cls.cases_for_vmap,
            "test_layout_may_be_traced": cls.cases_for_traced_layouts if cls.takes_traced_layouts else (),
        }.get(test.__name__, cls.cases)
        return [case for case in choice if case in cls.cases and not cls.is_refused(case)]

    @functools.cached_property
    def implementation(self) -> Backend:
        """The backend under test."""
        return registry.get(self.backend)

    @property
    def repeats(self) -> bool:
        """Whether a run is repeated to see the same bits. An interpreter takes long, and no cores race in it."""
        return self.mode != "interpret"

    @property
    def device(self) -> Target:
        """What support is judged against and planned for."""
        return Target.here() if self.target is None else self.target

    def problem(self, case: str) -> Problem:
        """The problem; skips where the backend's device is not here (what it refuses is tested all the same)."""
        self.require_device()
        return problems.problem(case, self.dtype)

    def require_device(self) -> None:
        """Skip where the device that the class is about is not here."""
        here = Target.here()
        if self.device.platform != here.platform:
            pytest.skip(f"{self.backend} needs {self.device}; here is {here}")

    def run(self, problem: Problem) -> Run:
        """The compiled backend."""
        if self.backend == "standard" and self.mode == "native":
            return problem.standard_run
        return compiled(self.implementation, problem, self.device, self.mode, self.options)

    def test_every_declared_refusal_names_a_case(self) -> None:
        if not self.refuses:
            pytest.skip(f"{self.backend} declares no refusal")
        for pattern in self.refuses:
            assert fnmatch.filter(self.cases, pattern), pattern

    def test_takes_or_refuses_as_declared(self, case: str) -> None:
        layout, terms, inputs = problems.arrays(CASES[case], case, self.dtype)
        spec = problems.spec_of(CASES[case], layout, terms, inputs)
        refused = self.is_refused(case)
        checks.check_support(self.implementation, spec, self.device, self.mode, self.options, refused=refused)

    def test_matches_the_oracle(self, taken: str) -> None:
        problem = self.problem(taken)
        run = self.run(problem)
        results = run(*problem.inputs)
        check_accuracy(results, problem)
        if self.repeats or problem.unseen_rows.any() or problem.unseen_keys.any():
            finite = self.backend not in checks.ISOLATING
            check_unseen_does_not_matter(run, problem, results, finite=finite)

    def test_forward_alone_matches_the_oracle(self, taken: str) -> None:
        """A backend may take another way where no gradient is wanted; decoding does."""
        problem = self.problem(taken)
        forward = dataclasses.replace(problem, spec=dataclasses.replace(problem.spec, needs_grad=False))
        planned = problems.planned(self.implementation, forward, self.device, self.mode, self.options)
        run = jax.jit(lambda q, k, v: planned(q, k, v, problem.terms))
        result = run(*problem.inputs[:3])
        again = run(*problem.inputs[:3]) if self.repeats else result
        names = ("output", "log_sum_exp") if problem.spec.return_log_sum_exp else ("output",)
        for name, x, same in zip(names, jax.tree.leaves(result), jax.tree.leaves(again), strict=True):
            checks.check_quantity(name, x, problem)
            np.testing.assert_array_equal(np.asarray(x), np.asarray(same))

    def test_eager_agrees_with_jit(self, taken: str) -> None:
        problem = self.problem(taken)
        run = problems.planned(self.implementation, problem, self.device, self.mode, self.options)
        lse = problem.spec.return_log_sum_exp
        check_accuracy(problems.differentiate(run, problem.inputs, problem.terms, log_sum_exp=lse), problem)

    def test_vmap_adds_an_axis(self, taken: str) -> None:
        problem = self.problem(taken)
        run = self.run(problem)
        doubled = (jnp.stack([x, -x]) for x in problem.inputs)
        results = jax.vmap(run)(*doubled)
        check_accuracy({name: x[0] for name, x in results.items()}, problem)
        # (-q)(-k) gives the same probabilities: the output flips its sign with v, dv with the cotangent.
        check_accuracy({name: -x[1] for name, x in results.items()}, problem)

    def test_layout_may_be_traced(self, taken: str) -> None:
        problem = self.problem(taken)
        check_accuracy(self.traced(problem.spec)(problem.layout, problem.terms, *problem.inputs), problem)

    def test_carry_is_handed_on(self) -> None:
        problem = self.problem(self.taken(self.test_matches_the_oracle)[0])
        how: dict[str, Any] = {"target": self.device, "mode": self.mode, "options": self.options}
        planned = plan(self.implementation, problem.spec, problem.layout, **how)
        assert jax.eval_shape(lambda *x: planned.run(*x, layer=3, carry=())[1], *problem.inputs[:3]) == ()

    def test_unknown_option_is_refused(self) -> None:
        problem = self.problem(self.taken(self.test_matches_the_oracle)[0])
        with pytest.raises(ValueError, match="no_such_option"):
            plan(
                self.implementation,
                problem.spec,
                problem.layout,
                target=self.device,
                mode=self.mode,
                options={"no_such_option": 1},
            )

    def test_random_problem(self, number: int) -> None:
        """A problem of the features that the backend takes; ``attnsuite judge --random`` draws any number of them."""
        self.require_device()
        drawn = random_specs.draw(number, 0, self.implementation, self.device, self.mode, self.options)
        drawn = dataclasses.replace(drawn, traced=drawn.traced and self.takes_traced_layouts)
        problem = random_specs.solved(drawn)
        for name, result in random_specs.results(drawn, problem, self.implementation, self.device, self.mode).items():
            checks.check_quantity(name, result, problem)

    def traced(self, spec: AttentionSpec) -> Callable[..., Results]:
        """As :meth:`run`, with the layout as an argument of the compiled function."""
        return problems.traced(self.implementation, spec, self.device, self.mode, tuple((self.options or {}).items()))


_hold(Conformance)
