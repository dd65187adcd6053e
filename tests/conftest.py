"""What all tests share: fixed hypothesis, and marks of folders."""

import gc
from pathlib import Path

import hypothesis
import pytest

from attnsuite.testing import Conformance

# derandomize: a failure is the same on every machine; deadline None: a first example compiles.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, database=None, print_blob=False)
hypothesis.settings.load_profile("fixed")


TESTS = Path(__file__).parent


# Every backend is held to the oracle in these with the oldest JAX too; with the newest JAX, to all of the suite.
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
        if issubclass(getattr(item, "cls", None) or object, Conformance):
            item.add_marker("conformance")
        of_the_oracle = getattr(item, "originalname", None) == Conformance.test_matches_the_oracle.__name__
        if of_the_oracle and item.callspec.params["taken"] in CORE:
            item.add_marker("core")


def pytest_collection_finish() -> None:
    """Garbage is collected less often: tracing makes many objects, and nearly none of them is in a circle."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
