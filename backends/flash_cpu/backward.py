"""The backward kernel: dq, dk and dv from the output's cotangent, by recomputing the probabilities.

Phase 1 has one item per KV head and part of its key blocks. The head's rows are taken panel by panel. A panel's queries
and cotangents are packed once (plain and transposed). Then for every key block and every tile of rows that sees it::

    S = K Q^T;  dP = V dO^T;  P, dS (slopes.py);  dV += P dO;  dK += dS Q;  dQ += dS^T K

dK and dV of the item's keys are kept in float32 from panel to panel, dQ only for one panel. Every sum is taken in one
order, whichever thread computes an item. A head has several parts only if there are fewer KV heads than threads. Then
each part has a dQ of its own for all rows, and phase 2 adds the parts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from llvmlite import ir

from . import added, elements, masking, rows
from .added import Added, sharing
from .emit import Function, Value, aligned, f32, i32, i64, ptr, vector
from .forward import UNSEEN_TOP, Kernel, fits
from .handler import Dims, Operand, Phase, Program, State
from .isa import Isa
from .packing import emit_row_numbers
from .products import Scores, Weighted
from .slopes import (
    ALONE,
    D_LSE,
    DELTA,
    FIRST,
    INVERSE,
    LARGE_TOP,
    LAST,
    LIMIT,
    NEVER,
    QUERY_ID,
    TOP,
    slopes,
)
from .softmax import GRADIENT_SCALE
from .visibility import NO_KEY

BLOCK_KEYS = 96
BLOCK_ROWS = 48
PANEL_TILES = 12  # most tiles of BLOCK_ROWS rows that are packed at a time; 32 is no faster


def operands(kernel: Kernel) -> tuple[Operand, ...]:
    """The forward pass's operands and results, the cotangent, and an array whose length is the number of parts.

    With a bias, also zeros, in whose place its gradient is added up.
    """
    value = ("B", "T", "N", kernel.value_head_dim)
    return (
        *kernel.operands,
        Operand("out", kernel.dtype, value),
        Operand("top", "float32", ("B", "T", "N")),
        Operand("total", "float32", ("B", "T", "N")),
        Operand("d_out", kernel.dtype, value),
        Operand("d_lse", "float32", ("B", "T", "N")),
        Operand("parts", "float32", ("L", "P")),
        *([Operand("zeros", "float32", ("BB", "BN", "BT", "BS"))] if kernel.arrays.bias else []),
    )


def results(kernel: Kernel) -> tuple[Operand, ...]:
    """The gradients, in ``kernel.out_dtype``, and scratch memory. Those of what is added to the scores are float32.

    ``d_slope`` has the sum of ``dS`` times distance of each row and part.
    """
    return (
        Operand("d_query", kernel.out_dtype, ("B", "T", "N", kernel.head_dim)),
        Operand("d_key", kernel.out_dtype, ("B", "S", "K", kernel.head_dim)),
        Operand("d_value", kernel.out_dtype, ("B", "S", "K", kernel.value_head_dim)),
        *([Operand("d_bias", "float32", ("BB", "BN", "BT", "BS"))] if kernel.arrays.bias else []),
        *([Operand("d_slope", "float32", ("B", "T", "N", "P"))] if kernel.arrays.alibi else []),
        Operand("scratch", "uint8", ("bytes",)),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Buffers:
    """Where a thread keeps a tile of rows and a block of keys. Offsets and sizes in bytes.

    A product sums over its operands' rows (queries, keys) or along them (the head dimension). Where a term is a pair of
    bfloat16 numbers, these are two layouts: ``key`` and ``key_joined``; ``query`` of the block, which a tile is joined
    from, and of the tile.
    """

    isa: Isa
    kernel: Kernel

    @property
    def pack(self) -> int:
        return self.isa.pack(self.kernel.dtype)

    @property
    def width(self) -> int:
        return rows.padded(self.kernel.head_dim, self.isa)

    @property
    def value_width(self) -> int:
        return rows.padded(self.kernel.value_head_dim, self.isa)

    @property
    def key_terms(self) -> int:
        """Of a row along the head dimension."""
        return rows.padded(self.kernel.head_dim, self.isa, self.pack)

    @property
    def value_terms(self) -> int:
        return rows.padded(self.kernel.value_head_dim, self.isa, self.pack)

    @property
    def block(self) -> tuple[dict[str, int], int]:
        """Of a block of keys, at the start of the workspace."""
        keys, paired = BLOCK_KEYS, self.pack - 1
        records = masking.RECORD * (1 + keys // self.isa.strip)
        return _places(
            key=keys * self.key_terms * 4,
            key_joined=paired * keys // 2 * self.width * 4,
            value=keys * self.value_terms * 4,
            scores=keys * BLOCK_ROWS * 4,
            added=keys * BLOCK_ROWS * 4 * self.kernel.arrays.any,
            d_probs=keys * BLOCK_ROWS * 4,
            by_key=paired * keys // 2 * BLOCK_ROWS * 4,
            position=keys * 4,
            key_id=keys * 4,
            records=records,
            query=paired * BLOCK_ROWS * self.key_terms * 4,
            d_out=paired * BLOCK_ROWS * self.value_terms * 4,
        )

    @property
    def tile(self) -> tuple[dict[str, int], int]:
        """Of a tile of rows; the tiles of a panel follow each other behind the block."""
        n = BLOCK_ROWS
        return _places(
            d_query=n * self.width * 4,
            query=n // self.pack * self.width * 4,
            query_turned=n * self.key_terms * 4,
            d_out=n // self.pack * self.value_width * 4,
            d_out_turned=n * self.value_terms * 4,
            numbers=n * (QUERY_ID + 1) * 4,
            bounds=n // self.isa.group * masking.QUERY_RECORD,
            whole=masking.QUERY_RECORD,
            added_rows=Added.row_bytes(n) * self.kernel.arrays.any,
        )

    def tiles(self, dims: Dims) -> Any:
        """Tiles of rows of one KV head."""
        return (dims["T"] * (dims["N"] // dims["K"]) + (BLOCK_ROWS - 1)) // BLOCK_ROWS

    def panel(self, dims: Dims) -> Any:
        """Tiles of a panel; a head's panels are as equal as can be."""
        count = self.tiles(dims)
        panels = (count + (PANEL_TILES - 1)) // PANEL_TILES
        return (count + (panels - 1)) // panels

    @property
    def gradients(self) -> tuple[dict[str, int], int]:
        """Of the float32 gradients of a block of keys; those of an item follow each other behind the panel."""
        return _places(d_key=BLOCK_KEYS * self.width * 4, d_value=BLOCK_KEYS * self.value_width * 4)

    def gradient_bytes(self, dims: Dims) -> Any:
        """One float32 dQ of one head."""
        return self.tiles(dims) * (BLOCK_ROWS * self.width * 4)

    def several(self, dims: Dims) -> Any:
        """1 where a head has several parts, otherwise 0."""
        return (dims["P"] * 2 - 2) // dims["P"]

    def shared_bytes(self, dims: Dims) -> Any:
        """Room for the dQ of every head and part, where they are added."""
        return dims["B"] * dims["K"] * dims["P"] * self.gradient_bytes(dims) * self.several(dims)

    def worker_bytes(self, dims: Dims) -> Any:
        """The block, a panel, and the gradients of a part's keys."""
        keys = (_blocks(dims) + (dims["P"] - 1)) // dims["P"]
        return self.panel(dims) * self.tile[1] + self.block[1] + keys * self.gradients[1]


