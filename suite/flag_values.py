"""Lists separated by commas, as the command line and cases write them; and a backend's name and options."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from attnsuite.backends import UnknownBackendError, names, registry
from attnsuite.sentences import nearest

from .errors import InputError


def parts_of(text: str) -> list[str]:
    """The parts between the commas, without blank ones.

    >>> parts_of("0, 2,,")
    ['0', '2']
    """
    return [part.strip() for part in text.split(",") if part.strip()]


def names_of(text: str, flag: str) -> list[str]:
    """The names in the value of a flag, each once. Raises InputError if there is none."""
    found = list(dict.fromkeys(parts_of(text)))
    if not found:
        raise InputError(f"{flag} is empty; give names separated by commas, or leave it out.")
    return found


def spelled(names: Iterable[str], between: str = ", ") -> str:
    """Fields as the flags of the command line, for a sentence.

    >>> spelled(["top_k", "anchors"])
    '--top-k, --anchors'
    """
    return between.join(f"--{name.replace('_', '-')}" for name in names)


def known_backend(name: str, peers: Collection[str] = ()) -> str:
    """The name, if it is a backend's or one of ``peers``. Raises InputError with the known names."""
    if name in peers:
        return name
    try:
        registry.get(name)
    except UnknownBackendError as error:
        others = f", or of the peers {', '.join(peers)}" if peers else ""
        raise InputError(
            f"backend {name!r} is not registered; use {', '.join(names())}{others}.{nearest(name, (*names(), *peers))}"
        ) from error
    return name


def parse_options(text: str) -> dict[str, Any]:
    """Backend options from ``name=value,name=value``; a value is a JSON scalar or a word. Raises InputError.

    >>> parse_options("top_k=0.125, min_keys=0, granularity=tile")
    {'top_k': 0.125, 'min_keys': 0, 'granularity': 'tile'}
    """
    options: dict[str, Any] = {}
    for word in parts_of(text):
        name, equals, value = (part.strip() for part in word.partition("="))
        if not (name and equals and value) or name in options:
            raise InputError(f"--options {word!r} must be NAME=VALUE, and each name once; separate them by commas.")
        try:
            options[name] = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeError):
            options[name] = value
    return options


def is_whole(word: str) -> bool:
    """Whether the word is a whole number of at most nine digits; nothing that is counted here has more."""
    return word.isdecimal() and len(word) < 10
