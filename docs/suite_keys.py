"""What a suite file may hold, made from the classes that read one.

``python docs/suite_keys.py`` prints it; the site has it behind docs/reference/suite-files.md (docs/build.py).
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from attnsuite.suite import kinds, typed
from attnsuite.suite.suite_file import SuiteFile

COUNT = "an integer from 1 to 2^31 - 1"
PLAIN = (COUNT, "an integer from 0 to 2^32 - 1", "text", "true or false", "a list of names")
REST = f"A number is {COUNT}, a `seed` {PLAIN[1]}, where nothing else is said."


def generated() -> str:
    """The keys of the file and of every kind of case that ships here, with what each accepts, as Markdown."""
    parts = [REST, "", "## The file", "", _meaning(SuiteFile), "", _keys(SuiteFile)]
    for names, case in _cases().items():
        parts += ["", f"## {', '.join(f'`{name}`' for name in names)}", "", _meaning(case), "", _keys(case)]
    return "\n".join(parts) + "\n"


def _cases() -> dict[tuple[str, ...], type[Any]]:
    """The class of the cases of each group of kinds, in the order of a report's tables."""
    found: dict[type[Any], tuple[str, ...]] = {}
    for name, kind in kinds.built_in().items():
        if kind.case is not None:
            found[kind.case] = (*found.get(kind.case, ()), name)
    return {names: case for case, names in found.items()}


def _meaning(case: type[Any]) -> str:
    """The docstring in Markdown, without what it raises."""
    text = " ".join(inspect.getdoc(case).split())  # pyright: ignore[reportOptionalMemberAccess]  (ruff wants one)
    text = re.sub(r" Raises InputError[^.]*\.", "", text)
    return re.sub(r":\w+:`[\w.]*?(\w+)`", r"`\1`", text).replace("``", "`")


def _keys(case: type[Any]) -> str:
    """The keys of a table in their order, each with its default, and with what it accepts where that is not plain."""
    hints = get_type_hints(case, include_extras=True)
    fields = [field for field in dataclasses.fields(case) if field.name not in ("case", "kind")]
    return f"Keys: {', '.join(_key(field, hints[field.name]) for field in fields)}."


def _key(field: dataclasses.Field[Any], hint: Any) -> str:
    name, default = f"`{field.name}`", field.default
    if default is dataclasses.MISSING:
        name = f"**{name}**"
    elif default not in (None, "", ()):
        name = f"`{field.name} = {_toml(default)}`"
    accepted = _accepted(hint)
    if accepted in PLAIN:
        return name
    others = re.sub(r"^an integer (from \d+) to 2\^31 - 1$", r"\1", accepted)
    return f"{name} ({others.replace(f'`{_toml(default)}`, ', 'or ', 1)})"


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def _accepted(hint: Any) -> str:
    """A type in words; a file cannot say None, so None is not among them."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_accepted(each) for each in get_args(hint) if each is not type(None))
    if get_origin(hint) is Annotated:
        return typed.accepted(hint).replace(str(2**31 - 1), "2^31 - 1").replace(str(2**32 - 1), "2^32 - 1")
    if get_origin(hint) is Literal:
        return ", ".join(f"`{_toml(value)}`" for value in get_args(hint) if value != "")
    if get_origin(hint) is tuple:
        return "a list of names"
    return typed.accepted(hint)


if __name__ == "__main__":
    sys.stdout.write(generated())
