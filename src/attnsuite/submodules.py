"""Modules by their dotted name alone: ``import attnsuite; attnsuite.models.lora`` needs no import of its own."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType


def submodules_of(package: str) -> Callable[[str], ModuleType]:
    """The ``__getattr__`` of a package: a module of it that nothing imported yet.

    Raises ImportError for a folder of the repository that was imported under its bare name: it would be a second
    package beside the one that is installed.
    """
    if package.partition(".")[0] != "attnsuite":
        raise ImportError(f"write import attnsuite.{package}; the folder {package} is no package of its own.")

    def find(name: str) -> ModuleType:
        missing = AttributeError(f"module {package!r} has no attribute {name!r}")
        if name.startswith("_"):
            raise missing
        try:
            return importlib.import_module(f"{package}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{package}.{name}":  # the module is there, and what it imports is not
                raise
            raise missing from None

    return find
