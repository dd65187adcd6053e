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
NEEDS = {
    **{name: "llvmlite" for name in MODULES if name.startswith("backends.flash_cpu")},
    "backends.kvax.build": "triton",  # tox -e kvax runs these two
    "backends.kvax.interpret": "triton",
    "suite.peers.tokamax_chunked": "tokamax",
    "suite.peers.torch_llama": "transformers",
    "suite.peers.torch_sdpa": "torch",
}


def load(name):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    return importlib.import_module(name)


@pytest.mark.parametrize("name", MODULES)
def test_examples_hold(name):
    assert doctest.testmod(load(name)).failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    always = [importlib.import_module(name) for name in MODULES if name not in NEEDS]
    examples = sum(len(test.examples) for module in always for test in finder.find(module))
    assert examples > 20
