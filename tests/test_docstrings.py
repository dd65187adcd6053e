"""Every example in a docstring runs and gives what it says."""

import doctest
import importlib
import pkgutil

import pytest

ROOMS = ("backends", "models", "suite", "reports", "testing")
MODULES = sorted(
    info.name
    for room in ROOMS
    for info in pkgutil.walk_packages(
        importlib.import_module(f"attnsuite.{room}").__path__, prefix=f"attnsuite.{room}."
    )
    if not info.name.endswith("__main__")
)
NEEDS = {
    **{
        name: "llvmlite"
        for name in MODULES
        if name.startswith(("attnsuite.backends.flash_cpu", "attnsuite.backends.kascade.flash_cpu"))
    },
    "attnsuite.backends.kvax.build": "triton",  # tox -e kvax runs these two
    "attnsuite.backends.kvax.interpret": "triton",
    "attnsuite.suite.harness": "lm_eval",
    "attnsuite.suite.peers.torch_llama": "transformers",
    "attnsuite.suite.peers.torch_sdpa": "torch",
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