def _places(**sizes: int) -> tuple[dict[str, int], int]:
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += aligned(size)
    return offsets, end


def _blocks(dims: Dims) -> Any:
    return (dims["S"] + (BLOCK_KEYS - 1)) // BLOCK_KEYS


def scratch(isa: Isa, kernel: Kernel, dims: Dims) -> tuple[Any, Any]:
    """Bytes of scratch memory that all share, and of one thread."""
    buffers = _Buffers(isa, kernel)
    return buffers.shared_bytes(dims), buffers.worker_bytes(dims)


def build(module: ir.Module, isa: Isa, kernel: Kernel) -> tuple[Program, State]:
    """The program of a backward pass, with its functions in the module."""
    buffers = _Buffers(isa, kernel)
    state = State.of(operands(kernel), results(kernel), 2)
    write = _emit_write(module, buffers, state)
    sets = _sets if kernel.arrays.bias else lambda dims: dims["B"] * dims["K"]
    columns = _emit_columns(module, buffers, state, write)
    add = _emit_add(module, buffers, state, write)
    program = Program(
        operands(kernel),
        results(kernel),
        (
            Phase(lambda dims: sets(dims) * dims["P"], columns),
            Phase(lambda dims: dims["B"] * dims["K"] * buffers.tiles(dims) * buffers.several(dims), add),
        ),
        buffers.shared_bytes,
        buffers.worker_bytes,
        lambda dims: [*fits(dims), *added.fits(kernel.arrays, dims)],
    )
    return program, state


