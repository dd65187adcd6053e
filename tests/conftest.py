"""What all tests share: hypothesis is the same every day, conformance cases are dealt to their classes and judged."""

from typing import Any

import hypothesis
import pytest

from conformance import Conformance, held

# derandomize: a failure is the same on every machine; deadline None: a first example compiles.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, database=None, print_blob=False)
hypothesis.settings.load_profile("fixed")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Deal every case of a conformance class to its tests: all of them, or those that the backend takes."""
    if metafunc.cls is None or not issubclass(metafunc.cls, Conformance):
        return
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", metafunc.cls.cases)
    if "taken" in metafunc.fixturenames:
        metafunc.parametrize("taken", metafunc.cls.taken(metafunc.function))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    """No test of a conformance class passes without a claim."""
    if pyfuncitem.cls is None or not issubclass(pyfuncitem.cls, Conformance):
        return (yield)
    with held(pyfuncitem.originalname):
        return (yield)
