"""The passes of ``chunked`` on a mesh with automatic axes: each device computes its share (``partitioned.py``).

The tables of a layout are operands of such a program. What is known of them when it is traced stays known: a kind of
block that no row has costs no loop in a share either.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
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

# The dimensions of the operands, as ``partitioned.py`` writes them.
_OPERANDS, _SEEN = ("btnh", "bskh", "bskv"), ("btnv", "btn", "btn")
_TERMS = Terms(**dict[str, Any](bias="bnts", alibi="n", sinks="n"))


def forward(
    program: Program, query: Array, keys_values: tuple[Array, Array | None], terms: Terms, tables: _Tables
) -> tuple[Array, Array, Array]:
    """As :func:`attnsuite.backends.chunked_passes.forward`, of a contiguous cache."""
    letters = _OPERANDS[0], _OPERANDS[1:], _TERMS
    return _by_shares(program, passes.forward, (query, keys_values, terms), letters, tables, _SEEN)


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

    def compute(*of_share: Any) -> tuple[Array, ...]:
        found = passes.backward(*of_share, requested=())
        return tuple(x for x in found[:3] if x is not None)

    arrays, letters = (operands, seen, cotangents, terms), (_OPERANDS, _SEEN, _SEEN[:2], _TERMS)
    results = _OPERANDS if operands[2] is not None else _OPERANDS[:2]
    d_query, d_key, *d_value = _by_shares(program, compute, arrays, letters, tables, results)
    return d_query, d_key, (*d_value, None)[0], Terms()


def _by_shares(
    program: Program, compute: Callable[..., Any], arrays: Any, letters: Any, tables: _Tables, results: Sequence[str]
) -> Any:
    """``compute(program, *arrays, *tables)`` of each share. ``letters`` is a tree like ``arrays``, without its None."""
    spec, (leaves, of_arrays) = program.spec, jax.tree.flatten(arrays)
    of_tables, tree = jax.tree_util.tree_flatten_with_path(tables)
    empty = [path[-1].name in ("partial", "full") and passes.never(x) for path, x in of_tables]

    def of_share(share_spec: AttentionSpec, *operands: Any) -> Any:
        heads = math.gcd(program.sizes.heads_per_tile, share_spec.num_kv_heads)
        sizes = program.sizes if share_spec == spec else dataclasses.replace(program.sizes, heads_per_tile=heads)
        known = [np.zeros(x.shape, np.int32) if no else x for x, no in zip(operands[len(leaves) :], empty, strict=True)]
        share = dataclasses.replace(program, spec=share_spec, sizes=sizes)
        return compute(share, *of_arrays.unflatten(operands[: len(leaves)]), *tree.unflatten(known))

    operands = *leaves, *(x for _, x in of_tables)
    functions = spec.mask_function, spec.score_function  # they may hold arrays, which a share's program cannot
    if functions != (None, None) or not program.on_cpu:
        return of_share(spec, *operands)
    given = jax.tree.map(lambda x, each: each if x is not None else x, arrays, letters, is_leaf=lambda x: x is None)
    dims = [*jax.tree.leaves(given), *(_of_table(path[-1].name, x) for path, x in of_tables)]
    return by_shares(of_share, spec, operands, dims, results)


def _of_table(name: str, x: Any) -> str:
    """The letters of an array that says which blocks are seen; its lengths are padded to whole blocks."""
    return "bn.." if name == "mask" else "b" + "." * (x.ndim - 1)
