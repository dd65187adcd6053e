"""What an item of the backward pass reads and writes, a function each: tiles of rows and blocks of keys.

``backward.py`` explains the method and puts the functions together.
"""

from __future__ import annotations

from llvmlite import ir

from . import elements, masking, rows
from .added import Added
from .backward_buffers import BLOCK_KEYS, Buffers
from .emit import Function, f32, i32, i64, ptr
from .forward import UNSEEN_TOP
from .handler import State
from .panels import emit_row_numbers
from .slopes import ALONE, D_LSE, DELTA, FIRST, INVERSE, LARGE_TOP, LAST, LIMIT, NEVER, QUERY_ID, TOP
from .softmax import GRADIENT_SCALE
from .visibility import NO_KEY


def emit_load_tile(module: ir.Module, buffers: Buffers, state: State) -> ir.Function:
    """``load_tile(state, workspace, tile, head, n)``: queries and cotangents, also transposed, and their numbers.

    Rows that see nothing, or something that is not finite (their sum is NaN), are packed as zeros, whatever they hold.
    """
    isa, kernel, pack = buffers.isa, buffers.kernel, buffers.pack
    at, of_block = buffers.tile[0], buffers.block[0]
    size, n = elements.SIZE[kernel.dtype], buffers.rows
    key_terms, value_terms = buffers.key_terms, buffers.value_terms
    copy_query = rows.copy_row(module, isa, "copy_query", kernel.dtype, kernel.head_dim, pack)
    copy_value = rows.copy_row(module, isa, "copy_d_out", kernel.dtype, kernel.value_head_dim, pack)
    dot = rows.dot(module, isa, "delta", kernel.dtype, kernel.value_head_dim)
    turn_query = rows.transpose(module, isa, "transpose_query", n, key_terms)
    turn_value = rows.transpose(module, isa, "transpose_d_out", n, value_terms)
    widths = {"query": buffers.width, "d_out": buffers.value_width}
    joins = [rows.join(module, isa, f"join_{name}", wide) for name, wide in widths.items() if pack == 2]
    fill = rows.fill(module, isa)
    numbers = emit_row_numbers(module, isa, state)
    with Function(module, "load_tile", [ptr, ptr, ptr, i64, i64]) as (e, (s, w, tile, head, index)):
        dims = state.dims(s)
        start, count = buffers.rows_of(e, dims, index)
        pointer = {x: state.pointer(s, f"data:{x}") for x in ("query", "d_out", "out", "top", "total", "d_lse")}
        per_query = tile.at(at["numbers"])
        joined = tile.at(at["query"]), tile.at(at["d_out"])
        targets = joined if pack == 1 else (w.at(of_block["query"]), w.at(of_block["d_out"]))
        e.run(fill, tile.at(at["d_query"]), n * buffers.width, e.const(f32, 0.0))
        e.run(fill, targets[0], n * key_terms, e.const(f32, 0.0))
        e.run(fill, targets[1], n * value_terms, e.const(f32, 0.0))
        for name, number in ((TOP, UNSEEN_TOP), (INVERSE, 1.0), (DELTA, 0.0), (LIMIT, NEVER), (D_LSE, 0.0)):
            e.run(fill, per_query.at(name * n, 4), n, e.const(f32, number))
        with rows.each_query(e, dims, head, start, count) as (i, place):
            top, total = (pointer[x].at(place, 4).load(f32) for x in ("top", "total"))
            with e.when((top < UNSEEN_TOP / 2) & total.equals(total)):
                out, d_out = (pointer[x].at(place * kernel.value_head_dim, size) for x in ("out", "d_out"))
                query = pointer["query"].at(place * kernel.head_dim, size)
                e.run(copy_query, query, targets[0].at(i * key_terms, 4))
                e.run(copy_value, d_out, targets[1].at(i * value_terms, 4))
                per_query.at(i + TOP * n, 4).store(top)
                per_query.at(i + INVERSE * n, 4).store(e.const(f32, 1.0) / total)
                per_query.at(i + DELTA * n, 4).store(e.run(dot, out, d_out))
                per_query.at(i + D_LSE * n, 4).store(pointer["d_lse"].at(place, 4).load(f32))
                small = (top < LARGE_TOP) & (top > -LARGE_TOP)
                per_query.at(i + LIMIT * n, 4).store(e.select(small, e.const(f32, ALONE), NEVER))
        e.run(turn_query, targets[0], tile.at(at["query_turned"]))
        e.run(turn_value, targets[1], tile.at(at["d_out_turned"]))
        for join, plain, target in zip(joins, targets, joined, strict=False):
            e.run(join, plain, target, n)
        first, last, query_id = (per_query.at(x * n, 4) for x in (FIRST, LAST, QUERY_ID))
        e.run(numbers, s, head // dims["K"], start, count, n, first, last, query_id, tile.at(at["bounds"]))
        masking.query_bounds(e, first, last, query_id, count, tile.at(at["whole"]))
    return e.function


def emit_load_block(module: ir.Module, buffers: Buffers, state: State) -> ir.Function:
    """``load_block(state, workspace, head, start)``: a block of keys and values, and its bounds.

    Where keys are listed, those in the slots of the block (-1: none) instead of those from ``start`` on. A key and its
    value are packed as zeros if either is not finite: no row with a gradient sees them.
    """
    isa, kernel, at, pack = buffers.isa, buffers.kernel, buffers.block[0], buffers.pack
    size = elements.SIZE[kernel.dtype]
    sides = tuple(
        (name, depth, terms, rows.copy_row(module, isa, f"copy_{name}", kernel.dtype, depth, pack))
        for name, depth, terms in (
            ("key", kernel.head_dim, buffers.key_terms),
            ("value", kernel.value_head_dim, buffers.value_terms),
        )
    )
    finite = [rows.finite(module, isa, f"finite_{name}", kernel.dtype, depth) for name, depth, *_ in sides]
    join = rows.join(module, isa, "join_keys", buffers.width) if pack == 2 else None
    turn = rows.transpose(module, isa, "turn_keys", BLOCK_KEYS // 2, buffers.width) if isa.tiles else None
    with Function(module, "load_block", [ptr, ptr, i64, i64]) as (e, (s, w, head, start)):
        dims = state.dims(s)
        length, heads = dims["S"], dims["K"]
        batch = head // heads
        row = batch // (dims["B"] // dims["C"])
        positions, ids = (state.pointer(s, f"data:{x}").at(row * length, 4) for x in ("position", "key_id"))
        with e.loop(0, BLOCK_KEYS) as j:
            wanted = w.at(at["slots"]).at(j, 4).load(i32).integer(i64) if buffers.listed else start + j
            slot = e.max(e.min(wanted, length - 1), 0)
            name = e.select((wanted >= 0) & (wanted < length), ids.at(slot, 4).load(i32), NO_KEY)
            w.at(at["position"]).at(j, 4).store(positions.at(slot, 4).load(i32))
            w.at(at["key_id"]).at(j, 4).store(name)
            place = (batch * length + slot) * heads + head % heads
            sources = [state.pointer(s, f"data:{side}").at(place * depth, size) for side, depth, *_ in sides]
            whole = name.compare("!=", NO_KEY)
            for test, source in zip(finite, sources, strict=True):
                whole = whole & e.run(test, source)
            for (side, _, terms, copy), source in zip(sides, sources, strict=True):
                rows.copy_or_zeros(e, isa, whole, copy, source, w.at(at[side]).at(j * terms, 4), terms)
        if join is not None:
            e.run(join, w.at(at["key"]), w.at(at["key_joined" if turn is None else "plain"]), BLOCK_KEYS)
        if turn is not None:
            e.run(turn, w.at(at["plain"]), w.at(at["key_joined"]))
        masking.key_bounds(e, w.at(at["position"]), w.at(at["key_id"]), BLOCK_KEYS, isa.strip, w.at(at["records"]))
    return e.function


def emit_store_block(module: ir.Module, buffers: Buffers, state: State) -> ir.Function:
    """``store_block(state, gradients, head, start)``: dk and dv of a block, dk times the softmax scale."""
    isa, kernel, at = buffers.isa, buffers.kernel, buffers.gradients[0]
    size = elements.SIZE[kernel.out_dtype]
    sides = tuple(
        (name, depth, width, rows.write_row(module, isa, f"write_{name}", kernel.out_dtype, depth))
        for name, depth, width in (
            ("d_key", kernel.head_dim, buffers.width),
            ("d_value", kernel.value_head_dim, buffers.value_width),
        )
    )
    with Function(module, "store_block", [ptr, ptr, i64, i64]) as (e, (s, gradients, head, start)):
        dims = state.dims(s)
        length, heads = dims["S"], dims["K"]
        factors = {"d_key": state.pointer(s, "data:numbers").at(GRADIENT_SCALE).load(f32), "d_value": e.const(f32, 1.0)}
        with e.loop(0, e.min(length - start, BLOCK_KEYS)) as j:
            place = (head // heads * length + start + j) * heads + head % heads
            for name, depth, width, write in sides:
                target = state.pointer(s, f"data:{name}").at(place * depth, size)
                e.run(write, gradients.at(at[name]).at(j * width, 4), target, factors[name])
    return e.function


def emit_write(module: ir.Module, buffers: Buffers, state: State) -> ir.Function:
    """``write(state, workspace, source, head, tile)``: one tile of dq, times the softmax scale."""
    isa, kernel, width = buffers.isa, buffers.kernel, buffers.width
    size = elements.SIZE[kernel.out_dtype]
    write_row = rows.write_row(module, isa, "write_d_query", kernel.out_dtype, kernel.head_dim)
    turn = rows.transpose(module, isa, "transpose_d_query", width, buffers.rows) if isa.tiles else None
    with Function(module, "write", [ptr, ptr, ptr, i64, i64]) as (e, (s, w, source, head, tile)):
        dims = state.dims(s)
        scale = state.pointer(s, "data:numbers").at(GRADIENT_SCALE).load(f32)
        plain = source
        if turn is not None:
            plain = w.at(buffers.block[0]["plain"])
            e.run(turn, source, plain)
        with rows.each_query(e, dims, head, *buffers.rows_of(e, dims, tile)) as (i, place):
            target = state.pointer(s, "data:d_query").at(place * kernel.head_dim, size)
            e.run(write_row, plain.at(i * width, 4), target, scale)
    return e.function


def emit_write_slopes(module: ir.Module, buffers: Buffers, state: State) -> ir.Function:
    """``write_slopes(state, rows, head, tile, part)``: of a tile's rows, the sums of ``dS`` times distance."""
    extra = Added(buffers.isa, buffers.kernel.arrays, state, buffers.rows)
    with Function(module, "write_slopes", [ptr, ptr] + [i64] * 3) as (e, (s, rows_, head, tile, part)):
        dims = state.dims(s)
        start, count = buffers.rows_of(e, dims, tile)
        with e.loop(0, count) as i:
            place = rows.query_place(dims, head, start + i)
            target = state.pointer(s, "data:d_slope").at(place * dims["P"] + part, 4)
            target.store(extra.distances(rows_).at(i, 4).load(f32))
    return e.function
