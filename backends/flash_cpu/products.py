"""The two matrix products of attention as register tiles.

Scores are kept transposed, one lane per query. So neither the maximum nor the sum of a softmax row crosses lanes.

score tile      ``S[k, q] = sum_d K[k, d] Q[d, q]``     keys x vectors of queries, over the head dimension
value tile      ``O[r, d] += sum_k P[k, r] V[k, d]``    rows x vectors of the head dimension, over the keys

Both are one loop over the summed index: load the row of the right operand, broadcast each element of the left one,
multiply and add into accumulators that stay in registers.

A term of the sum takes four bytes in either operand. It is one float32, or two neighbours along the summed index as
bfloat16 where the processor multiplies these (``pack`` is 1 or 2): half the terms, and the same loop. AMX multiplies
pairs by tile registers (``tiles.py``), whose left operand has its terms next to each other. ``P`` has them in rows:
with AMX the second product is computed transposed, ``O[d, r] += sum_k V[d, k] P[k, r]``, of values packed for that.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from llvmlite import ir

from . import elements, tiles
from .emit import Function, Value, f32, i32, i64, ptr, vector
from .isa import Isa
from .tiles import Tile

# Terms of a score that are summed one after the other. With 64, rounding is worse than in XLA's product.
TERMS = 32


def product(module: ir.Module, isa: Isa, name: str, tile: Tile) -> ir.Function:
    """A function ``(a, b, c, terms)`` that computes one tile; with tile registers that of ``tiles.py``."""
    if isa.tiles:
        return tiles.product(module, name, tile)
    type_, scalar = vector(f32, isa.lanes), f32 if tile.pack == 1 else i32
    columns = [j * isa.lanes for j in range(tile.vectors)]
    with Function(module, name, [ptr, ptr, ptr, i64]) as (e, (a, b, c, terms)):

        def place(r: int, j: int) -> Value:
            return c.at(r * tile.c_stride + columns[j], 4)

        sums = [[e.variable(e.const(type_, 0.0)) for _ in columns] for _ in range(tile.rows)]
        with e.loop(0, terms) as n:
            row = [b.at(n * tile.b_stride + column, 4).load(vector(scalar, isa.lanes)) for column in columns]
            factors = a.at(n * tile.term_stride, 4)
            for r in range(tile.rows):
                factor = e.splat(factors.at(r * tile.row_stride, 4).load(scalar), isa.lanes)
                for j in range(tile.vectors):
                    sums[r][j].set(elements.multiply_add(e, factor, row[j], sums[r][j]()))
        for r in range(tile.rows):
            for j in range(tile.vectors):
                # The old value is added at the end: a sum over thousands of terms is then a sum of short sums.
                total = sums[r][j]()
                place(r, j).store(place(r, j).load(type_) + total if tile.accumulate else total)
    return e.function


@dataclasses.dataclass(frozen=True, slots=True)
class Scores:
    """``S[k, q] = sum_d K[k, d] Q[d, q]`` for a group of queries, by tiles of ``isa.score_rows`` keys.

    The head dimension is taken in pieces of about :data:`TERMS`: a score is a sum of short sums, as of ``tiles.py``.
    """

    isa: Isa
    first: ir.Function  # stores the sum of the first piece
    further: ir.Function  # adds to it
    key_stride: int
    score_stride: int
    depth: int  # in terms

    @staticmethod
    def of(module: ir.Module, isa: Isa, name: str, depth: int, key_stride: int, queries: int, pack: int = 1) -> Scores:
        """``depth`` is the head dimension, ``queries`` the row stride of ``Q[d, q]`` and of ``S[k, q]``."""
        tile = Tile(isa.score_rows, isa.score_vectors, key_stride, 1, queries, queries, accumulate=False, pack=pack)
        first = product(module, isa, name, tile)
        more = dataclasses.replace(tile, accumulate=True)
        further = first if isa.tiles else product(module, isa, f"{name}_more", more)
        return Scores(isa, first, further, key_stride, queries, -(-depth // pack))

    def emit(self, e: Function, keys: Value, queries: Value, scores: Value, start: Value, stop: Value) -> None:
        """Keys ``start`` to ``stop``; all pointers are to key 0 and to the group's first query."""
        if self.isa.tiles:
            left, out = keys.at(start * self.key_stride, 4), scores.at(start * self.score_stride, 4)
            e.run(self.first, left, queries, out, tiles.whole(self.depth), stop - start)
            return
        pieces = split(self.depth, TERMS)
        with e.loop(start, stop, self.isa.score_rows) as k:
            key, score, done = keys.at(k * self.key_stride, 4), scores.at(k * self.score_stride, 4), 0
            for terms in pieces:
                tile = self.further if done else self.first
                e.run(tile, key.at(done, 4), queries.at(done * self.score_stride, 4), score, terms)
                done += terms


