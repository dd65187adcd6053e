"""The flags of every verb, as a file: what changes in them is read once, beside the docs that name them.

Written again by ``python tests/suite/test_flags.py``.
"""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path

from attnsuite.suite.verbs import EXTENSIONS, VERBS
from attnsuite.suite.verbs.flags import extended

GOLDEN = Path(__file__).with_name("flags.txt")


def flags(verb):
    """Each flag and its default, those of extensions last; a positional argument has no dashes."""
    kind = getattr(importlib.import_module(f"attnsuite.suite.verbs.{verb}"), verb.capitalize())
    yield from listed(kind)
    for name in EXTENSIONS:
        with_flags = extended(kind, verb, [name])
        yield from (f"{name}: {flag}" for flag in listed(with_flags) if flag not in set(listed(kind)))


def listed(kind):
    for field in dataclasses.fields(kind):
        name = field.name if "Positional" in str(field.type) else f"--{field.name.replace('_', '-')}"
        yield name if field.default is dataclasses.MISSING else f"{name} = {field.default}"


def found():
    """The content of the file."""
    return "".join("\n  ".join([verb, *flags(verb)]) + "\n" for verb in VERBS)


def test_flags_are_those_of_the_file():
    assert found() == GOLDEN.read_text(encoding="utf-8")


if __name__ == "__main__":
    GOLDEN.write_text(found(), encoding="utf-8")
