"""The parts of a decode step, a function each: read rows, see and score keys, soften scores, weigh values.

``decode.py`` explains the method and puts the parts together.
"""

from __future__ import annotations

import math

from llvmlite import ir

from . import decode_buffers, elements, rows
from .added import Added
from .decode_buffers import BLOCK_KEYS, Buffers, DecodeKernel, Rows, moved
from .emit import Function, Value, f32, i32, i64, ptr, vector
from .handler import State
from .isa import Isa
from .softmax import GRADIENT_SCALE, HIDDEN, LOG_2, SCALE, capped

_NO_WEIGHT = -0.0  # of a hidden key, where a row's terms hide keys that others see: its value may be anything


def emit_read(module: ir.Module, buffers: Buffers, state: State, added: Added | None) -> ir.Function:
    """``read(state, workspace, partial, head)``: the rows as float32 with their numbers, and a fresh partial result."""
    isa, kernel = buffers.isa, buffers.kernel
    copy = rows.copy_row(module, isa, "copy_query", kernel.dtype, kernel.head_dim)
    fill = rows.fill(module, isa)
    size, more = elements.SIZE[kernel.dtype], None if added is None else added.emit_rows(module)
    with Function(module, "read", [ptr, ptr, ptr, i64]) as (e, (s, w, partial, head)):
        dims = state.dims(s)
        group, batch = dims["N"] // dims["K"], head // dims["K"]
        padded, count = buffers.padded_rows(dims), dims["T"] * group
        row = Rows(buffers, w)
        layout = batch // (dims["B"] // dims["C"]) * dims["T"]
        e.run(fill, partial, padded * buffers.partial, e.const(f32, 0.0))
        e.run(fill, row.query(0), padded * (buffers.per_row // 4), e.const(f32, 0.0))
        with e.loop(0, padded) as r:
            partial.at(r * buffers.partial + buffers.value_width, 4).store(e.const(f32, HIDDEN))
        with e.loop(0, count) as r:
            place = rows.query_place(dims, head, r)
            e.run(copy, state.pointer(s, "data:query").at(place * kernel.head_dim, size), row.query(r))
            if buffers.halves_keys:
                with e.loop(0, buffers.width, 2 * isa.lanes) as d:
                    rows.halve(e, isa, row.query(r).at(d, 4))
            for n, name in enumerate(("first", "last", "query_id")):
                row.number(r, n).store(state.pointer(s, f"data:{name}").at(layout + r // group, 4).load(i32))
        if more is not None:
            e.run(more, s, batch, head % dims["K"], 0, count, w.at(buffers.added))
    return e.function


def emit_see(module: ir.Module, buffers: Buffers) -> ir.Function:
    """``see(workspace, positions, ids, keys, rows) -> whether some row sees some key``.

    Sets a key's flag to 1 where some row sees it, else to 0. A row's scores are set to HIDDEN where it does not see the
    key, else to 0. Whole vectors of keys first, then the rest of the block one by one.
    """
    lanes = buffers.isa.lanes
    with Function(module, "see", [ptr, ptr, ptr, i64, i64], i64) as (e, (w, positions, ids, keys, count)):
        row, flags = Rows(buffers, w), w.at(buffers.flags)
        total = e.variable(e.const(i32, 0))
        whole = keys // lanes * lanes

        def step(k: Value, width: int | None, at: Value, real: Value | None) -> None:
            def of(x: Value) -> Value:
                return x if width is None else e.splat(x, width)

            type_ = vector(i32, width)
            position, name = positions.at(at, 4).load(type_), ids.at(at, 4).load(type_)
            flag = e.variable(e.const(type_, 0))
            with e.loop(0, count) as r:
                first, last, query = (of(row.number(r, n).load(i32)) for n in range(3))
                seen = (first <= position) & (position <= last) & name.equals(query)
                seen = seen if real is None else seen & real
                row.scores(r).at(k, 4).store(e.select(seen, of(e.const(f32, 0.0)), of(e.const(f32, HIDDEN))))
                flag.set(e.select(seen, e.const(type_, 1), flag()))
            flags.at(k, 4).store(flag())
            total.set(total() | (flag() if width is None else e.reduce("smax", flag())))

        with e.loop(0, whole, lanes) as k:
            step(k, lanes, k, None)
        with e.loop(whole, BLOCK_KEYS) as k:
            step(k, None, e.min(k, keys - 1), k < keys)
        e.ret(total().integer(i64))
    return e.function


def emit_add(module: ir.Module, buffers: Buffers, added: Added) -> ir.Function:
    """``add(state, workspace, slot, positions, keys, rows) -> whether some row sees some key``, after ``see``.

    The scores of the visible keys of a block, which begins at ``slot``, are set to what is added to them, in powers of
    two. What that hides is hidden as by ``see``.
    """
    lanes = buffers.isa.lanes
    type_ = vector(f32, lanes)
    with Function(module, "add", [ptr, ptr, i64, ptr, i64, i64], i64) as (e, (s, w, slot, positions, keys, count)):
        row, flags, copied = Rows(buffers, w), w.at(buffers.flags), w.at(buffers.positions)
        rest, none, total = e.stack(type_), e.const(vector(i32, lanes), 0), e.variable(e.const(i32, 0))
        rest.store(e.const(type_, 0.0))
        if added.arrays.needs_positions:
            with e.loop(0, BLOCK_KEYS) as k:
                copied.at(k, 4).store(positions.at(e.min(k, keys - 1), 4).load(i32))
        with e.loop(0, keys, lanes) as k:
            flag = e.variable(none)
            with e.loop(0, count) as r:
                place = row.scores(r).at(k, 4)
                x = added.of_keys(e, s, w.at(buffers.added), r, slot + k, copied.at(k, 4), rest)
                hidden = (place.load(type_) < 0.0) | (x <= HIDDEN / 2)
                place.store(e.select(hidden, e.const(type_, HIDDEN), x))
                flag.set(e.select(hidden, flag(), e.const(none.type, 1)))
            flags.at(k, 4).store(flag())
            total.set(total() | e.reduce("smax", flag()))
        e.ret(total().integer(i64))
    return e.function


def emit_score(module: ir.Module, buffers: Buffers) -> ir.Function:
    """``score(workspace, apart, keys, step, ahead, ahead_step, rows, count)``: products of ``count`` keys a head.

    ``apart``: bytes from one head's workspace to the next. ``keys`` and ``ahead`` are blocks of slots of the first head
    (``decode_buffers.types``). Behind the arguments come the keys' scales and the bytes from one to the next, if they
    have some.

    Meanwhile what is needed next is fetched, in the order of memory from ``ahead`` on. A key of each head meets the
    rows, a tile at a time, before the next slot's: a processor reads ahead best in the order of memory. The sums of a
    tile are added across lanes together. What a row does not see is read as well, and hidden by ``soften``.
    """
    isa, kernel, width = buffers.isa, buffers.kernel, buffers.width
    copy = _copy(module, buffers, "copy_key", kernel.head_dim) if buffers.widens_keys else None
    dtype = "float32" if buffers.widens_keys else kernel.stored
    block = decode_buffers.types(kernel)
    scaled = [*block, i64] if kernel.kv_dtype else []
    size, stored, type_ = elements.SIZE[dtype], elements.SIZE[kernel.stored], vector(f32, isa.lanes)
    tile, vectors = kernel.rows_per_tile, math.gcd(width // isa.lanes, 4)
    with Function(module, "score", [ptr, i64, *[*block, i64] * 2, i64, i64, *scaled]) as (e, (w, apart, *arguments)):
        n = len(block)
        keys, step, (*ahead, ahead_step) = arguments[:n], arguments[n], arguments[n + 1 : 2 * n + 2]
        padded, count, *scales = arguments[2 * n + 2 :]
        fetched_dim = kernel.value_head_dim or kernel.head_dim
        with e.loop(0, count) as slot, e.loop(0, buffers.heads) as h:
            own = w.at(h * apart)
            row = Rows(buffers, own)
            source = decode_buffers.place(kernel, moved(keys, h * kernel.head_dim, stored), slot, step)
            if copy is not None:
                factors = [*moved(scales[:-1], h, 4), scales[-1]] if scales else []
                e.run(copy, source, own, *_factor(kernel, slot, factors))
                source = own
            fetched = decode_buffers.place(kernel, moved(ahead, h * fetched_dim, stored), slot, ahead_step)
            with e.loop(0, padded, tile) as r:
                sums = [e.variable(e.const(type_, 0.0)) for _ in range(tile)]
                with e.loop(0, width, vectors * isa.lanes) as d:
                    e.prefetch(fetched.at(d, stored), vectors * isa.lanes * stored)
                    some = _vectors(e, isa, source.at(d, size), dtype, vectors, halves=buffers.halves_keys)
                    for v, x in enumerate(some):
                        for i in range(tile):
                            query = row.query(r + i).at(d + v * isa.lanes, 4).load(type_)
                            sums[i].set(e.fma(x, query, sums[i]()))
                products = _across(e, [x() for x in sums])
                for i in range(tile):
                    row.products(r + i).at(slot, 4).store(_lane(e, products, i))
    return e.function


def _vectors(e: Function, isa: Isa, source: Value, dtype: str, count: int, *, halves: bool) -> list[Value]:
    """So many vectors of numbers at ``source`` as float32, in their order or in halves."""
    size, lanes = elements.SIZE[dtype], isa.lanes
    if halves:
        pairs = (elements.load_halves(e, source.at(v * lanes, size), lanes) for v in range(0, count, 2))
        return [x for pair in pairs for x in pair]
    return [elements.load(e, source.at(v * lanes, size), dtype, lanes) for v in range(count)]


def _copy(module: ir.Module, buffers: Buffers, name: str, width: int) -> ir.Function:
    """``copy(source, target)``: a row as float32; ``copy(source, target, factor)`` of one that has a scale."""
    copy = rows.copy_scaled_row if buffers.kernel.kv_dtype else rows.copy_row
    return copy(module, buffers.isa, name, buffers.kernel.stored, width)


def _factor(kernel: DecodeKernel, slot: Value, scales: list[Value]) -> list[Value]:
    """The scale of a slot of a block, if there are scales: those of the block, and the bytes from one to the next."""
    return [decode_buffers.place(kernel, scales[:-1], slot, scales[-1]).load(f32)] if scales else []


def _across(e: Function, vectors: list[Value]) -> Value:
    """Lane ``j`` of the result is the sum of the lanes of ``vectors[j]``, of which there are at most lanes."""
    n, bit = vectors[0].type.count, 1
    vectors = vectors + vectors[-1:] * (2 ** (len(vectors) - 1).bit_length() - len(vectors))
    while len(vectors) > 1:
        joined = []
        for x, y in zip(vectors[::2], vectors[1::2], strict=True):
            one = e.shuffle(x, y, [k if not k & bit else n + k - bit for k in range(n)])
            other = e.shuffle(x, y, [k + bit if not k & bit else n + k for k in range(n)])
            joined.append(one + other)
        vectors, bit = joined, bit * 2
    x = vectors[0]
    while n > bit:
        n //= 2
        x = e.shuffle(x, x, range(n)) + e.shuffle(x, x, range(n, 2 * n))
    return x


def _lane(e: Function, x: Value, number: int) -> Value:
    return Value(e, e.builder.extract_element(x.raw, ir.Constant(i32, number)))


def emit_soften(module: ir.Module, buffers: Buffers, added: Added | None) -> ir.Function:
    """``soften(workspace, row, partial, numbers)``: products become scores in powers of two, and scores weights.

    The row's maximum, sum and output follow. A product that is not finite makes the sum NaN (``x - x`` is 0 or NaN):
    it is neither hidden nor made finite by a soft cap. The maximum passes over it.
    """
    isa, type_, lanes = buffers.isa, vector(f32, buffers.isa.lanes), buffers.isa.lanes
    with Function(module, "soften", [ptr, i64, ptr, ptr]) as (e, (w, r, partial, numbers)):
        scores, products = Rows(buffers, w).scores(r), Rows(buffers, w).products(r)
        top_at, total_at = partial.at(buffers.value_width, 4), partial.at(buffers.value_width + 1, 4)
        highest, scale = e.variable(e.const(type_, HIDDEN)), e.splat(numbers.at(SCALE).load(f32), isa.lanes)
        with e.loop(0, BLOCK_KEYS, isa.lanes) as k:
            place, raw = scores.at(k, 4), products.at(k, 4).load(type_)
            x, term = capped(e, isa, raw, numbers) if buffers.kernel.soft_cap else raw * scale, place.load(type_)
            if added is None:
                x = e.select(term < 0.0, e.const(type_, HIDDEN), x + (raw - raw))
            else:
                if added.arrays.score is not None:
                    x = (
                        x * LOG_2
                        if buffers.kernel.soft_cap
                        else raw * e.splat(numbers.at(GRADIENT_SCALE).load(f32), lanes)
                    )
                    x = added.modified_keys(e, x, w.at(buffers.added), r, w.at(buffers.positions).at(k, 4))
                x = x + term + (raw - raw)
                x = e.select((term <= HIDDEN / 2) | (x <= HIDDEN / 2), e.const(type_, HIDDEN), x)
            place.store(x)
            highest.set(e.max(x, highest()))
        old = top_at.load(f32)
        new = e.max(e.highest(highest()), old)
        factor = exp2_scalar(e, isa, old - new)
        wide, fresh = e.splat(new, isa.lanes), e.variable(e.const(type_, 0.0))
        with e.loop(0, BLOCK_KEYS, isa.lanes) as k:
            place = scores.at(k, 4)
            x = place.load(type_)
            nothing = e.const(type_, 0.0 if added is None else _NO_WEIGHT)
            p = e.select(x < HIDDEN / 2, nothing, elements.exp2(e, isa, x - wide) + (x - x))
            place.store(p)
            fresh.set(fresh() + p)
        with e.when(new > old), e.loop(0, buffers.value_width, isa.lanes) as d:
            place = partial.at(d, 4)
            place.store(place.load(type_) * e.splat(factor, isa.lanes))
        total_at.store(total_at.load(f32) * factor + e.add_up(fresh()))
        top_at.store(new)
    return e.function


def exp2_scalar(e: Function, isa: Isa, x: Value) -> Value:
    """2**x of one number of at most 0; a difference to HIDDEN gives zero."""
    wide = elements.exp2(e, isa, e.splat(x, isa.lanes))
    return e.select(x > HIDDEN / 2, _lane(e, wide, 0), 0.0)


def emit_weigh(module: ir.Module, buffers: Buffers, count: int, vectors: int) -> ir.Function:
    """``weigh(workspace, row, values, step, ahead, ahead_step, out, first, last)``: a tile plus weights times values.

    A key that no row sees is not read: what lies there may be anything.
    """
    isa, kernel = buffers.isa, buffers.kernel
    type_ = vector(f32, isa.lanes)
    dtype = "float32" if buffers.widens_values else kernel.stored
    name, block = f"weigh_{count}_{vectors}", decode_buffers.types(kernel)
    of_values = [ptr] if buffers.widens_values else block
    with Function(module, name, [ptr, i64, *of_values, i64, *block, i64, ptr, i64, i64]) as (e, (w, r, *arguments)):
        n = len(of_values)
        values, step, (*ahead, ahead_step, out, first, last) = arguments[:n], arguments[n], arguments[n + 1 :]
        row, flags = Rows(buffers, w), w.at(buffers.flags)
        sums = [[e.variable(e.const(type_, 0.0)) for _ in range(vectors)] for _ in range(count)]
        weights = [row.scores(r + i) for i in range(count)]
        with e.loop(first, last) as k, e.when(flags.at(k, 4).load(i32).equals(1)):
            fetched = decode_buffers.place(kernel, ahead, k, ahead_step)
            e.prefetch(fetched, vectors * isa.lanes * elements.SIZE[kernel.stored])
            place = values[0].at(k * step) if buffers.widens_values else decode_buffers.place(kernel, values, k, step)
            value = _vectors(e, isa, place, dtype, vectors, halves=buffers.halves_values)
            for i in range(count):
                p = e.splat(weights[i].at(k, 4).load(f32), isa.lanes)
                for j in range(vectors):
                    weighed = e.fma(p, value[j], sums[i][j]())
                    if kernel.arrays.any:
                        weighed = e.select(p.bits_as(vector(i32, isa.lanes)).equals(-(2**31)), sums[i][j](), weighed)
                    sums[i][j].set(weighed)
        for i in range(count):
            for j in range(vectors):
                out.at(i * buffers.partial + j * isa.lanes, 4).add(sums[i][j]())
    return e.function


def emit_widen(module: ir.Module, buffers: Buffers) -> ir.Function:
    """``widen(workspace, values, step, first, last)``: values that some row sees, as float32 in whole vectors.

    Scales follow as those of :func:`emit_score`.
    """
    kernel, width = buffers.kernel, buffers.value_width
    copy, block = _copy(module, buffers, "copy_value", kernel.value_head_dim), decode_buffers.types(kernel)
    scaled = [*block, i64] if kernel.kv_dtype else []
    with Function(module, "widen", [ptr, *block, i64, i64, i64, *scaled]) as (e, (w, *arguments)):
        n, flags = len(block), w.at(buffers.flags)
        values, (step, first, last), scales = arguments[:n], arguments[n : n + 3], arguments[n + 3 :]
        with e.loop(first, last) as k, e.when(flags.at(k, 4).load(i32).equals(1)):
            place = decode_buffers.place(kernel, values, k, step)
            e.run(copy, place, w.at(buffers.values).at(k * width, 4), *_factor(kernel, k, scales))
    return e.function
