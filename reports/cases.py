"""Words for a case: its kind and its problem as one readable line, in a stable order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

from attnsuite.suite import kinds
from attnsuite.suite.record import Record

_IN_TITLE = frozenset(
    {"kind", "name", "model", "batch", "sequence", "heads", "kv_heads", "head_dim", "value_head_dim", "dtype"}
)
_DEFAULTS = {"documents": 1, "kv_layout": "NHD", "seed": 0}  # values that change nothing and are left out


def describe(kind: str, problem: Mapping[str, Any]) -> str:
    """The problem of a case of this kind on one line; options that are off are left out.

    >>> describe("op_forward", {"batch": 1, "sequence": 512, "heads": 8, "kv_heads": 2, "head_dim": 64,
    ...                         "dtype": "float32", "causal": True, "window": None})
    'B 1, T 512, S 512, heads 8/2, D 64, float32, causal'
    >>> describe("perplexity", {"model": "text", "sequence": 512, "sequences": 16, "dtype": "float32"})
    'model text, S 512, float32, sequences 16'
    """
    phase, sequence, heads = kinds.phase_of(kind), problem.get("sequence"), problem.get("heads")
    head_dim, value_head_dim = problem.get("head_dim"), problem.get("value_head_dim")
    query = 1 if phase == "token" else sequence
    parts = {
        f"model {PurePath(str(problem.get('model'))).name}": problem.get("model"),
        f"B {problem.get('batch')}": problem.get("batch"),
        f"T {query}": sequence and phase in ("forward", "forward and backward", "token"),
        f"S {sequence}": sequence,
        f"heads {heads}/{problem.get('kv_heads', heads)}": heads,
        f"D {head_dim}": head_dim,
        f"Dv {value_head_dim}": value_head_dim is not None and value_head_dim != head_dim,
        f"{problem.get('dtype')}": problem.get("dtype"),
    }
    phrases = [text for text, wanted in parts.items() if wanted]
    in_title = _IN_TITLE if phase == "decode" else _IN_TITLE | {"new_tokens"}  # which other phases do not use
    others = {name: value for name, value in problem.items() if name not in in_title and _DEFAULTS.get(name) != value}
    return ", ".join(phrases + [_word(name, value) for name, value in others.items() if _is_on(value)])


def _is_on(value: object) -> bool:
    return value is not None and value is not False and value not in ("", [], {})


def _word(name: str, value: object) -> str:
    phrases = name.replace("_", " ")
    return phrases if value is True else f"{phrases} {value}"


def titles(among: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The kinds that are among these, each with its title, in the order of the tables."""
    found = frozenset(among)
    return ((kind, kinds.title_of(kind)) for kind in kinds.names() if kind in found)


def title(record: Record) -> str:
    """Kind and problem of a record; the case's name if the problem has no words."""
    return f"{kinds.title_of(record.kind)}, {describe(record.kind, record.problem) or record.case}"


def order(record: Record) -> tuple[Any, ...]:
    """A sort key: kinds in the order of the tables, then problems with their numbers compared as numbers."""
    return (
        kinds.names().index(record.kind),
        natural(describe(record.kind, record.problem)),
        record.case,
        record.target,
    )


def natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key under which ``T 512`` comes before ``T 4096``."""
    parts = re.split(r"([0-9]+)", text)
    numbers = [part.lstrip("0") if part.isdecimal() else None for part in parts]
    return tuple(
        (1, 0, part) if number is None else (0, len(number), number)  # of any length, where int() has a limit
        for part, number in zip(parts, numbers, strict=True)
        if part
    )
