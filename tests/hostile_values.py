"""Values that users, disks and other programs may leave in a file, and files that hold them: JSON, TOML, bytes."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st


@dataclasses.dataclass(frozen=True)
class Raw:
    """Text that stands in JSON or TOML as it is."""

    text: str


INTEGERS = st.sampled_from([0, -1, 1, 2, 3, 7, 64, 2**31, 2**53 + 1, 2**63, 2**64, 10**18, 10**400])
FLOATS = st.sampled_from([0.0, -0.5, 0.5, 1.5, 1e-320, 1e30, -1e99, 1e99, 1e101, 1e308])
WORDS = st.sampled_from([
    "", " ", "x" * 300, "\u0000", "a\nb", "\ud800", "caf\u00e9", "a|b", "`", "<script>", "../..", "standard", "native",
    "cpu", "kascade", "float32", "op_forward", "perplexity",
]) | st.text(max_size=8)  # fmt: skip
RAW = st.sampled_from([
    "1e400", "-1e400", "NaN", "nan", "inf", "9" * 5000, "0x" + "f" * 5000, "[" * 2000 + "]" * 2000,
    "[" * 200 + "]" * 200, "2026-01-01", '"\\ud800"', "{}x",
]).map(Raw)  # fmt: skip
SCALARS = st.none() | st.booleans() | INTEGERS | FLOATS | WORDS
VALUES = (
    SCALARS
    | RAW
    | st.lists(SCALARS, max_size=3)
    | st.dictionaries(WORDS, SCALARS, max_size=2)
    | st.dictionaries(WORDS, st.lists(SCALARS, max_size=2), max_size=2)
)


@st.composite
def changed(draw: st.DrawFn, data: Any) -> Any:
    """``data`` (tables, lists, scalars) with one to three changes; half of them keep the type."""
    data = copy.deepcopy(data)
    for _ in range(draw(st.integers(1, 3))):
        place, key = _place(draw, data)
        if place is None:
            return draw(VALUES)
        action = draw(st.sampled_from(["like", "like", "like", "replace", "move", "delete", "add"]))
        if action == "like":
            place[key] = draw(_like(place[key]))
        elif action == "replace":
            place[key] = draw(VALUES)
        elif action == "move":
            source, name = _place(draw, data)
            place[key] = copy.deepcopy(source[name])
        elif action == "add" and isinstance(place, dict):
            place[draw(WORDS)] = draw(VALUES)
        else:
            del place[key]
    return data


def _place(draw: st.DrawFn, data: Any) -> tuple[Any, Any]:
    """A table or list somewhere in ``data``, and a key in it; None and None in a scalar."""
    place, key = None, None
    while isinstance(data, dict | list) and data:
        place = data
        key = draw(st.sampled_from(list(data) if isinstance(data, dict) else range(len(data))))
        data = data[key]
        if draw(st.integers(0, 3)) == 0:
            break
    return place, key


def _like(value: Any) -> st.SearchStrategy[Any]:
    """Other values of the same type, and what is nearly the type."""
    if isinstance(value, bool):
        return st.sampled_from([not value, int(value)])
    if isinstance(value, int):
        return INTEGERS | st.sampled_from([str(value), -value, float(value) if abs(value) < 2**60 else 0.5])
    if isinstance(value, float):
        return FLOATS | st.sampled_from([str(value), -value, 0])
    if isinstance(value, list):
        return st.sampled_from([[], value[1:], value * 2, [value], value[:1] * 5, {"0": value}])
    if isinstance(value, dict):
        return st.sampled_from([{}, dict(list(value.items())[1:]), dict.fromkeys(value), [value]])
    return WORDS | st.sampled_from([[value], None])


def as_json(data: Any) -> str:
    """JSON in which :class:`Raw` stands as it is, and lone surrogates are escaped."""
    if isinstance(data, Raw):
        return data.text
    if isinstance(data, dict):
        return "{" + ",".join(f"{json.dumps(str(key))}:{as_json(value)}" for key, value in data.items()) + "}"
    if isinstance(data, list | tuple):
        return "[" + ",".join(map(as_json, data)) + "]"
    return json.dumps(data)


def as_toml(data: Mapping[str, Any]) -> str:
    """TOML of a suite file: top-level keys, then a [[case]] table per case where they are tables."""
    if not isinstance(data, dict):
        return _toml(data)
    tables = data.get("case")
    split = isinstance(tables, list) and all(isinstance(table, dict) for table in tables)
    top = {key: value for key, value in data.items() if not (split and key == "case")}
    lines = [f"{_toml(str(key))} = {_toml(value)}" for key, value in top.items()]
    for table in tables if split else ():
        lines += ["[[case]]", *(f"{_toml(str(key))} = {_toml(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(str(key))} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return '""' if value is None else as_json(value)


@st.composite
def damaged(draw: st.DrawFn, text: str) -> bytes:
    """The text as a file; one in eight is cut, or has bytes changed, put in or said twice."""
    data = text.encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 7)) or not data:
        return data
    at = draw(st.integers(0, len(data) - 1))
    put = draw(st.sampled_from([b"", b"\x00", b"\xff", b"\n", b'"', b"}", b"[" * 3000, b"\xed\xa0\x80", b"9" * 6000]))
    ways = {
        "cut": data[:at],
        "put": data[:at] + put + data[at:],
        "over": data[:at] + put + data[at + 1 :],
        "twice": data + data,
    }
    return ways[draw(st.sampled_from(sorted(ways)))]
