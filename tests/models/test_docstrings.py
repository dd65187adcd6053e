import doctest
import importlib
import pkgutil

import pytest

import models

NAMES = [f"models.{module.name}" for module in pkgutil.iter_modules(models.__path__)]


@pytest.mark.parametrize("name", NAMES)
def test_examples_in_docstrings_run(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
