"""The forward kernel: output, and for the backward pass the maximum and sum of every row's softmax.

Keys and values are packed head by head as terms (``panels.py``), contiguous, padded with zeros to whole blocks. An
item is a block of keys to pack, or a tile of query rows of one KV head: all key blocks that the tile's groups of
queries see, with an online softmax. KV heads are taken in groups of ``P``: a stage computes the tiles of one group and
packs the next. So only two groups need room, and stay in the cache. The large items come first: within a head tiles run
from the last rows, which see most under a causal mask, to the first.

A query row that is not finite, and a row that sees such a key or value, has a sum of NaN, and with it an output and a
log-sum-exp of NaN. What is not finite itself enters no product, so that no other row changes.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from llvmlite import ir

from . import added, masking, rows
from .added import Added, Arrays
from .emit import Function, Value, f32, i32, i64, offsets, ptr, vector
from .handler import Dims, Operand, Phase, Signature, State
from .isa import Isa
from .panels import Blocks, emit_pack, emit_row_numbers, head_groups
from .products import Scores, Weighted
from .running_sums import RunningSums
from .softmax import HIDDEN, UNSEEN_TOP, softmax

BLOCK_KEYS = 96
_OF_GROUP = ("top", "total", "decay", "first", "last", "query_id")  # in the order of the softmax function's arguments


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """The choices that a kernel is compiled for. ``out_dtype`` is the output's (float32 if parts are merged later).

    ``arrays`` are those of ``added.py``.
    """

    dtype: str
    head_dim: int
    value_head_dim: int
    soft_cap: bool
    out_dtype: str
    arrays: Arrays = Arrays()  # noqa: RUF009 (a frozen value)

    @property
    def operands(self) -> tuple[Operand, ...]:
        """:func:`operands`, and what is added."""
        return (*operands(self.dtype, self.head_dim, self.value_head_dim), *self.arrays.operands)

    @property
    def out(self) -> Operand:
        """The output."""
        return Operand("out", self.out_dtype, ("B", "T", "N", self.value_head_dim))


SUMS = tuple(Operand(name, "float32", ("B", "T", "N")) for name in ("top", "total"))  # maximum and sum per row


def operands(
    dtype: str,
    head_dim: int,
    value_head_dim: int,
    lies: tuple[str | int, ...] = ("B", "S", "K"),
    kv_dtype: str | None = None,
) -> tuple[Operand, ...]:
    """Query, key, value, then the arrays of ``visibility.Visibility``, and the numbers: what all kernels are given."""
    return (
        Operand("query", dtype, ("B", "T", "N", head_dim)),
        Operand("key", kv_dtype or dtype, (*lies, head_dim)),
        Operand("value", kv_dtype or dtype, (*lies, value_head_dim)),
        Operand("first", "int32", ("C", "T")),
        Operand("last", "int32", ("C", "T")),
        Operand("query_id", "int32", ("C", "T")),
        Operand("position", "int32", ("C", "S")),
        Operand("key_id", "int32", ("C", "S")),
        Operand("numbers", "float32", ("M",)),
    )


def fits(dims: Dims) -> list[tuple[Any, str]]:
    """Conditions on the shapes that no single operand's dims express."""
    divided = [(dims["P"] >= 1, "the operand whose length divides the work is empty.")] if "P" in dims else []
    return [
        ((dims["N"] % dims["K"]).equals(0), "the query heads are not a multiple of the KV heads."),
        ((dims["B"] % dims["C"]).equals(0), "the layout's rows do not divide the batch."),
        *divided,
    ]


