"""Every example in a docstring runs and gives what it says."""

import doctest
import importlib
import pkgutil

import pytest

ROOMS = ("backends", "models", "suite", "reports")
MODULES = sorted(
    info.name
    for room in ROOMS
    for info in pkgutil.walk_packages(importlib.import_module(room).__path__, prefix=f"{room}.")
    if not info.name.endswith("__main__")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_hold(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    examples = sum(len(test.examples) for name in MODULES for test in finder.find(importlib.import_module(name)))
    assert examples > 20
