"""Lists as the command line and cases write them, separated by commas; and whether a name is that of a backend."""

from __future__ import annotations

from collections.abc import Collection

from attnsuite.backends import UnknownBackendError, names, registry

from .errors import InputError


def parts_of(text: str) -> list[str]:
    """What stands between the commas, without what is blank.

    >>> parts_of("0, 2,,")
    ['0', '2']
    """
    return [part.strip() for part in text.split(",") if part.strip()]


def names_of(text: str, flag: str) -> list[str]:
    """The names in the value of a flag, each once. Raises InputError where there is none."""
    found = list(dict.fromkeys(parts_of(text)))
    if not found:
        raise InputError(f"{flag} is empty; give names separated by commas, or leave it out.")
    return found


def known_backend(name: str, peers: Collection[str] = ()) -> str:
    """The name, where it is a backend's or one of ``peers``. Raises InputError with those that are."""
    if name in peers:
        return name
    try:
        registry.get(name)
    except UnknownBackendError as error:
        others = f", or of the peers {', '.join(peers)}" if peers else ""
        raise InputError(f"backend {name!r} is not registered; use {', '.join(names())}{others}.") from error
    return name
