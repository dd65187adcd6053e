"""What all tests share: fixed hypothesis, marks of folders, conformance cases dealt to their classes and judged."""

from pathlib import Path
from typing import Any

import hypothesis
import pytest

from conformance import Conformance, held

# derandomize: a failure is the same on every machine; deadline None: a first example compiles.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, database=None, print_blob=False)
hypothesis.settings.load_profile("fixed")


TESTS = Path(__file__).parent


# Every backend is held to the oracle in these with the oldest JAX too, all cases with the newest.
CORE = (
    *(
        "causal",
        "causal-bfloat16",
        "gqa-8",
        "window-asymmetric",
        "segments-causal",
        "padding-both-ends",
        "ragged-causal",
    ),
    *("combination", "decode-4"),
)


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test carries the names of its folders as marks: tests/backends/kvax gives backends and kvax."""
    for item in items:
        if not item.path.is_relative_to(TESTS):  # of somebody who inherits the suite
            continue
        for folder in item.path.relative_to(TESTS).parent.parts:
            item.add_marker(folder)
        of_the_oracle = getattr(item, "originalname", None) == Conformance.test_matches_the_oracle.__name__
        if of_the_oracle and item.callspec.params["taken"] in CORE:
            item.add_marker("core")


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
