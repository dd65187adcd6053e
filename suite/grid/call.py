"""A call of a function of this package as JSON: what a worker process is asked for.

The function is named by its module, and its annotations say what the arguments are made into. No other function can be
named, and no argument is more than data.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from ..cell import Case

_PACKAGE = "attnsuite."


def described(function: Callable[..., Any], arguments: Sequence[Any]) -> dict[str, Any]:
    """The call as JSON has it."""
    name = f"{function.__module__}:{function.__qualname__}"
    return {"function": name, "arguments": msgspec.to_builtins(list(arguments), enc_hook=str)}  # of a Path


def made(call: Mapping[str, Any]) -> Callable[[], Any]:
    """What computes a call that :func:`described` wrote. Raises ValueError for what is no function of this package."""
    module, _, name = call["function"].partition(":")
    function = getattr(importlib.import_module(module), name, None) if module.startswith(_PACKAGE) else None
    if not inspect.isfunction(function) or function.__module__ != module:
        raise ValueError(f"{call['function']} is no function of this package.")
    hints = get_type_hints(function, include_extras=True)
    named = inspect.signature(function).bind(*call["arguments"]).arguments
    return functools.partial(
        function, *(msgspec.convert(value, hints[name], dec_hook=decode) for name, value in named.items())
    )


def decode(kind: type, value: Any) -> Any:
    """What JSON has no form for: a path, and a case, whose kind the table names."""
    from ..kinds import make_case  # noqa: PLC0415 (the process that asks needs no kind)

    return Path(value) if kind is Path else make_case(value) if kind is Case else value
