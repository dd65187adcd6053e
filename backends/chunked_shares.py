"""The passes of ``chunked`` on a mesh with automatic axes: each device computes its share (``partitioned.py``).

The tables of a layout are operands of such a program. What is known of them when it is traced stays known: a kind of
block that no row has costs no loop in a share either.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from . import chunked_passes as passes
from .blocks import BlockTable, PaddedLayout
from .chunked_tiles import Program
from .operands import Terms
from .partitioned import by_shares
from .spec import AttentionSpec

_Tables = tuple[PaddedLayout, tuple[BlockTable, ...]]

_LETTERS = {
    "query": "btnh",
    "key": "bskh",
    "value": "bskv",
    "bias": "bnts",
    **dict.fromkeys(("alibi", "sinks"), "n"),
    **dict.fromkeys(("out", "d_out"), "btnv"),
    **dict.fromkeys(("top", "rest", "d_lse"), "btn"),
}


def forward(
    program: Program, query: Array, keys_values: tuple[Array, Array | None], terms: Terms, tables: _Tables
) -> tuple[Array, Array, Array]:
    """As :func:`attnsuite.backends.chunked_passes.forward`, of a contiguous cache."""
    arrays = {"query": query, "key": keys_values[0], "value": keys_values[1], **terms.given()}

    def compute(program: Program, x: Mapping[str, Any], tables: _Tables) -> tuple[Array, Array, Array]:
        learned = Terms(**{name: x[name] for name in terms.given()})
        return passes.forward(program, x["query"], (x["key"], x.get("value")), learned, *tables)

    return _by_shares(program, compute, arrays, tables, ("btnv", "btn", "btn"))


def backward(
    program: Program,
    operands: tuple[Array, Array, Array | None],
    seen: tuple[Array, Array, Array],
    cotangents: tuple[Array, Array | None],
    terms: Terms,
    tables: _Tables,
    requested: Collection[str],
) -> tuple[Array, Array, Array | None, Terms]:
    """As :func:`attnsuite.backends.chunked_passes.backward`."""
    if not {"bias", "alibi"}.isdisjoint(requested):  # all sequences add to one gradient
        return passes.backward(program, operands, seen, cotangents, terms, *tables, requested)
    names = ("query", "key", "value", "out", "top", "rest", "d_out", "d_lse")
    arrays = {**dict(zip(names, (*operands, *seen, *cotangents), strict=True)), **terms.given()}

    def compute(program: Program, x: Mapping[str, Any], tables: _Tables) -> tuple[Array, ...]:
        shares: list[Any] = [x.get(name) for name in names]
        query, key, value, out, top, rest, d_out, d_lse = shares
        known = Terms(**{name: x[name] for name in terms.given()})
        found = passes.backward(program, (query, key, value), (out, top, rest), (d_out, d_lse), known, *tables, ())
        return tuple(x for x in found[:3] if x is not None)

    results = ("btnh", "bskh", *(["bskv"] if operands[2] is not None else []))
    d_query, d_key, *d_value = _by_shares(program, compute, arrays, tables, results)
    return d_query, d_key, (*d_value, None)[0], Terms()


def _by_shares(
    program: Program,
    compute: Callable[[Program, Mapping[str, Any], _Tables], tuple[Array, ...]],
    arrays: Mapping[str, Any],
    tables: _Tables,
    results: Sequence[str],
) -> Any:
    arrays, spec = {name: x for name, x in arrays.items() if x is not None}, program.spec
    flat, tree = jax.tree_util.tree_flatten_with_path(tables)
    empty = [path[-1].name in ("partial", "full") and passes.never(x) for path, x in flat]

    def of_share(share_spec: AttentionSpec, *operands: Any) -> tuple[Array, ...]:
        heads = math.gcd(program.sizes.heads_per_tile, share_spec.num_kv_heads)
        sizes = program.sizes if share_spec == spec else dataclasses.replace(program.sizes, heads_per_tile=heads)
        leaves = [
            np.zeros(x.shape, np.int32) if no else x for x, no in zip(operands[len(arrays) :], empty, strict=True)
        ]
        share = dataclasses.replace(program, spec=share_spec, sizes=sizes)
        return compute(share, dict(zip(arrays, operands, strict=False)), tree.unflatten(leaves))

    operands = *arrays.values(), *(x for _, x in flat)
    functions = spec.mask_function, spec.score_function  # they may hold arrays, which a share's program cannot
    if functions != (None, None) or not program.on_cpu:
        return of_share(spec, *operands)
    dims = [*(_LETTERS[name] for name in arrays), *(_of_table(path[-1].name, x) for path, x in flat)]
    return by_shares(of_share, spec, operands, dims, results)


def _of_table(name: str, x: Any) -> str:
    """The letters of an array that says which blocks are seen; its lengths are padded to whole blocks."""
    return "bn.." if name == "mask" else "b" + "." * (x.ndim - 1)
