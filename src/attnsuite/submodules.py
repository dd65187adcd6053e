"""Modules by their dotted name alone: ``import attnsuite; attnsuite.models.lora`` needs no import of its own.

So do the public names of a package that imports their modules when they are asked for.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any


def submodules_of(package: str, homes: Mapping[str, str] = MappingProxyType({})) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package: a module of it that nothing imported yet, or a name from its module.

    ``homes`` has the module of each public name.

    Raises ImportError for a folder of the repository that was imported under its bare name: it would be a second
    package beside the one that is installed.
    """
    if package.partition(".")[0] != "attnsuite":
        raise ImportError(f"write import attnsuite.{package}; the folder {package} is no package of its own.")

    def find(name: str) -> Any:
        if name in homes:
            found = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
            setattr(sys.modules[package], name, found)
            return found
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
