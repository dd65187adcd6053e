"""Harvested attention calls as a suite file: a case per problem, its call sites, and what no case can express."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from typing import Any

from attnsuite.backends import AttentionSpec
from attnsuite.backends.operands import OPERANDS

from .kinds.op_case import OpCase, nearest_case, plain_spec, spec_of
from .traced_calls import Call, Harvest, Mark

# Fields of a spec that no case has, or that have to be set by hand; in a sentence.
NOT_IN_A_CASE = {
    "has_mask": "a mask array (if it is the causal mask, set causal = true)",
    **{f"has_{operand.name}": operand.title for operand in OPERANDS},
    "has_segment_ids": "segment ids (set documents to the number of documents in a sequence)",
    "has_positions": "explicit positions",
    "has_seq_lengths": "lengths of the keys (the case attends to all {keys})",
    "values_in_keys": "values that are a part of the keys",
    "local_window_size": "a window of {value} keys to the left and to the right",
    "return_log_sum_exp": "the log-sum-exp beside the output",
}
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")  # no comment may hold these
_ALWAYS = ("kind", "sequence", "heads", "kv_heads", "head_dim", "dtype")  # written even where they are the defaults


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """The calls of one problem: its case, how often each call site makes it in a step, and sentences.

    The sentences name what the calls use and the case lacks. Without a case (None) they say why there is none.
    """

    case: OpCase | None
    call_sites: dict[str, int]
    sentences: tuple[str, ...]

    @property
    def count(self) -> int:
        """Calls in one step."""
        return sum(self.call_sites.values())


def problems_of(found: Harvest) -> tuple[Problem, ...]:
    """The calls of a harvest by problem, in the order in which each was first made; problems without a case last."""
    groups: dict[Any, tuple[OpCase | None, Counter[str], dict[str, None]]] = {}
    for mark, times in sorted(found.found().items(), key=lambda item: item[0].index):
        call = found.calls[mark.index]
        case, sentences = _case(call, mark)
        sentences = (*sentences, *(found.unsure.get(mark, ()) if case else ()))
        _, call_sites, missing = groups.setdefault(case or sentences, (case, Counter(), {}))
        call_sites[f"{call.place} ({call.function})"] += times
        missing |= dict.fromkeys(sentences)
    rows = [Problem(case, dict(call_sites), tuple(missing)) for case, call_sites, missing in groups.values()]
    return tuple(sorted(rows, key=lambda row: row.case is None))


def to_toml(rows: tuple[Problem, ...], origin: str) -> str:
    """A suite file with a case for each row that has one; the other rows are comments.

    >>> row = Problem(OpCase(kind="op_forward", sequence=512), {"train.py:7 (attnsuite)": 12}, ())
    >>> print(to_toml((row,), "train.py:fn"))
    # The attention calls of train.py:fn: 12 calls, 1 problem.
    <BLANKLINE>
    # 12 calls: train.py:7 (attnsuite)
    [[case]]
    kind = "op_forward"
    sequence = 512
    heads = 8
    kv_heads = 8
    head_dim = 64
    dtype = "float32"
    <BLANKLINE>
    """
    total = sum(row.count for row in rows)
    lines = [f"The attention calls of {origin}: {_number(total, 'call')}, {_number(len(rows), 'problem')}."]
    parts = [_comments(lines)]
    for row in rows:
        where = [f"{place} x {n}" if len(row.call_sites) > 1 else place for place, n in row.call_sites.items()]
        head = [f"{_number(row.count, 'call')}: {', '.join(where)}"]
        if row.case is None:
            parts.append(_comments([*head, *(f"left out: {sentence}" for sentence in row.sentences)]))
        else:
            missing = [f"not said here: {sentence}" for sentence in row.sentences]
            parts.append(_comments([*head, *missing]) + _table(row.case))
    return "\n".join(parts)


def _case(call: Call, mark: Mark) -> tuple[OpCase | None, tuple[str, ...]]:
    """The case nearest to a call and what it does not say, or None and the reasons."""
    if call.spec is None:
        return None, call.unsaid
    spec = plain_spec(dataclasses.replace(call.spec, batch=call.spec.batch * mark.batch))
    decode = spec.query_length == 1 < spec.key_value_length
    if spec.query_length != spec.key_value_length and not decode:
        numbers = f"{spec.query_length} queries and {spec.key_value_length} keys"
        return None, (f"{numbers}: a case has as many queries as keys, or one query.",)
    if decode and spec.is_causal and not spec.has_positions:
        return None, ("one query that is causal without a position: it sees the first key alone.",)
    try:
        case = nearest_case(spec, decode=decode, needs_grad=mark.differentiated)
        missing = spec_of(case)
    except ValueError as error:
        return None, (str(error),)
    sentences = [
        _sentence(field.name, getattr(spec, field.name), spec)
        for field in dataclasses.fields(AttentionSpec)
        if field.name != "needs_grad" and getattr(spec, field.name) != getattr(missing, field.name)
    ]
    if decode and mark.differentiated:
        sentences.append("gradients of one query")
    return case, (*sentences, *call.unsaid)


def _sentence(name: str, value: Any, spec: AttentionSpec) -> str:
    return NOT_IN_A_CASE.get(name, f"{name} = {{value}}").format(value=value, keys=spec.key_value_length)


def _table(case: OpCase) -> str:
    lines = ["[[case]]"]
    for field in dataclasses.fields(case):
        value = getattr(case, field.name)
        if field.name != "name" and (field.name in _ALWAYS or value != field.default):
            lines.append(f"{field.name} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def _comments(lines: list[str]) -> str:
    return "".join(f"# {_CONTROL.sub('?', line)}\n" for line in lines)


def _number(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