@dataclasses.dataclass(frozen=True, slots=True)
class Weighted:
    """``C[r, :] += sum_n A[r, n] B[n, :]`` over the padded head dimension, by tiles of ``isa.value_rows`` rows.

    Where ``turned``, B and C are transposed, ``C[d, r] += sum_n B[d, n] A[n, r]``, and rows are taken group by group.
    """

    isa: Isa
    tiles: tuple[tuple[int, ir.Function], ...]  # first column of each strip of the head dimension, and its tile
    row_stride: int
    term_stride: int
    width: int
    pack: int
    turned: int  # the row stride of B that is transposed; 0 of one that is not

    @staticmethod
    def of(
        module: ir.Module, isa: Isa, name: str, width: int, strides: tuple[int, int], pack: int = 1, turned: int = 0
    ) -> Weighted:
        """``width``: the padded head dimension, and the row stride of B and C. ``strides``: of A's rows and terms.

        With ``turned``, A's rows are next to each other, and C has its term stride.
        """
        if turned:
            stride = strides[1]
            tile = Tile(isa.value_rows, isa.score_vectors, turned, 1, stride, stride, accumulate=True, pack=pack)
            return Weighted(isa, ((0, product(module, isa, name, tile)),), *strides, width, pack, turned)
        functions: dict[int, ir.Function] = {}
        tiles, column = [], 0
        for vectors in split(width // isa.lanes, isa.value_vectors):
            if vectors not in functions:
                tile = Tile(isa.value_rows, vectors, *strides, width, width, accumulate=True, pack=pack)
                functions[vectors] = product(module, isa, f"{name}_{vectors}", tile)
            tiles.append((column, functions[vectors]))
            column += vectors * isa.lanes
        return Weighted(isa, tuple(tiles), *strides, width, pack, turned)

    def emit(self, e: Function, a: Value, b: Value, c: Value, rows: tuple[Any, Any], terms: tuple[Any, Any]) -> None:
        """Rows and indices ``n`` from the first to before the last; all pointers are to row 0 and to index 0."""
        first, last, *bounds = (x if isinstance(x, Value) else e.const(i64, x) for x in (*rows, *terms))
        start, stop = (x // self.pack for x in bounds)
        left, right = a.at(start * self.term_stride, 4), b.at(start * (1 if self.turned else self.width), 4)
        step, all_rows = (last - first, [last - first]) if self.isa.tiles else (self.isa.value_rows, [])
        for column, tile in self.tiles:
            if self.turned:
                with e.loop(first, last, self.isa.group) as r:
                    e.run(tile, right, left.at(r, 4), c.at(r, 4), stop - start, self.width)
                continue
            with e.loop(first, last, step) as r:  # once with tile registers
                e.run(
                    tile,
                    left.at(r * self.row_stride, 4),
                    right.at(column, 4),
                    c.at(r * self.width + column, 4),
                    stop - start,
                    *all_rows,
                )


def split(vectors: int, most: int) -> list[int]:
    """``vectors`` dealt to as few strips of at most ``most`` as possible, evenly.

    >>> split(5, 4)
    [3, 2]
    """
    parts = -(-vectors // most)
    return [vectors // parts + (i < vectors % parts) for i in range(parts)]
