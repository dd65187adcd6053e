"""A suite file: TOML with a ``[[case]]`` table per case. A field that is a list makes a case of each value.

Errors name the line of the table, or of the key that the sentence is about. TOML parsers keep no lines, so an error
makes this module look for them in the text.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from . import typed
from .cell import Case
from .errors import InputError, as_input
from .flag_values import known_backend
from .kinds import make_case
from .kinds.kind import model_word
from .peers import PEERS

MOST_CASES = 10_000  # of one table
_STRING = re.compile(r'"""[\s\S]*?"""|\'\'\'[\s\S]*?\'\'\'')
_KEY = re.compile(r"\s*(\[\s*case\s*\.\s*)?[\"']?([\w-]+)[\"']?\s*[=\].]")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SuiteFile:
    """The content of a suite file.

    Each ``case`` is a table with the keys of its kind, in which a list stands for a sweep.
    ``backends`` are measured unless others are asked for; without it all are. ``peers`` are measured beside the
    backends. With ``all_cores`` each backend on a CPU is also measured with one device per core. With ``exact_only``
    approximate backends are measured only where they are asked for. Without ``name`` the suite is named after the file.
    """

    name: str | None = None
    backends: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    all_cores: bool = False
    exact_only: bool = False
    case: tuple[dict[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if unknown := [name for name in self.peers if name not in PEERS]:
            raise InputError(f"peers: {', '.join(map(repr, unknown))} is no peer; use {', '.join(PEERS)}.")
        for name in self.backends:
            with as_input("backends: "):
                known_backend(name)


def read_suite_file(path: Path) -> tuple[SuiteFile, tuple[Case, ...]]:
    """The content of a suite file, and its cases with every sweep written out. Raises InputError."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows write the mark
        data = tomllib.loads(text)
    except OSError as error:
        raise InputError(f"suite file {path} cannot be read: {error.strerror}.") from error
    except RecursionError as error:
        raise InputError(f"suite file {path} is nested too deeply.") from error
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"suite file {path} is not valid TOML: {error}.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"suite file {path} is not UTF-8 (byte {error.start}); save it as UTF-8.") from error
    except ValueError as error:  # an integer of thousands of digits
        raise InputError(f"suite file {path}: {error}.") from error
    try:
        read: SuiteFile = typed.convert(data, SuiteFile)
    except InputError as error:
        raise _refusal(path, text, str(error)) from error
    except ValueError as error:
        raise _refusal(path, text, f"{error}.") from error
    return read, tuple(_cases(path, text, read.case))


def _cases(path: Path, text: str, tables: Iterable[Mapping[str, Any]]) -> Iterator[Case]:
    names: dict[str, None] = {}
    for index, table in enumerate(tables):
        try:
            made = _swept(table)
        except InputError as error:
            raise _refusal(path, text, str(error), index) from error
        for case in made:
            if case.name in names:
                raise _refusal(path, text, f"two cases named {case.name}; give each its own name.", index)
            names[case.name] = None
            yield case


def _swept(table: Mapping[str, Any]) -> list[Case]:
    """The cases of a table. Where their own names do not tell them apart, the values of the sweep do."""
    tables = expanded(table)
    cases = [make_case(each) for each in tables]
    if len({case.name for case in cases}) == len(cases):
        return cases
    lists = [key for key, value in table.items() if isinstance(value, list)]
    values = ["-".join(f"{key}{_spelled(each[key], table[key])}" for key in lists) for each in tables]
    named = zip(tables, cases, values, strict=True)
    return [make_case({**each, "name": f"{case.name}-{value}"}) for each, case, value in named]


def _spelled(value: Any, values: list[Any]) -> str:
    """A value of a sweep as a case's name may have it, with its place where another value is spelled alike."""
    word = model_word(str(value))
    alike = any(other != value and model_word(str(other)) == word for other in values)
    return f"{word}-{values.index(value) + 1}" if alike else word


def expanded(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A table for each combination of the values in its lists; the first list varies slowest. Raises InputError.

    >>> [(one["sequence"], one["dtype"]) for one in expanded({"sequence": [512, 1024], "dtype": "float32"})]
    [(512, 'float32'), (1024, 'float32')]
    """
    lists = {key: value for key, value in table.items() if isinstance(value, list)}
    if not lists:
        return [dict(table)]
    for key, values in lists.items():
        if not values:
            raise InputError(f"{key} = [] lists no value; give one or more.")
    if "name" in table:
        raise InputError(
            f"name = {typed.quoted(table['name'])} cannot name the cases of a sweep ({', '.join(lists)}); leave it "
            "out, and each case is named after its fields."
        )
    count = math.prod(map(len, lists.values()))
    if count > MOST_CASES:
        raise InputError(f"{', '.join(lists)} make {count} cases; a table makes at most {MOST_CASES}.")
    return [{**table, **dict(zip(lists, values, strict=True))} for values in itertools.product(*lists.values())]


def _refusal(path: Path, text: str, sentence: str, case: int | None = None) -> InputError:
    place = location(text, sentence, case)
    return InputError(f"suite file {path}{f', {place}' if place else ': '}{sentence}")


def location(text: str, sentence: str, case: int | None = None) -> str:
    r"""The line, in a valid suite file, of the key that the sentence names first, else that of the case's table.

    "" if neither is known.

    >>> location('name = "a"\n\n[[case]]\nsequence = 0\n', "sequence = 0 must be above 0", 0)
    'line 4 (sequence): '
    """
    outside: dict[str, int] = {}
    cases: list[tuple[int, dict[str, int]]] = []
    keys = outside
    plain = _STRING.sub(lambda found: "\n" * found[0].count("\n"), text)
    for number, line in enumerate(plain.split("\n"), 1):
        if line.lstrip().startswith("[["):
            cases.append((number, keys := {}))
        elif match := _KEY.match(line):
            keys.setdefault(match[2], number)
            keys = {} if match[1] else keys  # those of a table inside a case
    table, keys = (None, outside) if case is None else (*cases, (outside.get("case"), {}))[min(case, len(cases))]
    if (key := _named_first(sentence, keys)) is not None:
        return f"line {keys[key]} ({key}): "
    return "" if table is None else f"line {table}: "


def _named_first(sentence: str, keys: Mapping[str, int]) -> str | None:
    """The key that comes first in a sentence; the name of a case in front of the sentence does not count."""
    message = re.sub(r"^(a case of kind|case) [^:]*: ", "", sentence)
    at = {
        key: match.start() for key in keys if (match := re.search(rf"(?<![A-Za-z0-9-]){re.escape(key)}(?!\w)", message))
    }
    return min(at, key=lambda key: at[key], default=None)