def _sets(dims: Dims) -> Any:
    """Sets of KV heads that share nothing of a bias."""
    batches, kinds, _ = sharing(dims)
    return batches * kinds


def _emit_columns(module: ir.Module, buffers: _Buffers, state: State, write: ir.Function) -> ir.Function:
    """``item(state, workspace, index)``: every ``P``-th key block of a KV head, against all its rows."""
    write_slopes = _emit_write_slopes(module, buffers, state) if buffers.kernel.arrays.alibi else None
    load_tile = _emit_load_tile(module, buffers, state)
    find_rows = (
        Added(buffers.isa, buffers.kernel.arrays, state, BLOCK_ROWS).emit_rows(module)
        if buffers.kernel.arrays.any
        else None
    )
    load_block = _emit_load_block(module, buffers, state)
    step = _emit_step(module, buffers, state)
    store = _emit_store_block(module, buffers, state)
    tile_terms = BLOCK_ROWS * buffers.width
    keep = rows.copy_row(module, buffers.isa, "keep_d_query", "float32", tile_terms)
    fill = rows.fill(module, buffers.isa)
    (of_tile, tile_size), (_, block_size), (_, gradients_size) = buffers.tile, buffers.block, buffers.gradients
    with Function(module, "columns", [ptr, ptr, i64, i64]) as (e, (s, w, head, part)):
        dims = state.dims(s)
        parts, count, most = dims["P"], buffers.tiles(dims), buffers.panel(dims)
        tiles = w.at(block_size)
        gradients = tiles.at(most * tile_size)
        kept = state.pointer(s, "shared").at((head * parts + part) * buffers.gradient_bytes(dims))
        zero, numbers = e.const(f32, 0.0), state.pointer(s, "data:numbers")
        with e.loop(0, count, most) as first:
            panel = e.min(count - first, most)
            with e.loop(0, panel) as i:
                tile = tiles.at(i * tile_size)
                start = (first + i) * BLOCK_ROWS
                e.run(load_tile, s, w, tile, head, start)
                if find_rows is not None:
                    real = e.min(dims["T"] * (dims["N"] // dims["K"]) - start, BLOCK_ROWS)
                    of_rows = tile.at(of_tile["added_rows"])
                    e.run(find_rows, s, head // dims["K"], head % dims["K"], start, real, of_rows)
            with e.loop(part, _blocks(dims), parts) as n:
                of_block = gradients.at(n // parts * gradients_size)
                with e.when(first.equals(0)):
                    e.run(fill, of_block, gradients_size // 4, zero)
                e.run(load_block, s, w, head, n * BLOCK_KEYS)
                with e.loop(0, panel) as i:
                    e.run(step, s, w, tiles.at(i * tile_size), of_block, numbers, n * BLOCK_KEYS)
                with e.when(first + panel >= count):
                    e.run(store, s, of_block, head, n * BLOCK_KEYS)
            with e.loop(0, panel) as i:
                d_query, n = tiles.at(i * tile_size + of_tile["d_query"]), first + i
                e.either(
                    parts.equals(1),
                    lambda d=d_query, n=n: e.run(write, s, d, head, n) and None,
                    lambda d=d_query, n=n: e.run(keep, d, kept.at(n * tile_terms, 4)) and None,
                )
                if write_slopes is not None:
                    e.run(write_slopes, s, tiles.at(i * tile_size + of_tile["added_rows"]), head, n, part)
        e.ret()
    return _emit_sets(module, state, e.function, alone=not buffers.kernel.arrays.bias)


def _emit_sets(module: ir.Module, state: State, columns: ir.Function, *, alone: bool) -> ir.Function:
    """``item(state, workspace, index)``: all KV heads that share a bias, one after the other, so that none waits.

    Each adds to the gradient of the same bias. Where ``alone``, a set is one head.
    """
    with Function(module, "columns_item", [ptr, ptr, i64]) as (e, (s, w, index)):
        dims = state.dims(s)
        of_set, part = index // dims["P"], index % dims["P"]
        if alone:
            e.run(columns, s, w, of_set, part)
        else:
            batches, kinds, together = sharing(dims)
            share = dims["B"] // batches
            with e.loop(0, share) as b, e.loop(0, together) as k:
                head = (of_set // kinds * share + b) * dims["K"] + of_set % kinds + k
                e.run(columns, s, w, head, part)
        e.ret()
    return e.function


def _emit_write_slopes(module: ir.Module, buffers: _Buffers, state: State) -> ir.Function:
    """``write_slopes(state, rows, head, tile, part)``: of a tile's rows, the sums of ``dS`` times distance."""
    extra = Added(buffers.isa, buffers.kernel.arrays, state, BLOCK_ROWS)
    with Function(module, "write_slopes", [ptr, ptr] + [i64] * 3) as (e, (s, rows_, head, tile, part)):
        dims = state.dims(s)
        kv_heads, start = dims["K"], tile * BLOCK_ROWS
        group = dims["N"] // kv_heads
        with e.loop(0, e.min(dims["T"] * group - start, BLOCK_ROWS)) as i:
            place = rows.query_place(e, start + i, head // kv_heads, head % kv_heads, group, dims["T"], dims["N"])
            target = state.pointer(s, "data:d_slope").at(place * dims["P"] + part, 4)
            target.store(extra.distances(rows_).at(i, 4).load(f32))
        e.ret()
    return e.function


def _emit_load_tile(module: ir.Module, buffers: _Buffers, state: State) -> ir.Function:
    """``load_tile(state, workspace, tile, head, start)``: queries and cotangents, also transposed, and their numbers.

    Rows that see nothing, or something that is not finite (their sum is NaN), are packed as zeros, whatever they hold.
    """
    isa, kernel, pack = buffers.isa, buffers.kernel, buffers.pack
    at, of_block = buffers.tile[0], buffers.block[0]
    size, n = elements.SIZE[kernel.dtype], BLOCK_ROWS
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
    with Function(module, "load_tile", [ptr, ptr, ptr, i64, i64]) as (e, (s, w, tile, head, start)):
        dims = state.dims(s)
        heads = dims["N"]
        group, batch = heads // dims["K"], head // dims["K"]
        count = e.min(dims["T"] * group - start, n)
        pointer = {x: state.pointer(s, f"data:{x}") for x in ("query", "d_out", "out", "top", "total", "d_lse")}
        per_query = tile.at(at["numbers"])
        joined = tile.at(at["query"]), tile.at(at["d_out"])
        targets = joined if pack == 1 else (w.at(of_block["query"]), w.at(of_block["d_out"]))
        e.run(fill, tile.at(at["d_query"]), n * buffers.width, e.const(f32, 0.0))
        e.run(fill, targets[0], n * key_terms, e.const(f32, 0.0))
        e.run(fill, targets[1], n * value_terms, e.const(f32, 0.0))
        for name, number in ((TOP, UNSEEN_TOP), (INVERSE, 1.0), (DELTA, 0.0), (LIMIT, NEVER), (D_LSE, 0.0)):
            e.run(fill, per_query.at(name * n, 4), n, e.const(f32, number))
        with e.loop(0, count) as i:
            place = rows.query_place(e, start + i, batch, head % dims["K"], group, dims["T"], heads)
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
        e.run(numbers, s, batch, start, count, n, first, last, query_id, tile.at(at["bounds"]))
        masking.query_bounds(e, first, last, query_id, count, tile.at(at["whole"]))
        e.ret()
    return e.function


def _emit_load_block(module: ir.Module, buffers: _Buffers, state: State) -> ir.Function:
    """``load_block(state, workspace, head, start)``: a block of keys and values, and its bounds.

    A key and its value are packed as zeros if either is not finite: no row with a gradient sees them.
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
    fill = rows.fill(module, isa)
    with Function(module, "load_block", [ptr, ptr, i64, i64]) as (e, (s, w, head, start)):
        dims = state.dims(s)
        length, heads = dims["S"], dims["K"]
        batch = head // heads
        row = batch // (dims["B"] // dims["C"])
        positions, ids = (state.pointer(s, f"data:{x}").at(row * length, 4) for x in ("position", "key_id"))
        with e.loop(0, BLOCK_KEYS) as j:
            slot = e.min(start + j, length - 1)
            name = e.select(start + j < length, ids.at(slot, 4).load(i32), NO_KEY)
            w.at(at["position"]).at(j, 4).store(positions.at(slot, 4).load(i32))
            w.at(at["key_id"]).at(j, 4).store(name)
            place = (batch * length + slot) * heads + head % heads
            sources = [state.pointer(s, f"data:{side}").at(place * depth, size) for side, depth, *_ in sides]
            whole = name.compare("!=", NO_KEY)
            for test, source in zip(finite, sources, strict=True):
                whole = whole & e.run(test, source)
            for (side, _, terms, copy), source in zip(sides, sources, strict=True):
                target = w.at(at[side]).at(j * terms, 4)
                e.either(
                    whole,
                    lambda c=copy, p=source, t=target: e.run(c, p, t) and None,
                    lambda t=target, n=terms: e.run(fill, t, n, e.const(f32, 0.0)) and None,
                )
        if join is not None:
            e.run(join, w.at(at["key"]), w.at(at["key_joined"]), BLOCK_KEYS)
        masking.key_bounds(e, w.at(at["position"]), w.at(at["key_id"]), BLOCK_KEYS, isa.strip, w.at(at["records"]))
        e.ret()
    return e.function


def _emit_step(module: ir.Module, buffers: _Buffers, state: State) -> ir.Function:
    """``step(state, workspace, tile, gradients, numbers, slot)``: a tile of rows against the block of keys at slot."""
    isa, kernel, n, pack = buffers.isa, buffers.kernel, BLOCK_ROWS, buffers.pack
    width, value_width = buffers.width, buffers.value_width
    score = Scores.of(module, isa, "score", kernel.head_dim, buffers.key_terms, n, pack)
    d_prob = score
    if buffers.value_terms != buffers.key_terms:
        d_prob = Scores.of(module, isa, "d_prob", kernel.value_head_dim, buffers.value_terms, n, pack)
    elif kernel.value_head_dim != kernel.head_dim:
        d_prob = dataclasses.replace(score, depth=-(-kernel.value_head_dim // pack))
    to_key = Weighted.of(module, isa, "to_key", width, (n, 1), pack)
    to_value = to_key
    if value_width != width:
        to_value = Weighted.of(module, isa, "to_value", value_width, (n, 1), pack)
    to_query = Weighted.of(module, isa, "to_query", width, (1, n), pack)
    extra = Added(isa, kernel.arrays, state, n)
    modify = extra.modified if kernel.arrays.score is not None else None
    options: dict[str, Any] = {"soft_cap": kernel.soft_cap, "pack": pack, "added": kernel.arrays.any, "modify": modify}
    plain, masked = (slopes(module, isa, n, mixed=mixed, **options) for mixed in (False, True))
    fetch = extra.emit_fetch(module) if kernel.arrays.any else None
    keep = extra.emit_gradient(module) if kernel.arrays.bias or kernel.arrays.alibi else None
    of_block, of_tile, of_gradients = buffers.block[0], buffers.tile[0], buffers.gradients[0]
    with Function(module, "step", [ptr] * 5 + [i64]) as (e, (s_, w, tile, gradients, numbers, slot)):
        block = {name: w.at(offset) for name, offset in of_block.items()}
        rows_ = {name: tile.at(offset) for name, offset in of_tile.items()}
        d_key, d_value = (gradients.at(of_gradients[name]) for name in ("d_key", "d_value"))
        live = masking.live_keys(e, rows_["whole"], block["records"], BLOCK_KEYS, isa.strip)
        with e.when(live.any):
            with e.loop(0, n, isa.group) as g:
                s, d = block["scores"].at(g, 4), block["d_probs"].at(g, 4)
                of_group = s_, rows_["added_rows"], g, block["position"], slot, live.start, live.stop
                to_add = [block["added"].at(g, 4)] * kernel.arrays.any
                if fetch is not None:
                    e.run(fetch, *of_group, *to_add)
                score.emit(e, block["key"], rows_["query_turned"].at(g, 4), s, live.start, live.stop)
                d_prob.emit(e, block["value"], rows_["d_out_turned"].at(g, 4), d, live.start, live.stop)
                per_query = rows_["numbers"].at(g, 4)
                places = (block["by_key"].at(g, 4), per_query, block["position"], block["key_id"])
                modified = [] if modify is None else [rows_["added_rows"].at(g, 4)]
                arguments = (s, d, *places, numbers, *to_add, *modified, live.start, live.stop)
                e.either(
                    live.mixed,
                    lambda a=arguments: e.run(masked, *a) and None,
                    lambda a=arguments: e.run(plain, *a) and None,
                )
                if keep is not None:
                    e.run(keep, *of_group, *to_add)
            keys, all_rows = (live.start, live.stop), (0, n)
            to_value.emit(e, block["scores"], rows_["d_out"], d_value, keys, all_rows)
            to_key.emit(e, block["d_probs"], rows_["query"], d_key, keys, all_rows)
            by_key = (block["d_probs"], block["key"]) if pack == 1 else (block["by_key"], block["key_joined"])
            to_query.emit(e, *by_key, rows_["d_query"], all_rows, keys)
        e.ret()
    return e.function


def _emit_store_block(module: ir.Module, buffers: _Buffers, state: State) -> ir.Function:
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
        e.ret()
    return e.function


def _emit_write(module: ir.Module, buffers: _Buffers, state: State) -> ir.Function:
    """``write(state, source, head, tile)``: one tile of dq, times the softmax scale."""
    isa, kernel, width = buffers.isa, buffers.kernel, buffers.width
    size = elements.SIZE[kernel.out_dtype]
    write_row = rows.write_row(module, isa, "write_d_query", kernel.out_dtype, kernel.head_dim)
    with Function(module, "write", [ptr, ptr, i64, i64]) as (e, (s, source, head, tile)):
        dims = state.dims(s)
        heads, kv_heads, start = dims["N"], dims["K"], tile * BLOCK_ROWS
        group = heads // kv_heads
        scale = state.pointer(s, "data:numbers").at(GRADIENT_SCALE).load(f32)
        with e.loop(0, e.min(dims["T"] * group - start, BLOCK_ROWS)) as i:
            place = rows.query_place(e, start + i, head // kv_heads, head % kv_heads, group, dims["T"], heads)
            target = state.pointer(s, "data:d_query").at(place * kernel.head_dim, size)
            e.run(write_row, source.at(i * width, 4), target, scale)
        e.ret()
    return e.function


def _emit_add(module: ir.Module, buffers: _Buffers, state: State, write: ir.Function) -> ir.Function:
    """``item(state, workspace, index)``: one tile of dq, the sum of its parts in their order."""
    tile = BLOCK_ROWS * buffers.width
    type_ = vector(f32, buffers.isa.lanes)
    with Function(module, "add_item", [ptr, ptr, i64]) as (e, (s, _, index)):
        dims = state.dims(s)
        count, parts = buffers.tiles(dims), dims["P"]
        head, n = index // count, index % count
        whole = buffers.gradient_bytes(dims)
        first: Value = state.pointer(s, "shared").at(head * parts * whole).at(n * tile, 4)
        with e.loop(1, parts) as p, e.loop(0, tile, buffers.isa.lanes) as d:
            place = first.at(d, 4)
            place.store(place.load(type_) + first.at(p * whole).at(d, 4).load(type_))
        e.run(write, s, first, head, n)
        e.ret()
    return e.function
