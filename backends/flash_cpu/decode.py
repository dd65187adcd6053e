"""The decode kernel: a few query rows against a long cache. Its time is that of reading keys and values.

One item is a range of the keys of one KV head, or of all KV heads where their keys of a slot lie side by side
(``"NHD"``): memory is read in its order in both. An item reads every key and value that some row sees once for all rows
(tokens times the heads of a group), in place and in their own dtype::

    s[r, k] = sum_d Q[r, d] K[k, d]     lanes over d, 4 keys one by one (2 with AVX2), summed across lanes by a tree
    O[r, d] += sum_k 2**(s[r, k] - m[r]) V[k, d]     lanes over d

Each range ends with its own maximum, sum and output per row. Phase 2 merges the ranges of a head in their order.
A block of keys that no row sees is not read, nor any value that no row sees.

While a block's keys are scored its values are fetched, for all heads of the item, and the next block's keys while its
values are weighed (without values, while its keys are scored). The arithmetic would otherwise wait for memory, and
memory for the arithmetic. Keys and values are touched for the first time row by row in the order of memory: a processor
fetches ahead well only then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from llvmlite import ir

from . import elements, rows
from .emit import Function, Value, aligned, f32, i32, i64, ptr, vector
from .forward import UNSEEN_TOP, fits
from .handler import Dims, Operand, Phase, Program, State
from .isa import Isa
from .products import split
from .softmax import HIDDEN, SCALE, capped

BLOCK_KEYS = 64
WEIGHED_KEYS = 16  # whose values meet all rows before the next keys' do, so that they stay in the first cache
MOST_ROWS_PER_TILE = 4


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeKernel:
    """What a decode kernel is compiled for.

    ``side_by_side``: keys and values lie ``[B, S, K, D]`` with so many KV heads; 0: they lie ``[B, K, S, D]``.
    ``sums``: each row's maximum and sum are results too, as in the forward pass. ``out_dtype`` is the output's.
    """

    dtype: str
    head_dim: int
    value_head_dim: int
    soft_cap: bool
    rows_per_tile: int
    side_by_side: int
    out_dtype: str
    sums: bool = False

    @property
    def operands(self) -> tuple[Operand, ...]:
        """As in the forward pass, and an array whose length is the number of ranges."""
        lies = ("B", "S", "K") if self.side_by_side else ("B", "K", "S")
        return (
            Operand("query", self.dtype, ("B", "T", "N", self.head_dim)),
            Operand("key", self.dtype, (*lies, self.head_dim)),
            Operand("value", self.dtype, (*lies, self.value_head_dim)),
            Operand("first", "int32", ("C", "T")),
            Operand("last", "int32", ("C", "T")),
            Operand("query_id", "int32", ("C", "T")),
            Operand("position", "int32", ("C", "S")),
            Operand("key_id", "int32", ("C", "S")),
            Operand("numbers", "float32", ("M",)),
            Operand("ranges", "float32", ("L", "P")),
        )

    @property
    def results(self) -> tuple[Operand, ...]:
        """Output, where asked for maximum and sum per row, and scratch memory."""
        sums = ("top", "total") if self.sums else ()
        return (
            Operand("out", self.out_dtype, ("B", "T", "N", self.value_head_dim)),
            *(Operand(name, "float32", ("B", "T", "N")) for name in sums),
            Operand("scratch", "uint8", ("bytes",)),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Buffers:
    """A thread's buffers: per row and in all. Sizes in elements of four bytes."""

    isa: Isa
    kernel: DecodeKernel

    @property
    def width(self) -> int:
        """Numbers of a row of keys, in whole vectors."""
        return rows.padded(self.kernel.head_dim, self.isa)

    @property
    def value_width(self) -> int:
        """Numbers of a row of values, in whole vectors."""
        return rows.padded(self.kernel.value_head_dim, self.isa)

    @property
    def partial(self) -> int:
        """What a range leaves of a row: output, maximum, sum."""
        return self.value_width + self.isa.lanes

    def padded_rows(self, dims: Dims) -> Any:
        """Rows of a KV head, in whole tiles."""
        n = self.kernel.rows_per_tile
        return (dims["T"] * (dims["N"] // dims["K"]) + (n - 1)) // n * n

    def shared_bytes(self, dims: Dims) -> Any:
        """Bytes of what the ranges leave."""
        return dims["B"] * dims["K"] * dims["P"] * self.padded_rows(dims) * (self.partial * 4)

    @property
    def flags(self) -> int:
        """Byte offset of the flags of a block's keys, behind the widened keys."""
        return aligned(self.isa.lanes * self.width * 4)

    @property
    def widens_keys(self) -> bool:
        """Whether a key ends inside a vector: then a few keys at a time are copied first."""
        return self.width != self.kernel.head_dim

    @property
    def widens_values(self) -> bool:
        """Whether a row of values ends inside a vector: then a block of them is copied first."""
        return self.value_width != self.kernel.value_head_dim

    @property
    def values(self) -> int:
        """Byte offset of the copied block of values."""
        return self.flags + aligned(BLOCK_KEYS * 4)

    @property
    def fixed(self) -> int:
        """Bytes before the rows."""
        return self.values + (BLOCK_KEYS * self.value_width * 4 if self.widens_values else 0)

    @property
    def per_row(self) -> int:
        """Bytes: query, scores, products, interval and id."""
        return (self.width + 2 * BLOCK_KEYS + self.isa.lanes) * 4

    def head_bytes(self, dims: Dims) -> Any:
        """Bytes of a thread's buffers for one KV head."""
        return self.padded_rows(dims) * self.per_row + self.fixed

    @property
    def heads(self) -> int:
        """KV heads of an item."""
        return self.kernel.side_by_side or 1

    def worker_bytes(self, dims: Dims) -> Any:
        """Bytes of a thread's buffers."""
        return self.head_bytes(dims) * self.heads


def scratch(isa: Isa, kernel: DecodeKernel, dims: Dims) -> tuple[Any, Any]:
    """Bytes of scratch memory that all share, and of one thread."""
    buffers = Buffers(isa, kernel)
    return buffers.shared_bytes(dims), buffers.worker_bytes(dims)


def build(module: ir.Module, isa: Isa, kernel: DecodeKernel) -> tuple[Program, State]:
    """The program of a decode step, with its functions in the module."""
    buffers = Buffers(isa, kernel)
    state = State.of(kernel.operands, kernel.results, 2)
    program = Program(
        kernel.operands,
        kernel.results,
        (
            Phase(
                lambda dims: dims["B"] * dims["K"] // buffers.heads * dims["P"],
                _emit_range(module, buffers, state),
            ),
            Phase(lambda dims: dims["B"] * dims["K"], emit_join(module, buffers, state)),
        ),
        buffers.shared_bytes,
        buffers.worker_bytes,
        fits,
    )
    return program, state


class _Rows:
    """Pointers into a thread's rows: query, scores, products, and (first, last, id)."""

    def __init__(self, buffers: Buffers, workspace: Value) -> None:
        self._rows, self._buffers = workspace.at(buffers.fixed), buffers

    def query(self, row: Any) -> Value:
        return self._rows.at(row, self._buffers.per_row)

    def scores(self, row: Any) -> Value:
        return self.query(row).at(self._buffers.width, 4)

    def products(self, row: Any) -> Value:
        return self.scores(row).at(BLOCK_KEYS, 4)

    def number(self, row: Any, n: int) -> Value:
        return self.products(row).at(BLOCK_KEYS + n, 4)


def _strides(kernel: DecodeKernel, dims: Dims, width: int) -> tuple[Any, Any, int]:
    """Elements from one sequence, KV head and key to the next."""
    if kernel.side_by_side:
        return dims["S"] * (kernel.side_by_side * width), width, kernel.side_by_side * width
    return dims["K"] * dims["S"] * width, dims["S"] * width, width


class Walk:
    """What the items of a decode step do with a block of keys: the functions of this file, in the module."""

    def __init__(self, module: ir.Module, buffers: Buffers, state: State) -> None:
        self.buffers, self.state = buffers, state
        self.read = _emit_read(module, buffers, state)
        self._see, self._score = _emit_see(module, buffers), _emit_score(module, buffers)
        self._soften = _emit_soften(module, buffers)
        shapes = {shape for _, _, shape in _tiles(buffers)} if buffers.kernel.value_head_dim else ()
        self._weigh = {shape: _emit_weigh(module, buffers, *shape) for shape in shapes}
        self._widen = _emit_widen(module, buffers) if buffers.widens_values else None

    def partial(self, s: Value, index: Value) -> Value:
        """What range ``index`` leaves, numbered over the KV heads."""
        whole = self.buffers.padded_rows(self.state.dims(s)) * self.buffers.partial
        return self.state.pointer(s, "shared").at(index * whole, 4)

    def start(self, e: Function, s: Value, w: Value, first: Value, partial: Callable[[Value], Value]) -> None:
        """Reads the rows of the item's KV heads, ``first`` and those behind it; ``partial(n)`` is the result of one."""
        dims = self.state.dims(s)
        with e.loop(0, self.buffers.heads) as n:
            e.run(self.read, s, w.at(n * self.buffers.head_bytes(dims)), partial(n), first + n)

    def of_heads(
        self, e: Function, s: Value, w: Value, first: Value
    ) -> Callable[[Callable[[Value], Value], Value, Value, Value], None]:
        """``walk(partial, start, stop, ahead)`` emits a loop over the keys from ``start`` to ``stop`` of these heads.

        ``ahead`` is the slot whose keys come after these. Each head of a block fetches as many rows of what comes next,
        in the order of memory: together they fetch all of it.
        """
        buffers, kernel, dims = self.buffers, self.buffers.kernel, self.state.dims(s)
        size, padded = elements.SIZE[kernel.dtype], buffers.padded_rows(dims)
        batch, heads, own = first // dims["K"], buffers.heads, buffers.head_bytes(dims)
        layout = batch // (dims["B"] // dims["C"]) * dims["S"]
        positions, ids = (self.state.pointer(s, f"data:{x}").at(layout, 4) for x in ("position", "key_id"))
        numbers = self.state.pointer(s, "data:numbers")
        count = dims["T"] * (dims["N"] // dims["K"])

        def side(name: str, width: int) -> _Side:
            by_batch, by_head, by_key = _strides(kernel, dims, width)
            at = self.state.pointer(s, f"data:{name}").at(batch * by_batch + first % dims["K"] * by_head, size)
            return _Side(at, by_head * size, by_key * size, width * size)

        keys = side("key", kernel.head_dim)
        values = side("value", kernel.value_head_dim) if kernel.value_head_dim else keys

        def walk(partial: Callable[[Value], Value], start: Value, stop: Value, ahead: Value) -> None:
            with e.loop(start, stop, BLOCK_KEYS) as k:
                n = e.min(stop - k, BLOCK_KEYS)
                after = e.select(k + n < stop, k + n, ahead)
                seen = e.variable(e.const(i64, 0))
                with e.loop(0, heads) as h:
                    row = w.at(h * own)
                    seen.set(e.run(self._see, row, positions.at(k, 4), ids.at(k, 4), n, count))
                    with e.when(seen() > 0):
                        fetched = values.fetched(k, h) if kernel.value_head_dim else keys.fetched(after, h)
                        e.run(
                            self._score,
                            row,
                            keys.of(k, h),
                            e.const(i64, keys.by_key),
                            fetched,
                            e.const(i64, values.width),
                            padded,
                            n,
                        )
                        with e.loop(0, count) as r:
                            e.run(self._soften, row, r, partial(h).at(r * buffers.partial, 4), numbers)
                if kernel.value_head_dim:
                    with e.when(seen() > 0), e.loop(0, heads) as h:
                        self._add(
                            e,
                            w.at(h * own),
                            partial(h),
                            values.of(k, h),
                            e.const(i64, values.by_key),
                            keys.fetched(after, h),
                            padded,
                            n,
                        )

        return walk

    def _add(
        self,
        e: Function,
        w: Value,
        partial: Value,
        block: Value,
        step: Value,
        following: Value,
        padded: Value,
        n: Value,
    ) -> None:
        """Adds a block's weighted values to the partial result."""
        buffers, size = self.buffers, elements.SIZE[self.buffers.kernel.dtype]
        element, tile, ahead = size, buffers.kernel.rows_per_tile, e.const(i64, buffers.kernel.head_dim * size)
        if self._widen is not None:
            e.run(self._widen, w, block, step, n)
            block, step, element = w.at(buffers.values), e.const(i64, buffers.value_width * 4), 4
        with e.loop(0, n, WEIGHED_KEYS) as first, e.loop(0, padded, tile) as r:
            last = e.min(first + WEIGHED_KEYS, n)
            for below, column, shape in _tiles(buffers):
                out = partial.at((r + below) * buffers.partial + column, 4)
                columns = (block.at(column, element), step, following.at(column, size), ahead)
                e.run(self._weigh[shape], w, r + below, *columns, out, first, last)


@dataclasses.dataclass(frozen=True, slots=True)
class _Side:
    """Keys or values of an item's first head: where they start, and the bytes to the next head, slot and row."""

    start: Value
    by_head: Any
    by_key: int
    width: int

    def of(self, slot: Value, head: Value) -> Value:
        """Where a slot of a head lies."""
        return self.start.at(slot * self.by_key).at(head * self.by_head)

    def fetched(self, slot: Value, head: Value) -> Value:
        """The part of the block at ``slot`` that is fetched beside the work of a head, row by row from there on."""
        return self.start.at(slot * self.by_key).at(head * (BLOCK_KEYS * self.width))


def _emit_range(module: ir.Module, buffers: Buffers, state: State) -> ir.Function:
    """``item(state, workspace, index)``: one range of the keys of one KV head, or of all of a sequence."""
    walk = Walk(module, buffers, state)
    with Function(module, "range_item", [ptr, ptr, i64]) as (e, (s, w, index)):
        dims = state.dims(s)
        ranges, length = dims["P"], dims["S"]
        first, part = index // ranges * buffers.heads, index % ranges
        blocks = (length + (BLOCK_KEYS - 1)) // BLOCK_KEYS
        start, end = (n * blocks // ranges * BLOCK_KEYS for n in (part, part + 1))

        def partial(n: Value) -> Value:
            return walk.partial(s, (first + n) * ranges + part)

        walk.start(e, s, w, first, partial)
        walk.of_heads(e, s, w, first)(partial, start, e.min(end, length), end)
        e.ret()
    return e.function


def _tiles(buffers: Buffers) -> list[tuple[int, int, tuple[int, int]]]:
    """The rows of a tile times the numbers of a value: (row, number, (rows, vectors)) of each part.

    As many accumulators as elsewhere, but more of one row: a processor fetches ahead what is read in order.
    """
    isa, width = buffers.isa, buffers.value_width // buffers.isa.lanes
    strips = split(width, 2 * isa.value_vectors)
    heights = split(buffers.kernel.rows_per_tile, 4 * isa.value_vectors // max(strips, default=1))
    return [
        (sum(heights[:i]), sum(strips[:j]) * isa.lanes, (height, vectors))
        for i, height in enumerate(heights)
        for j, vectors in enumerate(strips)
    ]


def _emit_read(module: ir.Module, buffers: Buffers, state: State) -> ir.Function:
    """``read(state, workspace, partial, head)``: the rows as float32 with their numbers, and a fresh partial result."""
    isa, kernel = buffers.isa, buffers.kernel
    copy = rows.copy_row(module, isa, "copy_query", kernel.dtype, kernel.head_dim)
    fill = rows.fill(module, isa)
    size = elements.SIZE[kernel.dtype]
    with Function(module, "read", [ptr, ptr, ptr, i64]) as (e, (s, w, partial, head)):
        dims = state.dims(s)
        heads = dims["N"]
        group, batch = heads // dims["K"], head // dims["K"]
        padded, count = buffers.padded_rows(dims), dims["T"] * group
        row = _Rows(buffers, w)
        layout = batch // (dims["B"] // dims["C"]) * dims["T"]
        e.run(fill, partial, padded * buffers.partial, e.const(f32, 0.0))
        e.run(fill, row.query(0), padded * (buffers.per_row // 4), e.const(f32, 0.0))
        with e.loop(0, padded) as r:
            partial.at(r * buffers.partial + buffers.value_width, 4).store(e.const(f32, HIDDEN))
        with e.loop(0, count) as r:
            place = rows.query_place(e, r, batch, head % dims["K"], group, dims["T"], heads)
            e.run(copy, state.pointer(s, "data:query").at(place * kernel.head_dim, size), row.query(r))
            for n, name in enumerate(("first", "last", "query_id")):
                row.number(r, n).store(state.pointer(s, f"data:{name}").at(layout + r // group, 4).load(i32))
        e.ret()
    return e.function


def _emit_see(module: ir.Module, buffers: Buffers) -> ir.Function:
    """``see(workspace, positions, ids, keys, rows) -> whether some row sees some key``.

    Sets a key's flag to 1 where some row sees it, else to 0. A row's scores are set to HIDDEN where it does not see the
    key, else to 0. Whole vectors of keys first, then the rest of the block one by one.
    """
    lanes = buffers.isa.lanes
    with Function(module, "see", [ptr, ptr, ptr, i64, i64], i64) as (e, (w, positions, ids, keys, count)):
        row, flags = _Rows(buffers, w), w.at(buffers.flags)
        total = e.variable(e.const(i32, 0))
        whole = keys // lanes * lanes

        def step(k: Value, width: int | None, at: Value, real: Value | None) -> None:
            def of(x: Value) -> Value:
                return x if width is None else e.splat(x, width)

            type_ = i32 if width is None else vector(i32, width)
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


def _emit_score(module: ir.Module, buffers: Buffers) -> ir.Function:
    """``score(workspace, keys, step, ahead, ahead_step, rows, count)``: the products of a block of ``count`` keys.

    Meanwhile what is needed next is fetched, row by row from ``ahead`` on. Each key meets a tile of rows; a few keys'
    sums are added across lanes together. Behind the last key the last one is taken again. What a row does not see is
    read as well, and hidden by ``soften``.
    """
    isa, kernel, width = buffers.isa, buffers.kernel, buffers.width
    copy = rows.copy_row(module, isa, "copy_key", kernel.dtype, kernel.head_dim) if buffers.widens_keys else None
    dtype = "float32" if buffers.widens_keys else kernel.dtype
    size, type_ = elements.SIZE[dtype], vector(f32, isa.lanes)
    at_once, tile = isa.value_vectors, kernel.rows_per_tile
    with Function(module, "score", [ptr, ptr, i64, ptr, i64, i64, i64]) as (e, arguments):
        w, keys, step, ahead, ahead_step, padded, count = arguments
        row = _Rows(buffers, w)
        with e.loop(0, count, at_once) as first:
            places = [keys.at(e.min(first + j, count - 1) * step) for j in range(at_once)]
            if copy is not None:
                for j, place in enumerate(places):
                    e.run(copy, place, w.at(j * width, 4))
                places = [w.at(j * width, 4) for j in range(at_once)]
            with e.loop(0, padded, tile) as r:
                sums = [[e.variable(e.const(type_, 0.0)) for _ in places] for _ in range(tile)]
                for j, place in enumerate(places):
                    fetched = ahead.at((first + j) * ahead_step)
                    with e.loop(0, width, isa.lanes) as d:
                        e.prefetch(fetched.at(d, elements.SIZE[kernel.dtype]), 1)
                        x = elements.load(e, place.at(d, size), dtype, isa.lanes)
                        for i in range(tile):
                            sums[i][j].set(e.fma(x, row.query(r + i).at(d, 4).load(type_), sums[i][j]()))
                for i in range(tile):
                    row.products(r + i).at(first, 4).store(_across(e, [x() for x in sums[i]]))
        e.ret()
    return e.function


def _across(e: Function, vectors: list[Value]) -> Value:
    """A vector as long as the list; lane ``j`` is the sum of the lanes of ``vectors[j]``."""
    n, bit = vectors[0].type.count, 1
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


def _emit_soften(module: ir.Module, buffers: Buffers) -> ir.Function:
    """``soften(workspace, row, partial, numbers)``: products become scores in powers of two, and scores weights.

    The row's maximum, sum and output follow. A product that is not finite makes the sum NaN (``x - x`` is 0 or NaN):
    it is neither hidden nor made finite by a soft cap. The maximum passes over it.
    """
    isa, type_ = buffers.isa, vector(f32, buffers.isa.lanes)
    with Function(module, "soften", [ptr, i64, ptr, ptr]) as (e, (w, r, partial, numbers)):
        scores, products = _Rows(buffers, w).scores(r), _Rows(buffers, w).products(r)
        top_at, total_at = partial.at(buffers.value_width, 4), partial.at(buffers.value_width + 1, 4)
        highest, scale = e.variable(e.const(type_, HIDDEN)), e.splat(numbers.at(SCALE).load(f32), isa.lanes)
        with e.loop(0, BLOCK_KEYS, isa.lanes) as k:
            place, raw = scores.at(k, 4), products.at(k, 4).load(type_)
            x = capped(e, isa, raw, numbers) if buffers.kernel.soft_cap else raw * scale
            x = e.select(place.load(type_) < 0.0, e.const(type_, HIDDEN), x + (raw - raw))
            place.store(x)
            highest.set(e.max(x, highest()))
        old = top_at.load(f32)
        new = e.max(e.call(f"llvm.vector.reduce.fmax.v{isa.lanes}f32", f32, highest()), old)
        factor = exp2_scalar(e, isa, old - new)
        wide, fresh = e.splat(new, isa.lanes), e.variable(e.const(type_, 0.0))
        with e.loop(0, BLOCK_KEYS, isa.lanes) as k:
            place = scores.at(k, 4)
            x = place.load(type_)
            p = e.select(x < HIDDEN / 2, e.const(type_, 0.0), elements.exp2(e, isa, x - wide) + (x - x))
            place.store(p)
            fresh.set(fresh() + p)
        with e.when(new > old), e.loop(0, buffers.value_width, isa.lanes) as d:
            place = partial.at(d, 4)
            place.store(place.load(type_) * e.splat(factor, isa.lanes))
        total_at.store(total_at.load(f32) * factor + e.add_up(fresh()))
        top_at.store(new)
        e.ret()
    return e.function


def exp2_scalar(e: Function, isa: Isa, x: Value) -> Value:
    """2**x of one number of at most 0; a difference to HIDDEN gives zero."""
    wide = elements.exp2(e, isa, e.splat(x, isa.lanes))
    one = Value(e, e.builder.extract_element(wide.raw, ir.Constant(i32, 0)))
    return e.select(x > HIDDEN / 2, one, 0.0)


def _emit_weigh(module: ir.Module, buffers: Buffers, count: int, vectors: int) -> ir.Function:
    """``weigh(workspace, row, values, step, ahead, ahead_step, out, first, last)``: a tile plus weights times values.

    A key that no row sees is not read: what lies there may be anything.
    """
    isa, kernel = buffers.isa, buffers.kernel
    type_ = vector(f32, isa.lanes)
    dtype = "float32" if buffers.widens_values else kernel.dtype
    size, name = elements.SIZE[dtype], f"weigh_{count}_{vectors}"
    with Function(module, name, [ptr, i64, *[ptr, i64] * 2, ptr, i64, i64]) as (e, arguments):
        w, r, values, step, ahead, ahead_step, out, first, last = arguments
        row, flags = _Rows(buffers, w), w.at(buffers.flags)
        places = [[out.at(i * buffers.partial + j * isa.lanes, 4) for j in range(vectors)] for i in range(count)]
        sums = [[e.variable(e.const(type_, 0.0)) for _ in line] for line in places]
        weights = [row.scores(r + i) for i in range(count)]
        with e.loop(first, last) as k, e.when(flags.at(k, 4).load(i32).equals(1)):
            e.prefetch(ahead.at(k * ahead_step), vectors * isa.lanes * elements.SIZE[kernel.dtype])
            place = values.at(k * step)
            value = [elements.load(e, place.at(j * isa.lanes, size), dtype, isa.lanes) for j in range(vectors)]
            for i in range(count):
                p = e.splat(weights[i].at(k, 4).load(f32), isa.lanes)
                for j in range(vectors):
                    sums[i][j].set(e.fma(p, value[j], sums[i][j]()))
        for i in range(count):
            for j in range(vectors):
                places[i][j].store(places[i][j].load(type_) + sums[i][j]())
        e.ret()
    return e.function


def _emit_widen(module: ir.Module, buffers: Buffers) -> ir.Function:
    """``widen(workspace, values, step, keys)``: a block's values that some row sees, as float32 in whole vectors."""
    isa, kernel, width = buffers.isa, buffers.kernel, buffers.value_width
    copy = rows.copy_row(module, isa, "copy_value", kernel.dtype, kernel.value_head_dim)
    with Function(module, "widen", [ptr, ptr, i64, i64]) as (e, (w, values, step, keys)):
        flags = w.at(buffers.flags)
        with e.loop(0, keys) as k, e.when(flags.at(k, 4).load(i32).equals(1)):
            e.run(copy, values.at(k * step), w.at(buffers.values).at(k * width, 4))
        e.ret()
    return e.function


def emit_join(module: ir.Module, buffers: Buffers, state: State) -> ir.Function:
    """``item(state, workspace, index)``: the ranges of one KV head as one output; a row that saw nothing is zero.

    A row that saw something that is not finite is NaN throughout.
    """
    isa, kernel = buffers.isa, buffers.kernel
    write = rows.write_row(module, isa, "write_out", kernel.out_dtype, kernel.value_head_dim)
    size, type_ = elements.SIZE[kernel.out_dtype], vector(f32, isa.lanes)
    top_at, total_at = buffers.value_width, buffers.value_width + 1
    with Function(module, "join_item", [ptr, ptr, i64]) as (e, (s, _, head)):
        dims = state.dims(s)
        heads, ranges = dims["N"], dims["P"]
        group = heads // dims["K"]
        whole = buffers.padded_rows(dims) * buffers.partial
        first = state.pointer(s, "shared").at(head * ranges * whole, 4)
        with e.loop(0, dims["T"] * group) as r:
            row = first.at(r * buffers.partial, 4)
            top = e.variable(e.const(f32, HIDDEN))
            with e.loop(0, ranges) as p:
                top.set(e.max(row.at(p * whole + top_at, 4).load(f32), top()))
            total = e.variable(e.const(f32, 0.0))
            with e.loop(0, ranges) as p:
                part = row.at(p * whole, 4)
                factor = exp2_scalar(e, isa, part.at(top_at, 4).load(f32) - top())
                total.set(total() + part.at(total_at, 4).load(f32) * factor)
                with e.loop(0, buffers.value_width, isa.lanes) as d:
                    x = part.at(d, 4).load(type_) * e.splat(factor, isa.lanes)
                    before = e.variable(e.const(type_, 0.0))
                    with e.when(p > 0):
                        before.set(row.at(d, 4).load(type_))
                    row.at(d, 4).store(x + before())
            place = rows.query_place(e, r, head // dims["K"], head % dims["K"], group, dims["T"], heads)
            doubt = e.variable(e.const(type_, 0.0))  # becomes NaN where the output is not finite
            with e.loop(0, buffers.value_width, isa.lanes) as d:
                x = row.at(d, 4).load(type_)
                doubt.set(doubt() + (x - x))
            lost, unseen = e.add_up(doubt()), total().equals(0.0)
            factor = e.select(unseen, e.const(f32, 0.0), e.const(f32, 1.0) / total() + lost)
            if kernel.sums:
                state.pointer(s, "data:top").at(place, 4).store(e.select(unseen, e.const(f32, UNSEEN_TOP), top()))
                state.pointer(s, "data:total").at(place, 4).store(e.select(unseen, e.const(f32, 1.0), total() + lost))
            e.run(write, row, state.pointer(s, "data:out").at(place * kernel.value_head_dim, size), factor)
        e.ret()
    return e.function
