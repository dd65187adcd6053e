"""Data from outside (JSON, TOML) as typed data, or a sentence that says what is wrong with it.

msgspec checks types, and bounds in annotations. This module adds two checks for dataclasses and TypedDicts: unknown
keys are refused, and an error sentence says which value was found and which are accepted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

import msgspec
from msgspec import Meta

from attnsuite.sentences import quoted as quoted

# Control characters but for tab and newline, and those that turn the direction of what follows; then how JSON has them.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_MAY_CONTROL = re.compile(rb"\\[bfru]|\x7f|\xc2[\x80-\x9f]|\xe2\x80[\x8e\x8f\xaa-\xae]|\xe2\x81[\xa6-\xa9]")

T = TypeVar("T")

# The bounds keep results computed from a number, and arrays allocated for it, finite.
Whole = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Real = Annotated[float, Meta(ge=-1e100, le=1e100)]
Scalar = None | bool | Whole | Real | str

_TYPE_NAMES = {str: "text", bool: "true or false", type(None): "nothing", int: "an integer", float: "a number"}


def convert(data: Any, type_: Any, decode: Callable[[type, Any], Any] | None = None) -> Any:
    """``data`` as a ``type_``. Raises ValueError with one sentence less its full stop, and the errors of ``type_``.

    ``decode(type, data)`` makes the values of types that JSON has no form for.

    >>> convert({"cores": "two"}, dict[str, Count])
    Traceback (most recent call last):
    ValueError: cores = 'two' must be an integer from 1 to 2147483647
    """
    try:
        for sentence in _unknown(data, type_):
            raise ValueError(sentence)
        return msgspec.convert(data, type_, strict=True, dec_hook=decode)
    except msgspec.ValidationError as error:
        if error.__cause__ is not None:  # raised by the check of a dataclass
            raise error.__cause__ from None
        raise ValueError(_sentence(data, [type_])) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def parse_json(text: bytes) -> Any:
    """The data in JSON text. Raises ValueError as :func:`convert`, also for NaN and for numbers beyond a float.

    Characters that control a terminal are spelled (:func:`printable`), since the data may be anybody's.
    """
    try:
        data = msgspec.json.decode(_whole_characters(text))
        return _all_printable(data) if _MAY_CONTROL.search(text) else data
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:  # of msgspec, and UnicodeDecodeError
        raise ValueError(f"it is not JSON: {error}") from error


def printable(text: str) -> str:
    r"""The text as a terminal may get it: control characters, and those that turn its direction, are spelled.

    >>> printable("\x1b[2J gone")
    '\\x1b[2J gone'
    """
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def _all_printable(data: Any) -> Any:
    if isinstance(data, str):
        return printable(data)
    if isinstance(data, dict):
        return {printable(name): _all_printable(value) for name, value in data.items()}
    return [_all_printable(value) for value in data] if isinstance(data, list) else data


def to_json(data: Any) -> str:
    """One line of standard JSON. Raises ValueError for NaN and infinity.

    A lone surrogate (half a character, for example from a file name that is not UTF-8) becomes a question mark.
    """
    line = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return line.encode("utf-8", "replace").decode("utf-8")


def read_json(path: Path) -> Any:
    """The data in a JSON file. Raises ValueError as :func:`parse_json`, also for a file that cannot be read."""
    try:
        return parse_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"it cannot be read ({error.strerror})") from error


def check_fields(made: Any) -> None:
    """For ``__post_init__`` of a frozen dataclass: check the types of its fields. Raises ValueError as :func:`convert`.

    An integer for a float field becomes a float.
    """
    table = _table(type(made))
    for name, value in convert({name: getattr(made, name) for name in _hints(table)}, table).items():
        object.__setattr__(made, name, value)


@functools.cache
def _table(cls: type) -> Any:
    return typing.TypedDict(cls.__name__, _hints(cls))  # pyright: ignore[reportArgumentType] (known when it runs)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


@functools.cache
def _has_fields(type_: Any) -> bool:
    return dataclasses.is_dataclass(type_) or is_typeddict(type_)


@functools.cache
def _holds_fields(type_: Any) -> bool:
    return _has_fields(type_) or any(map(_holds_fields, get_args(type_)))


def _whole_characters(text: bytes) -> bytes:
    r"""JSON may hold ``\ud800`` alone, which is no text, and records of earlier versions do."""
    if not re.search(rb"\\u[dD][89a-fA-F]", text):
        return text
    return json.dumps(json.loads(text), ensure_ascii=False).encode("utf-8", "replace")


def _unknown(data: Any, type_: Any) -> Iterator[str]:
    """A sentence for every table that has a key unknown to its dataclass."""
    if not _holds_fields(type_):  # samples of a record, say
        return
    if get_origin(type_) in (Union, types.UnionType):
        for each in get_args(type_):
            yield from _unknown(data, each)
        return
    if isinstance(data, Mapping):
        hints = _hints(type_) if _has_fields(type_) else None
        if hints is not None and (unknown := [key for key in data if key not in hints]):
            yield f"it has no key {', '.join(map(quoted, unknown[:3]))}; its keys are {', '.join(hints)}"
    for name, value in _items(data):
        for inner in _inner(type_, name):
            yield from _unknown(value, inner)


def _items(data: Any) -> list[tuple[Any, Any]]:
    if isinstance(data, Mapping):
        return list(data.items())
    return list(enumerate(data)) if isinstance(data, list | tuple) else []


def _inner(type_: Any, name: Any) -> list[Any]:
    """The types accepted under ``name`` in a table or list ``type_``."""
    if get_origin(type_) in (Union, types.UnionType):
        return [inner for each in get_args(type_) for inner in _inner(each, name)]
    if _has_fields(type_):
        return [_hints(type_)[name]] if name in _hints(type_) else []
    if isinstance(name, str) == (get_origin(type_) is dict) and get_origin(type_) in (dict, list, tuple):
        return [get_args(type_)[-1 if isinstance(name, str) else 0]]
    return []


def _sentence(data: Any, types_: list[Any], place: str = "") -> str:
    """What is wrong with data that fits none of the types, at the innermost place."""
    for name, value in _items(data):
        inner = [each for type_ in types_ for each in _inner(type_, name)]
        if inner and not _fits(value, inner):
            return _sentence(value, inner, f"{place}.{name}" if place else str(name))
    for type_ in filter(_has_fields, types_):
        if isinstance(data, Mapping) and (missing := [name for name in _required(type_) if name not in data]):
            return f"{place or 'it'} lacks the key {missing[0]}"
    subject = f"{place} = {quoted(data)}" if place else f"it ({quoted(data)})"
    return f"{subject} must be {' or '.join(accepted(each) for each in types_)}"


def _required(type_: Any) -> list[str]:
    if is_typeddict(type_):
        return [name for name in _hints(type_) if name in type_.__required_keys__]
    return [field.name for field in dataclasses.fields(type_) if field.default is field.default_factory]  # both MISSING


def _fits(value: Any, types_: list[Any]) -> bool:
    for type_ in types_:
        with contextlib.suppress(ValueError):
            msgspec.convert(value, type_, strict=True)
            return True
    return False


def accepted(type_: Any) -> str:
    """The values of a type, for a sentence or a page."""
    if get_origin(type_) in (Union, types.UnionType):
        *others, last = (accepted(each) for each in get_args(type_))
        return f"{', '.join(others)} or {last}"
    if get_origin(type_) is Literal:
        return f"one of {', '.join(map(str, get_args(type_)))}"
    if get_origin(type_) is Annotated:
        return accepted(get_args(type_)[0]) + _bounds(type_.__metadata__[0])
    if get_origin(type_) in (list, tuple):
        return "a list"
    return _TYPE_NAMES.get(type_, "a table")


def _bounds(meta: Meta) -> str:
    if meta.gt is not None:
        return f" above {meta.gt:g} and at most {meta.le:g}"
    if meta.ge < 0:  # pyright: ignore[reportOptionalOperand]  (every bounded type here has both ends)
        return f" up to {meta.le:.3g}"
    return f" from {meta.ge} to {meta.le}"
