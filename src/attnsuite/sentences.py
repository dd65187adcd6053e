"""Values in sentences, the same in every room."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

_MAX_LENGTH = 60  # characters of a value


def quoted(value: Any) -> str:
    """A value in a sentence: short and on one line, whatever it is.

    >>> quoted(10**5000), quoted({"a": 1}), quoted("x" * 100)[-6:]
    ('an integer of 16610 bits', 'a table', "xxx..'")
    """
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple):
        return "a list"
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value[: _MAX_LENGTH + 1] if isinstance(value, str) else value)
    return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH - 3]}..{text[-1]}"


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that was probably meant, as the end of a sentence that lists them; empty where none is near.

    >>> nearest("standrd", ["standard", "chunked"]), nearest("other", ["standard"])
    (" Did you mean 'standard'?", '')
    """
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    return f" Did you mean {near[0]!r}?" if near else ""


def not_accepted(error: Exception, where: str) -> str:
    """An error of msgspec, "Expected `int`, got `str` - at `$.dim`" as a sentence about ``dim``, without a full stop.

    >>> not_accepted(ValueError("Expected `int`, got `str` - at `$.dim`"), "params.json")
    'dim in params.json is not accepted: expected `int`, got `str`'
    """
    what, _, place = str(error).partition(" - at `$")
    place = place.strip("`").removeprefix(".")
    return f"{place + ' in ' if place else ''}{where} is not accepted: {what[0].lower()}{what[1:]}"
