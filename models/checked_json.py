"""Read the JSON of a checkpoint and check its types; and the error that reading a checkpoint raises.

A ``msgspec.Struct`` with a field per key describes a file. msgspec refuses invalid JSON (NaN, numbers that overflow,
integers of thousands of digits) and values of another type, and names the place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from attnsuite.sentences import not_accepted, quoted

T = TypeVar("T")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used. The message is a sentence: the value found, and the values accepted."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError if there is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{not_accepted(error, repr(str(path)))}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{str(path)!r} is not valid JSON: {error}.") from error
    except RecursionError as error:
        raise CheckpointError(f"{str(path)!r} is nested too deeply to be read; a checkpoint's JSON is flat.") from error
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(
            f"{str(path)!r} cannot be read ({reason}); a checkpoint is a directory with config.json and "
            "model.safetensors, or Meta's params.json and consolidated.*.pth."
        ) from error


def checked(content: Any, kind: type[T], file: str) -> T:
    """``content`` (of ``file``) as ``kind``. Raises CheckpointError with the key, its value and what it accepts.

    >>> class Sizes(msgspec.Struct):
    ...     dim: int
    >>> checked({"dim": 1e18}, Sizes, "params.json")
    Traceback (most recent call last):
        ...
    attnsuite.models.checked_json.CheckpointError: dim in params.json is not accepted: expected `int`, got `float`.
    """
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{not_accepted(error, file)}.") from error


def require_keys(content: Mapping[str, Any], kind: type[msgspec.Struct], file: str, whose: str) -> None:
    """Raise CheckpointError for the keys that ``kind`` has no default for and ``content`` lacks."""
    missing = [field.name for field in msgspec.structs.fields(kind) if field.required and field.name not in content]
    if missing:
        raise CheckpointError(f"{file} lacks {', '.join(missing)}; {whose} it.")


def refuse_unknown(content: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raise CheckpointError for the keys that are not known."""
    unknown = sorted(set(content) - set(known))
    if unknown:
        found = ", ".join(f"{quoted(key)} ({quoted(content[key])})" for key in unknown[:4])
        raise CheckpointError(
            f"{where} has {found}{', ...' if unknown[4:] else ''}, which is not known here and may change what is "
            "computed; take out what changes nothing, or use a model without it."
        )


def refuse_other_values(content: Mapping[str, Any], only: Mapping[str, tuple[Any, ...]], where: str) -> None:
    """Raise CheckpointError for a key of ``only`` with another value than those."""
    for key, values in only.items():
        if key in content and not any(_same(content[key], value) for value in values):
            accepted = " or ".join("an empty list" if value == [] else quoted(value) for value in values) or "nothing"
            raise CheckpointError(f"{key}={quoted(content[key])} in {where} is not supported; only {accepted} is.")


def _same(value: Any, other: Any) -> bool:
    """Equal, and both booleans or neither: 0 is not False, 1.0 is not True."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def is_file(path: Path) -> bool:
    """Whether ``path`` is a file; False also for a path that no file can have, such as one that is too long."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
