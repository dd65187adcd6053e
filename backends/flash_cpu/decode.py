"""The decode kernel: a few query rows against a long cache. Its time is that of reading keys and values.

One item is a range of the keys of one KV head, or of all KV heads where their keys of a slot lie side by side
(``"NHD"``): memory is read in its order in both. An item reads every key and value that some row sees once for all rows
(tokens times the heads of a group), in place and in their own dtype::

    s[r, k] = sum_d Q[r, d] K[k, d]     lanes over d, the rows' sums across lanes by one tree
    O[r, d] += sum_k 2**(s[r, k] - m[r]) V[k, d]     lanes over d

Each range ends with its own maximum, sum and output per row. Phase 2 merges the ranges of a head in their order.
A block of keys that no row sees is not read, nor any value that no row sees. What is added to the scores of a block
(``added.py``) is written where they will stand, before the keys meet the queries.

There are two more forms (``DecodeKernel.units``). Each KV head has a list of units of its own, and a range is a part of
the list. Or each unit is a range, and phase 2 gives its attention mass, pooled over the rows of a KV head; with values
the step is dense attention besides::

    mass[u] = sum_r total[r, u] 2**(top[r, u] - top[r]) / total[r]

While a block's keys are scored its values are fetched, for all heads of the item, and the next block's keys while its
values are weighed (without values, while its keys are scored). The arithmetic would otherwise wait for memory, and
memory for the arithmetic. Keys and values are touched for the first time row by row in the order of memory, and keys
are scored so too, all heads of a slot before the next slot: a processor reads ahead best then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from . import added, elements, rows
from .added import Added
from .decode_buffers import BLOCK_KEYS, MOST_ROWS, WEIGHED_KEYS, Buffers, DecodeKernel, Side, moved, tiles
from .decode_parts import emit_add, emit_read, emit_score, emit_see, emit_soften, emit_weigh, emit_widen, exp2_scalar
from .emit import Function, Value, Variable, f32, i32, i64, ptr, vector
from .forward import UNSEEN_TOP, fits
from .handler import Dims, Phase, Signature, State
from .isa import Isa
from .softmax import HIDDEN

RUN_KEYS = 2048  # of an item that gives the mass, in whole units


def signature(isa: Isa, kernel: DecodeKernel) -> Signature:
    """How XLA calls a decode step."""
    buffers = Buffers(isa, kernel)

    def requires(dims: Dims) -> list[tuple[Any, str]]:
        if kernel.units != "mass":
            return [*fits(dims), *added.fits(kernel.arrays, dims)]
        units = (dims["S"] + (kernel.unit - 1)) // kernel.unit
        return [*fits(dims), (units.equals(dims["P"]), "the mass has not one number for each unit of keys.")]

    return Signature(kernel.operands, kernel.results, buffers.shared_bytes, buffers.worker_bytes, requires)


def phases(module: ir.Module, isa: Isa, kernel: DecodeKernel, state: State) -> tuple[Phase, ...]:
    """The phases of a decode step, with their functions in the module."""
    buffers, item = Buffers(isa, kernel), {"": _range, "listed": _part, "mass": _run}[kernel.units]

    def items(dims: Dims) -> Any:
        return dims["B"] * dims["K"] // buffers.heads * (_runs(kernel, dims) if kernel.units == "mass" else dims["P"])

    blocks = Walk(module, buffers, state)
    with Function(module, "range_item", [ptr, ptr, i64]) as (e, (s, w, index)):
        item(e, blocks, s, w, index)
    last = _emit_pool if kernel.units == "mass" else _emit_join
    return Phase(items, e.function), Phase(lambda dims: dims["B"] * dims["K"], last(module, buffers, state))


class Walk:
    """What the items of a decode step do with a block of keys: the functions of this file, in the module."""

    def __init__(self, module: ir.Module, buffers: Buffers, state: State) -> None:
        self.buffers, self.state, arrays = buffers, state, buffers.kernel.arrays
        extra = Added(buffers.isa, arrays, state, MOST_ROWS) if arrays.any else None
        self.read = emit_read(module, buffers, state, extra)
        self._add = None if extra is None else emit_add(module, buffers, extra)
        self._see, self._score = emit_see(module, buffers), emit_score(module, buffers)
        self._soften = emit_soften(module, buffers, extra)
        shapes = {shape for _, _, shape in tiles(buffers)} if buffers.kernel.value_head_dim else ()
        self._weigh = {shape: emit_weigh(module, buffers, *shape) for shape in shapes}
        self._widen = emit_widen(module, buffers) if buffers.widens_values else None

    def partial(self, s: Value, index: Value) -> Value:
        """What range ``index`` leaves, numbered over the KV heads."""
        whole = self.buffers.padded_rows(self.state.dims(s)) * self.buffers.partial
        return self.state.pointer(s, "shared").at(index * whole, 4)

    def of_heads(
        self, e: Function, s: Value, w: Value, first: Value
    ) -> Callable[[Callable[[Value], Value], Value, Value, Value], None]:
        """``walk(partial, start, stop, ahead)`` emits a loop over the keys from ``start`` to ``stop`` of these heads.

        ``ahead`` is the slot whose keys come after these. The heads of a block together fetch all of what comes next.
        """
        buffers, kernel, dims = self.buffers, self.buffers.kernel, self.state.dims(s)
        size, padded = elements.SIZE[kernel.stored], buffers.padded_rows(dims)
        batch, heads, head_bytes = first // dims["K"], buffers.heads, buffers.head_bytes(dims)
        layout = batch // (dims["B"] // dims["C"]) * dims["S"]
        positions, ids = (self.state.pointer(s, f"data:{x}").at(layout, 4) for x in ("position", "key_id"))
        numbers = self.state.pointer(s, "data:numbers")
        count = dims["T"] * (dims["N"] // dims["K"])
        table = self.state.pointer(s, "data:pages").at(batch * dims["E"], 4) if kernel.page else None

        def side(name: str, width: int) -> Side:
            return Side.of(kernel, dims, self.state.pointer(s, f"data:{name}"), table, first, width)

        def scales(name: str, slot: Value, head: Value | int) -> tuple[Value, ...]:
            """As the functions of the module take them behind their arguments; empty without scales."""
            if not kernel.kv_dtype:
                return ()
            of = side(f"{name}_scale", 4)
            return *of.block(slot, head), e.const(i64, of.by_key)

        keys = side("key", kernel.head_dim * size)
        values = side("value", kernel.value_head_dim * size) if kernel.value_head_dim else keys

        def weigh(partial: Callable[[Value], Value], k: Value, n: Value, after: Value) -> None:
            with e.loop(0, n, WEIGHED_KEYS) as some, e.loop(0, heads) as h:
                row, result, last = w.at(h * head_bytes), partial(h), e.min(some + WEIGHED_KEYS, n)
                block: tuple[Value, ...] = values.block(k, h)
                step, (fetched, width), element = e.const(i64, values.by_key), keys.fetched(after, some, h), size
                if self._widen is not None:
                    e.run(self._widen, row, *block, step, some, last, *scales("value", k, h))
                    block, step, element = (row.at(buffers.values),), e.const(i64, buffers.value_width * 4), 4
                with e.loop(0, padded, kernel.rows_per_tile) as r:
                    for below, column, shape in tiles(buffers):
                        out = result.at((r + below) * buffers.partial + column, 4)
                        columns = *moved(block, column, element), step, *moved(fetched, column, size), width
                        e.run(self._weigh[shape], row, r + below, *columns, out, some, last)

        def walk(partial: Callable[[Value], Value], start: Value, stop: Value, ahead: Value) -> None:
            with e.loop(start, stop, BLOCK_KEYS) as k:
                n = e.min(stop - k, BLOCK_KEYS)
                after = e.select(k + n < stop, k + n, ahead)
                some_head = e.variable(e.const(i64, 0))
                with e.loop(0, heads) as h:
                    row = w.at(h * head_bytes)
                    seen = e.variable(e.run(self._see, row, positions.at(k, 4), ids.at(k, 4), n, count))
                    if self._add is not None:
                        with e.when(seen() > 0):
                            seen.set(e.run(self._add, s, row, k, positions.at(k, 4), n, count))
                    some_head.set(some_head() | seen())
                with e.when(some_head() > 0):
                    of_keys = *keys.block(k, 0), e.const(i64, keys.by_key)
                    next_ = values.block(k, 0) if kernel.value_head_dim else keys.block(after, 0)
                    fetched = *next_, e.const(i64, values.by_key)
                    e.run(self._score, w, head_bytes, *of_keys, *fetched, padded, n, *scales("key", k, 0))
                    with e.loop(0, heads) as h, e.loop(0, count) as r:
                        e.run(self._soften, w.at(h * head_bytes), r, partial(h).at(r * buffers.partial, 4), numbers)
                    if kernel.value_head_dim:
                        weigh(partial, k, n, after)

        return walk


def _range(e: Function, walk: Walk, s: Value, w: Value, index: Value) -> None:
    """One range of the keys of one KV head, or of all of a sequence."""
    dims, buffers = walk.state.dims(s), walk.buffers
    ranges, length = dims["P"], dims["S"]
    first, part = index // ranges * buffers.heads, index % ranges
    blocks = (length + (BLOCK_KEYS - 1)) // BLOCK_KEYS
    start, end = (n * blocks // ranges * BLOCK_KEYS for n in (part, part + 1))

    def partial(n: Value) -> Value:
        return walk.partial(s, (first + n) * ranges + part)

    with e.loop(0, buffers.heads) as n:
        e.run(walk.read, s, w.at(n * buffers.head_bytes(dims)), partial(n), first + n)
    walk.of_heads(e, s, w, first)(partial, start, e.min(end, length), end)


def _part(e: Function, walk: Walk, s: Value, w: Value, index: Value) -> None:
    """A part of the list of one KV head. Units are read in place, and no key that is not listed is read."""
    dims, unit = walk.state.dims(s), walk.buffers.kernel.unit
    parts, length = dims["P"], dims["S"]
    head, part = index // parts, index % parts
    names = walk.state.pointer(s, "data:listed").at(head * dims["W"], 4)
    number = e.variable(e.const(i64, 0))
    with e.loop(0, dims["W"]) as i, e.when(names.at(i, 4).load(i32) >= 0):
        number.set(number() + 1)
    start, stop = (n * number() // parts for n in (part, part + 1))
    partial = walk.partial(s, index)
    e.run(walk.read, s, w, partial, head)
    of_head = walk.of_heads(e, s, w, head)
    with e.loop(start, stop) as i:
        first, after = (names.at(n, 4).load(i32).integer(i64) * unit for n in (i, e.min(i + 1, stop - 1)))
        of_head(lambda _: partial, first, e.min(first + unit, length), after)


def _run(e: Function, walk: Walk, s: Value, w: Value, index: Value) -> None:
    """A run of units of one KV head, each of them a range."""
    dims, unit = walk.state.dims(s), walk.buffers.kernel.unit
    units, runs = dims["P"], _runs(walk.buffers.kernel, dims)
    head, first = index // runs, index % runs * max(1, RUN_KEYS // unit)
    of_head = walk.of_heads(e, s, w, head)
    with e.loop(first, e.min(first + max(1, RUN_KEYS // unit), units)) as u:
        partial, end = walk.partial(s, head * units + u), (u + 1) * unit
        e.run(walk.read, s, w, partial, head)
        of_head(lambda _, at=partial: at, u * unit, e.min(end, dims["S"]), end)


def _runs(kernel: DecodeKernel, dims: Dims) -> Any:
    """Runs of units that are one item each: keys that lie behind each other are read the fastest."""
    run = max(1, RUN_KEYS // kernel.unit)
    return (dims["P"] + (run - 1)) // run


def _emit_join(module: ir.Module, buffers: Buffers, state: State) -> ir.Function:
    """``item(state, workspace, index)``: the ranges of one KV head as one output; a row that saw nothing is zero.

    A row that saw something that is not finite is NaN throughout.
    """
    isa, kernel = buffers.isa, buffers.kernel
    write = rows.write_row(module, isa, "write_out", kernel.out_dtype, kernel.value_head_dim)
    size, type_ = elements.SIZE[kernel.out_dtype], vector(f32, isa.lanes)
    top_at, total_at = buffers.value_width, buffers.value_width + 1
    with Function(module, "join_item", [ptr, ptr, i64]) as (e, (s, _, head)):
        dims = state.dims(s)
        ranges = dims["P"]
        whole = buffers.padded_rows(dims) * buffers.partial
        first = state.pointer(s, "shared").at(head * ranges * whole, 4)
        with e.loop(0, dims["T"] * (dims["N"] // dims["K"])) as r:
            row = first.at(r * buffers.partial, 4)
            top = _highest(e, row.at(top_at, 4), ranges, whole)
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
            place = rows.query_place(dims, head, r)
            if buffers.halves_values:
                with e.loop(0, buffers.value_width, 2 * isa.lanes) as d:
                    rows.halve(e, isa, row.at(d, 4), back=True)
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
    return e.function


def _highest(e: Function, place: Value, count: Value, stride: Value) -> Variable:
    """Of ``count`` numbers; HIDDEN is the least."""
    top = e.variable(e.const(f32, HIDDEN))
    with e.loop(0, count) as n:
        top.set(e.max(place.at(n * stride, 4).load(f32), top()))
    return top


def _emit_pool(module: ir.Module, buffers: Buffers, state: State) -> ir.Function:
    """``item(state, workspace, index)``: the mass of the units of one KV head.

    A row that saw nothing adds zero, and so does a unit for a row whose score there is not finite.
    """
    isa = buffers.isa
    top_at, total_at = buffers.value_width, buffers.value_width + 1
    join = _emit_join(module, buffers, state) if buffers.kernel.value_head_dim else None
    with Function(module, "pool_item", [ptr, ptr, i64]) as (e, (s, w, head)):
        dims = state.dims(s)
        if join is not None:
            e.run(join, s, w, head)  # before the sums are rescaled in place
        units = dims["P"]
        whole = buffers.padded_rows(dims) * buffers.partial
        first = state.pointer(s, "shared").at(head * units * whole, 4)
        mass = state.pointer(s, "data:mass").at(head * units, 4)
        with e.loop(0, units) as u:
            mass.at(u, 4).store(e.const(f32, 0.0))
        with e.loop(0, dims["T"] * (dims["N"] // dims["K"])) as r:
            row = first.at(r * buffers.partial, 4)
            top = _highest(e, row.at(top_at, 4), units, whole)
            total = e.variable(e.const(f32, 0.0))
            with e.loop(0, units) as u:
                place = row.at(u * whole + total_at, 4)
                below = exp2_scalar(e, isa, row.at(u * whole + top_at, 4).load(f32) - top())
                share = place.load(f32) * below
                share = e.select(share >= 0.0, share, 0.0)
                place.store(share)
                total.set(total() + share)
            factor = e.select(total().equals(0.0), e.const(f32, 0.0), e.const(f32, 1.0) / total())
            with e.loop(0, units) as u:
                mass.at(u, 4).add(row.at(u * whole + total_at, 4).load(f32) * factor)
    return e.function
