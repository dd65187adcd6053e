"""Rows of an operand as terms of a product, contiguous and padded to whole vectors; and their transpose.

A term is one float32, or two neighbours of a row as bfloat16 where the processor multiplies these (``products.py``).

Query rows of a KV head are numbered over tokens and the heads of its group, ``r = t * group + g``: the heads of a group
share a tile, so that a key is read once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from llvmlite import ir

from . import elements
from .emit import Function, Value, f32, i1, i16, i32, i64, ptr, vector
from .handler import Dims
from .isa import Isa


def padded(width: int, isa: Isa, pack: int = 1) -> int:
    """Terms of ``width`` numbers, rounded up to whole vectors."""
    return -(-width // (pack * isa.lanes)) * isa.lanes


def copy_row(module: ir.Module, isa: Isa, name: str, dtype: str, width: int, pack: int = 1) -> ir.Function:
    """A function ``(source, target)``: ``width`` numbers of ``dtype`` as terms, and zeros up to whole vectors."""
    if pack == 2:
        return _copy_pairs(module, isa, name, width)
    size, whole, type_ = elements.SIZE[dtype], width // isa.lanes * isa.lanes, vector(f32, isa.lanes)
    with Function(module, name, [ptr, ptr]) as (e, (source, target)):
        with e.loop(0, whole, isa.lanes) as d:
            target.at(d, 4).store(elements.load(e, source.at(d, size), dtype, isa.lanes))
        if width > whole:
            target.at(whole, 4).store(e.const(type_, 0.0))
            with e.loop(whole, width) as d:
                target.at(d, 4).store(elements.load(e, source.at(d, size), dtype, None))
    return e.function


def copy_scaled_row(module: ir.Module, isa: Isa, name: str, dtype: str, width: int) -> ir.Function:
    """A function ``(source, target, factor)``: as :func:`copy_row`, times a factor."""
    copy, type_ = copy_row(module, isa, f"{name}_numbers", dtype, width), vector(f32, isa.lanes)
    with Function(module, name, [ptr, ptr, f32]) as (e, (source, target, factor)):
        e.run(copy, source, target)
        with e.loop(0, width, isa.lanes) as d:
            place = target.at(d, 4)
            place.store(place.load(type_) * e.splat(factor, isa.lanes))
    return e.function


def _copy_pairs(module: ir.Module, isa: Isa, name: str, width: int) -> ir.Function:
    vector_, numbers = vector(i32, isa.lanes), 2 * isa.lanes
    whole = width // numbers * numbers
    with Function(module, name, [ptr, ptr]) as (e, (source, target)):
        with e.loop(0, whole, numbers) as d:
            target.at(d, 2).store(source.at(d, 2).load(vector_, 2))
        if width > whole:
            target.at(whole, 2).store(e.const(vector_, 0))
            with e.loop(whole, width) as d:
                target.at(d, 2).store(source.at(d, 2).load(i16, 2), 2)
    return e.function


def join(module: ir.Module, isa: Isa, name: str, width: int) -> ir.Function:
    """A function ``(source, target, count)``: of ``count`` rows of bfloat16, each two as one of ``width`` pairs.

    The rows have ``width`` numbers, padded as :func:`copy_row` does; ``width`` is in whole vectors.
    """
    half, wide, stride = vector(i16, isa.lanes), vector(i32, isa.lanes), padded(width, isa, 2)
    with (
        Function(module, name, [ptr, ptr, i64]) as (e, (source, target, count)),
        e.loop(0, count, 2) as r,
        e.loop(0, width, isa.lanes) as d,
    ):
        pair = (source.at((r + n) * stride, 4).at(d, 2) for n in (0, 1))
        low, high = (Value(e, e.builder.zext(row.load(half, 2).raw, wide)) for row in pair)
        target.at(r // 2 * width + d, 4).store(low | (high << 16))
    return e.function


def dot(module: ir.Module, isa: Isa, name: str, dtype: str, width: int) -> ir.Function:
    """A function ``(first, second) -> float32``: the product of two rows of ``width`` numbers of ``dtype``."""
    size, whole = elements.SIZE[dtype], width // isa.lanes * isa.lanes
    with Function(module, name, [ptr, ptr], f32) as (e, sources):
        total, rest = e.variable(e.const(vector(f32, isa.lanes), 0.0)), e.variable(e.const(f32, 0.0))
        for start, stop, sum_, lanes in ((0, whole, total, isa.lanes), (whole, width, rest, None)):
            with e.loop(start, stop, lanes or 1) as d:
                x, y = (elements.load(e, row.at(d, size), dtype, lanes) for row in sources)
                sum_.set(e.fma(x, y, sum_()))
        e.ret(e.add_up(total()) + rest())
    return e.function


def finite(module: ir.Module, isa: Isa, name: str, dtype: str, width: int) -> ir.Function:
    """A function ``(source) -> i1``: whether ``width`` numbers of ``dtype`` are finite, seen by their exponents."""
    size, infinity = elements.SIZE[dtype], elements.INFINITY[dtype]
    type_, lanes = {4: i32, 2: i16}[size], isa.lanes * 4 // size
    whole, without_sign = width // lanes * lanes, (1 << 8 * size - 1) - 1
    with Function(module, name, [ptr], i1) as (e, (source,)):
        found = []
        for start, stop, count in ((0, whole, lanes), (whole, width, None)):
            largest = e.variable(e.const(vector(type_, count), 0))
            with e.loop(start, stop, count or 1) as d:
                bits = source.at(d, size).load(largest.type, size)
                largest.set(e.max(bits & without_sign, largest()))
            found.append(largest() >= infinity)
        e.ret((e.any(found[0]) | found[1]).equals(0))
    return e.function


def write_row(module: ir.Module, isa: Isa, name: str, dtype: str, width: int) -> ir.Function:
    """A function ``(source, target, factor)``: ``width`` float32 numbers times ``factor``, rounded to ``dtype``."""
    size, whole = elements.SIZE[dtype], width // isa.lanes * isa.lanes
    with Function(module, name, [ptr, ptr, f32]) as (e, (source, target, factor)):
        wide = e.splat(factor, isa.lanes)
        with e.loop(0, whole, isa.lanes) as d:
            x = source.at(d, 4).load(wide.type) * wide
            elements.store(e, target.at(d, size), x, dtype)
        with e.loop(whole, width) as d:
            elements.store(e, target.at(d, size), source.at(d, 4).load(f32) * factor, dtype)
    return e.function


def transpose(module: ir.Module, isa: Isa, name: str, rows: int, width: int) -> ir.Function:
    """A function ``(source, target)``: terms ``[rows, width]`` to ``[width, rows]``, both multiples of the lanes."""
    n = isa.lanes
    type_ = vector(f32, n)
    with (
        Function(module, name, [ptr, ptr]) as (e, (source, target)),
        e.loop(0, rows, n) as r,
        e.loop(0, width, n) as d,
    ):
        square = turned(e, [source.at((r + i) * width + d, 4).load(type_) for i in range(n)])
        for i in range(n):
            target.at((d + i) * rows + r, 4).store(square[i])
    return e.function


def turned(e: Function, square: list[Value]) -> list[Value]:
    """As many vectors as they have lanes, transposed.

    For every bit of the lane number the halves that differ in it are exchanged.
    """
    square, n, bit = list(square), len(square), 1
    while bit < n:
        for i in range(n):
            if not i & bit:
                x, y = square[i], square[i + bit]
                square[i] = e.shuffle(x, y, [k if not k & bit else n + k - bit for k in range(n)])
                square[i + bit] = e.shuffle(x, y, [k + bit if not k & bit else n + k for k in range(n)])
        bit *= 2
    return square


def halve(e: Function, isa: Isa, place: Value, *, back: bool = False) -> None:
    """Two vectors of float32 at ``place``: numbers at even places first, then those at odd ones; ``back``: reversed."""
    n, type_ = isa.lanes, vector(f32, isa.lanes)
    low, high = (place.at(half * n, 4).load(type_) for half in (0, 1))
    order = [lane // 2 + lane % 2 * n for lane in range(2 * n)] if back else [*range(0, 2 * n, 2), *range(1, 2 * n, 2)]
    halves = [e.shuffle(low, high, order[half * n : half * n + n]) for half in (0, 1)]
    for half, x in enumerate(halves):
        place.at(half * n, 4).store(x)


def fill(module: ir.Module, isa: Isa) -> ir.Function:
    """A function ``(target, count, number)``: float32 ``number`` in ``count`` places, a multiple of the lanes.

    One for the whole module.
    """
    if "fill" in module.globals:
        return module.globals["fill"]
    with Function(module, "fill", [ptr, i64, f32]) as (e, (target, count, number)):
        wide = e.splat(number, isa.lanes)
        with e.loop(0, count, isa.lanes) as i:
            target.at(i, 4).store(wide)
    return e.function


def copy_or_zeros(
    e: Function, isa: Isa, good: Value, copy: ir.Function, source: Value, target: Value, terms: int
) -> None:
    """A row copied by ``copy``, if it is ``good``; else zeros in its ``terms`` places."""
    zeros, nothing = fill(e.module, isa), e.const(f32, 0.0)
    e.either(good, lambda: e.run(copy, source, target), lambda: e.run(zeros, target, terms, nothing))


def query_place(dims: Dims, head: Value, row: Value) -> Value:
    """Index over ``[batch, tokens, heads]`` of a row of the queries of a KV head, numbered over the batch."""
    heads, kv_heads = dims["N"], dims["K"]
    group = heads // kv_heads
    return (head // kv_heads * dims["T"] + row // group) * heads + head % kv_heads * group + row % group


@contextmanager
def each_query(e: Function, dims: Dims, head: Value, start: Value, count: Value) -> Iterator[tuple[Value, Value]]:
    """A loop over ``count`` rows from ``start`` on: the number of a row among them, and its :func:`query_place`."""
    heads = dims["N"]
    group = heads // dims["K"]
    place, member = e.variable(query_place(dims, head, start)), e.variable(start % group)
    with e.loop(0, count) as i:
        yield i, place()
        next_token = (member() + 1).equals(group)
        place.set(place() + e.select(next_token, heads - group + 1, 1))
        member.set(e.select(next_token, e.const(i64, 0), member() + 1))