def block_rows(isa: Isa) -> int:
    """Query rows per tile: as many groups as make about 96 rows; with tile registers one group, which is faster."""
    return isa.group * (1 if isa.tiles else max(1, 96 // isa.group))


def workspace(isa: Isa, kernel: Kernel, keys: int) -> tuple[dict[str, int], int]:
    """Byte offsets of a thread's buffers, and their size, with room for the scores of ``keys`` keys."""
    queries = block_rows(isa)
    width = rows.padded(kernel.head_dim, isa, isa.pack(kernel.dtype))
    value_width = rows.padded(kernel.value_head_dim, isa)
    return offsets(
        query=queries * width * 4,
        # Also pairs of values while they are packed (panels.py).
        scores=max(max(keys, width) * queries, rows.padded(keys, isa, 2) * value_width) * 4,
        added=keys * queries * 4 * kernel.arrays.any,
        added_rows=Added.row_bytes(queries) * kernel.arrays.any,
        out=queries * value_width * 4,
        earlier_out=queries * value_width * 4,
        **dict.fromkeys(("top", "total", "earlier_total", "decay", "first", "last", "query_id"), queries * 4),
        bounds=queries // isa.group * masking.QUERY_RECORD,
    )


def packed(isa: Isa, kernel: Kernel) -> Blocks:
    """The blocks of packed keys and values."""
    return Blocks(isa, kernel.dtype, BLOCK_KEYS, isa.strip, kernel.head_dim, kernel.value_head_dim, in_stages=True)


def signature(isa: Isa, kernel: Kernel) -> Signature:
    """How XLA calls a forward pass; the length of ``group`` is the heads of a stage."""
    return Signature(
        (*kernel.operands, Operand("group", "float32", ("L", "P"))),
        (kernel.out, *SUMS),
        packed(isa, kernel).shared_bytes,
        lambda _: workspace(isa, kernel, BLOCK_KEYS)[1],
        lambda dims: [*fits(dims), *added.fits(kernel.arrays, dims)],
        phases=1,
    )


def phases(module: ir.Module, isa: Isa, kernel: Kernel, state: State) -> tuple[Phase, ...]:
    """The phase of a forward pass, with its functions in the module."""
    blocks = packed(isa, kernel)
    queries = block_rows(isa)
    pack = emit_pack(module, isa, kernel.dtype, blocks, state)
    tile = _emit_tile_item(module, isa, kernel, blocks, state)

    def items(dims: Dims) -> Any:
        return dims["P"] * (blocks.count(dims) + tiles(dims, queries))

    with Function(module, "stage_item", [ptr, ptr, i64]) as (e, (s, w, index)):
        dims = state.dims(s)
        stage, i = index // items(dims), index % items(dims)
        heads, of_stage = dims["B"] * dims["K"], dims["P"] * tiles(dims, queries)
        to_compute = (stage - 1) * of_stage + i
        to_pack = stage * dims["P"] * blocks.count(dims) + (i - of_stage)
        with e.when((i < of_stage) & (stage > 0) & (to_compute < heads * tiles(dims, queries))):
            e.run(tile, s, w, to_compute)
        with e.when((i >= of_stage) & (to_pack < heads * blocks.count(dims))):
            e.run(pack, s, w, to_pack)
    return (Phase(items, e.function, lambda dims: head_groups(dims) + 1),)


def tiles(dims: Dims, queries: int) -> Any:
    """Tiles of query rows of one KV head."""
    return (dims["T"] * (dims["N"] // dims["K"]) + (queries - 1)) // queries


def _emit_tile_item(module: ir.Module, isa: Isa, kernel: Kernel, blocks: Blocks, state: State) -> ir.Function:
    """``item(state, workspace, index)``: one tile of query rows of one KV head."""
    queries, at = block_rows(isa), workspace(isa, kernel, BLOCK_KEYS)[0]
    read = emit_read(module, isa, kernel, state, at)
    extra = Added(isa, kernel.arrays, state, queries) if kernel.arrays.any else None
    attend = emit_attend(module, isa, kernel, blocks, at, extra=extra)
    write = emit_write(module, isa, kernel, state, at)
    find_rows = None if extra is None else extra.emit_rows(module)
    with Function(module, "tile_item", [ptr, ptr, i64]) as (e, (s, w, index)):
        dims = state.dims(s)
        per_head = tiles(dims, queries)
        head, tile = index // per_head, per_head - 1 - index % per_head
        start = tile * queries
        count = e.min(dims["T"] * (dims["N"] // dims["K"]) - start, queries)
        e.run(read, s, w, head, start, count)
        if find_rows is not None:
            e.run(find_rows, s, head // dims["K"], head % dims["K"], start, count, w.at(at["added_rows"]))
        extra_state = [] if extra is None else [s]
        e.run(attend, w, *of_head(blocks, state, s, dims, head), *extra_state, blocks.count(dims))
        e.run(write, s, w, head, start, count)
    return e.function


def of_head(blocks: Blocks, state: State, s: Value, dims: Dims, head: Value) -> tuple[Value, ...]:
    """Pointers to a head's packed keys, values and marks, its layout's positions, ids, records, and to the numbers."""
    row, shared = head // dims["K"] // (dims["B"] // dims["C"]), state.pointer(s, "shared")
    of_head_ = (blocks.place(name, shared, dims, head) for name in ("keys", "values", "spoilt"))
    of_row = (blocks.place(name, shared, dims, row) for name in ("positions", "ids", "records"))
    return *of_head_, *of_row, state.pointer(s, "data:numbers")


def emit_read(module: ir.Module, isa: Isa, kernel: Kernel, state: State, at: dict[str, int]) -> ir.Function:
    """``read(state, workspace, head, start, count)``: the tile's queries transposed, its intervals, a fresh softmax."""
    queries, pack = block_rows(isa), isa.pack(kernel.dtype)
    width, value_width = rows.padded(kernel.head_dim, isa, pack), rows.padded(kernel.value_head_dim, isa)
    copy = rows.copy_row(module, isa, "copy_query", kernel.dtype, kernel.head_dim, pack)
    finite = rows.finite(module, isa, "finite_query", kernel.dtype, kernel.head_dim)
    turn = rows.transpose(module, isa, "transpose_query", queries, width)
    fill = rows.fill(module, isa)
    numbers = emit_row_numbers(module, isa, state)
    size = 4 if kernel.dtype == "float32" else 2
    with Function(module, "read", [ptr, ptr, i64, i64, i64]) as (e, (s, w, head, start, count)):
        dims = state.dims(s)
        plain = w.at(at["scores"])  # free until the first block
        query = state.pointer(s, "data:query")
        e.run(fill, w.at(at["total"]), queries, e.const(f32, 0.0))
        with rows.each_query(e, dims, head, start, count) as (i, place):
            source, target = query.at(place * kernel.head_dim, size), plain.at(i * width, 4)
            whole = e.run(finite, source)
            rows.copy_or_zeros(e, isa, whole, copy, source, target, width)
            w.at(at["total"]).at(i, 4).store(e.select(whole, e.const(f32, 0.0), math.nan))
        e.run(fill, plain.at(count * width, 4), (e.const(i64, queries) - count) * width, e.const(f32, 0.0))
        e.run(turn, plain, w.at(at["query"]))
        e.run(fill, w.at(at["out"]), queries * value_width, e.const(f32, 0.0))
        e.run(fill, w.at(at["top"]), queries, e.const(f32, HIDDEN))
        to_numbers = (w.at(at[n]) for n in ("first", "last", "query_id", "bounds"))
        e.run(numbers, s, head // dims["K"], start, count, queries, *to_numbers)
    return e.function


def emit_attend(
    module: ir.Module,
    isa: Isa,
    kernel: Kernel,
    blocks: Blocks,
    at: dict[str, int],
    *,
    listed: bool = False,
    pooled: bool = False,
    extra: Added | None = None,
) -> ir.Function:
    """``attend(workspace, keys, values, spoilt, positions, ids, records, numbers, blocks)``: the tile, all key blocks.

    Where ``listed``, over the blocks that a list of int32 names: another pointer, before the number of blocks. Where
    ``pooled``, two more: of each block and row, the sum of its weights and the maximum that the sum is relative to.
    With ``extra``, the state. Without values (dimension 0) there is no output.
    """
    queries, keys_per_block, type_ = block_rows(isa), blocks.keys_per_block, vector(f32, isa.lanes)
    value_width, pack = blocks.value_width, blocks.pack if kernel.value_head_dim else 1
    scores = Scores.of(module, isa, "score", kernel.head_dim, blocks.key_width, queries, blocks.pack)
    modify = extra.modified if extra is not None and kernel.arrays.score is not None else None
    plain, masked = (
        softmax(
            module,
            isa,
            queries,
            mixed=mixed,
            soft_cap=kernel.soft_cap,
            pack=pack,
            pooled=pooled,
            added=kernel.arrays.any,
            modify=modify,
        )
        for mixed in (False, True)
    )
    fetch = None if extra is None else extra.emit_fetch(module)
    weigh = Weighted.of(module, isa, "value", value_width, (1, queries), pack, blocks.turned)
    stride = queries if kernel.arrays.any else None
    spoil, fill = _emit_spoil(module, isa, stride), rows.fill(module, isa)
    sums = RunningSums(module, isa, at, queries, value_width)
    with Function(module, "attend", [ptr] * (8 + listed + 2 * pooled + kernel.arrays.any) + [i64]) as (e, arguments):
        w, keys, values, spoilt, positions, ids, records, numbers, *more, count = arguments
        with sums.of_blocks(e, w, count) as i:
            n = more[0].at(i, 4).load(i32).integer(i64) if listed else i
            k, v = keys.at(n * blocks.key_terms, 4), values.at(n * blocks.value_terms, 4)
            block = (positions.at(n * keys_per_block, 4), ids.at(n * keys_per_block, 4))
            marks = spoilt.at(n * blocks.spoilt_numbers, 4)
            with e.loop(0, queries, isa.group) as g:
                bounds = w.at(at["bounds"]).at(g // isa.group * masking.QUERY_RECORD)
                record = records.at(n * blocks.record_bytes)
                live = masking.live_keys(e, bounds, record, keys_per_block, blocks.strip)
                pools = [x.at(n * queries + g, 4) for x in more[-2:]] if pooled else []
                for pool, nothing in zip(pools, (0.0, HIDDEN), strict=False):
                    e.run(fill, pool, isa.group, e.const(f32, nothing))
                some, to_add = live.any, []
                if fetch is not None:
                    to_add, any_visible = [w.at(at["added"]).at(g, 4)], e.variable(some)
                    with e.when(some):
                        of_rows, slot = w.at(at["added_rows"]), n * blocks.keys
                        of_block = block[0], slot, live.start, live.stop
                        any_visible.set(e.run(fetch, more[-1], of_rows, g, *of_block, *to_add))
                    some = any_visible()
                with e.when(some):
                    s = w.at(at["scores"]).at(g, 4)
                    scores.emit(e, k, w.at(at["query"]).at(g, 4), s, live.start, live.stop)
                    running = {name: w.at(at[name]).at(g, 4) for name in _OF_GROUP}
                    of_group = [] if modify is None else [w.at(at["added_rows"]).at(g, 4)]
                    visited = (live.start, live.stop)
                    inputs = (s, *running.values(), *block, numbers, *to_add, *of_group, *pools[:1], *visited)
                    raised = e.variable(e.const(ir.IntType(1), 0))
                    e.either(
                        live.mixed,
                        lambda a=inputs, r=raised: r.set(e.run(masked, *a)),
                        lambda a=inputs, r=raised: r.set(e.run(plain, *a)),
                    )
                    with e.when(raised()):
                        sums.rescale(e, w, i, g, running["decay"])
                    for to_top in pools[1:]:
                        for lane in range(0, isa.group, isa.lanes):
                            to_top.at(lane, 4).store(running["top"].at(lane, 4).load(type_))
                    if value_width:
                        out = sums.of_group(w.at(at["out"]), g)
                        weigh.emit(e, s, v, out, (0, isa.group), visited)
                        with e.when(marks.load(i32).compare("!=", 0)):
                            seen_by = (running[name] for name in ("first", "last", "query_id"))
                            e.run(spoil, marks, running["total"], *seen_by, *block, *to_add, *visited)
    return e.function


def _emit_spoil(module: ir.Module, isa: Isa, stride: int | None) -> ir.Function:
    """``spoil(spoilt, total, first, last, query_id, positions, ids, start, stop)``: of a group, over some keys.

    The sum of a row that sees a key that is not finite becomes NaN. With a ``stride``, another pointer after ``ids`` is
    to what is added to each score.
    """
    type_ = vector(f32, isa.lanes)
    with Function(module, "spoil", [ptr] * (7 + (stride is not None)) + [i64] * 2) as (e, arguments):
        spoilt, total, first, last, query_id, positions, ids, *to_add, start, stop = arguments
        lanes = masking.Lanes.of(isa, first, last, query_id)
        with e.loop(start, stop) as k, e.when(spoilt.at(k + 1, 4).load(i32).compare("!=", 0)):
            position, name = (x.at(k, 4).load(i32) for x in (positions, ids))
            for v in range(isa.score_vectors):
                place, seen = total.at(v * isa.lanes, 4), lanes.see(e, isa, v, position, name)
                for terms in to_add:
                    hidden = terms.at(k * (stride or 0) + v * isa.lanes, 4).load(type_) <= HIDDEN / 2
                    seen = seen & hidden.equals(0)
                place.store(e.select(seen, e.const(type_, math.nan), place.load(type_)))
    return e.function


def emit_write(module: ir.Module, isa: Isa, kernel: Kernel, state: State, at: dict[str, int]) -> ir.Function:
    """``write(state, workspace, head, start, count)``: output over sum; a row that saw nothing is zero."""
    value_width = rows.padded(kernel.value_head_dim, isa)
    put = rows.write_row(module, isa, "write_out", kernel.out_dtype, kernel.value_head_dim)
    turn = rows.transpose(module, isa, "transpose_out", value_width, block_rows(isa)) if isa.tiles else None
    size = 4 if kernel.out_dtype == "float32" else 2
    with Function(module, "write", [ptr, ptr, i64, i64, i64]) as (e, (s, w, head, start, count)):
        out, tops, totals = (state.pointer(s, f"data:{n}") for n in ("out", "top", "total"))
        one, plain = e.const(f32, 1.0), w.at(at["out"])
        if turn is not None:
            plain = w.at(at["earlier_out"])  # added to the output by now
            e.run(turn, w.at(at["out"]), plain)
        with rows.each_query(e, state.dims(s), head, start, count) as (i, place):
            total, top = (w.at(at[n]).at(i, 4).load(f32) for n in ("total", "top"))
            unseen = top <= HIDDEN / 2
            e.run(
                put,
                plain.at(i * value_width, 4),
                out.at(place * kernel.value_head_dim, size),
                e.select(unseen, e.const(f32, 0.0), one / total),
            )
            tops.at(place, 4).store(e.select(unseen, e.const(f32, UNSEEN_TOP), top))
            totals.at(place, 4).store(e.select(unseen, one, total))
    return e.function
