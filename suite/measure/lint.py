"""What the text of a compiled program shows: its products, arrays of the size of the scores, copies of keys or values.

The text is the optimised HLO of ``jax.stages.Compiled.as_text``. A kernel (custom call) is opaque there: it is counted
by its name, and nothing is said of what it does inside. Arrays inside a fusion are not counted, because they are never
whole in memory. The text does not say which arrays share memory: the compiler's own sizes do (``memory.py``).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from attnsuite.backends import AttentionSpec

from ..record import Operations, ProgramText

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")  # a tuple of arrays, or one array
_ARRAY = re.compile(r"\b(\w+)\[([\d,]*)\](\{[^}]*\})?")
_CORE = re.compile(r"S\(\d+\)")  # in a layout: a memory of the core, not the device's
_NAMES = re.compile(r"%([\w.\-]+)")
_INSIDE = re.compile(r"(?:calls|to_apply|condition)=%?([\w.\-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_ARGUMENT = re.compile(r'op_name="(?:\w+\[)?(keys?|values?)\b')
_PRODUCTS = ("dot", "convolution")  # the compilers of TPUs write a product as a convolution
_NO_KERNEL = ("AllocateBuffer",)  # memory that TPUs' compiler sets aside
# Name arrays that are made elsewhere.
_NO_ARRAY = (
    *("parameter", "bitcast", "get-tuple-element", "tuple", "constant", "while", "conditional", "call"),
    *("optimization-barrier", "copy-done", "all-reduce-done"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Instruction:
    """``arrays`` are the dtypes and the numbers of elements of its results in the device's memory."""

    name: str
    dtype: str
    arrays: tuple[tuple[str, int], ...]
    opcode: str
    operands: tuple[str, ...]
    line: str


def read(text: str, spec: AttentionSpec) -> ProgramText:
    """What the text of a program that computes attention ``spec`` shows.

    Arrays of the size of the scores are not counted (None) for one query, and where the text cannot tell them from
    other arrays, because query, keys or values have as many elements. Copies are not counted where no argument has the
    name of keys or values.
    """
    computations, entry = _parse(text)
    every = [one for members in computations.values() for one in members.values()]
    inside = {name for one in every for name in _INSIDE.findall(one.line)}
    whole = [one for name, members in computations.items() if name not in inside for one in members.values()]
    return ProgramText(
        products=dict(sorted(Counter(_products(computations)).items())),
        score_arrays=_score_arrays(whole, spec),
        copies=_copies(computations, computations[entry], spec) if entry else None,
    )


def operations(compiled: Any) -> Operations:
    """The operations of a ``jax.stages.Compiled``, those inside of fusions left out."""
    computations, _ = _parse(compiled.as_text() or "")
    every = [one for members in computations.values() for one in members.values()]
    fused = {name for one in every if one.opcode == "fusion" for name in _INSIDE.findall(one.line)}
    counted = Counter(
        one.opcode for name, members in computations.items() if name not in fused for one in members.values()
    )
    cost = compiled.cost_analysis() or {}
    cost = cost[0] if isinstance(cost, list) else cost
    return Operations(
        fusions=counted["fusion"],
        conditionals=counted["conditional"],
        copies=counted["copy"] + counted["copy-start"] + counted["transpose"],
        bytes_accessed=cost.get("bytes accessed"),
    )


def _parse(text: str) -> tuple[dict[str, dict[str, _Instruction]], str]:
    """The instructions by computation and name, and the name of the entry computation."""
    computations: dict[str, dict[str, _Instruction]] = {}
    entry, current = "", {}
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = computations.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
        elif found := _LINE.match(line):
            name, made, opcode, rest = found.groups()
            listed = _ARRAY.findall(made)[:1] if opcode == "copy-start" else _ARRAY.findall(made)  # then its source
            sizes = ((dtype, shape.split(",") if shape else []) for dtype, shape, at in listed if not _CORE.search(at))
            arrays = tuple((dtype, math.prod(map(int, shape))) for dtype, shape in sizes)
            operands = tuple(_NAMES.findall(rest.partition("), ")[0]))
            current[name] = _Instruction(name, made.lstrip("(").partition("[")[0], arrays, opcode, operands, line)
    return computations, entry


def _products(computations: Mapping[str, Mapping[str, _Instruction]]) -> Iterator[str]:
    """``f32 x f32 -> f32`` for each product: its operands, and what it accumulates into; a kernel by its name."""
    for members in computations.values():
        for one in members.values():
            if one.opcode in _PRODUCTS:
                dtypes = [members[name].dtype for name in one.operands if name in members]
                yield f"{' x '.join(dtypes)} -> {one.dtype}"
            elif (target := _TARGET.search(one.line)) and target[1] not in _NO_KERNEL:
                yield f"kernel {target[1]}"


def _score_arrays(whole: list[_Instruction], spec: AttentionSpec) -> int | None:
    scores = spec.batch * spec.num_heads * spec.query_length * spec.key_value_length
    keys = spec.batch * spec.key_value_length * spec.num_kv_heads
    queries = spec.batch * spec.query_length * spec.num_heads
    dims = (spec.head_dim, spec.value_head_dim or spec.head_dim)
    repeated = keys * (spec.num_heads // spec.num_kv_heads)
    if spec.query_length == 1 or scores in {count * dim for count in (keys, queries, repeated) for dim in dims}:
        return None
    made = [elements for one in whole if one.opcode not in _NO_ARRAY for _, elements in one.arrays]
    return made.count(scores)


def _copies(
    computations: Mapping[str, Mapping[str, _Instruction]], entry: Mapping[str, _Instruction], spec: AttentionSpec
) -> int | None:
    """Arrays as large as keys or values, or as their repetition to every query head, made from them without a product.

    Counted in the entry computation, outside of loops and branches.
    """
    derived = {one.name for one in entry.values() if one.opcode == "parameter" and _ARGUMENT.search(one.line)}
    if not derived:
        return None
    sizes = {elements for name in derived for _, elements in entry[name].arrays}
    sizes |= {size * (spec.num_heads // spec.num_kv_heads) for size in sizes}
    made = 0
    for one in entry.values():  # in the order of the program
        if one.opcode in ("parameter", *_PRODUCTS, "custom-call") or not derived.intersection(one.operands):
            continue
        body = [each for name in _INSIDE.findall(one.line) for each in computations.get(name, {}).values()]
        is_product = any(each.opcode in (*_PRODUCTS, "custom-call") for each in body)
        copied = sum(elements in sizes and dtype != "pred" for dtype, elements in one.arrays)
        if copied and not is_product and one.opcode not in ("tuple", "while", "conditional"):
            derived.add(one.name)
            made += 0 if one.opcode in _NO_ARRAY else copied
    return made
