"""Pack keys and values for the forward kernel, and read the intervals and ids of a tile's rows.

The shared part of the scratch memory, with room for ``R`` of the KV heads of all sequences (``Sp``: S in whole blocks).
Head ``n`` has place ``n % R``::

    keys    terms [R][Sp][Hp]          Hp: terms of the head dimension, in whole vectors
    values  terms [R][Sp / pack][Vp]   Vp: the values' head dimension, in whole vectors; with tile registers each
                                       block is transposed, [Vp][its keys / 2], those in whole vectors
    then for every row of the layout: positions int32 [C][Sp], ids int32 [C][Sp], records [C][Sp / block][1 + strips]
    spoilt  int32 [R][Sp / block][1 + block]    per key 1 if it is not finite, else 0; first whether any is

A term is one float32, or a pair of bfloat16 numbers: two neighbours of a key, one number each of two neighbouring
values (``pack`` is 1 or 2). A key that no query may see (padding, behind the length) is packed as zeros, whatever it
holds. So are a key and its value if either is not finite: the rows that see them become NaN (``forward.py``). Without
values (a head dimension of zero) only keys are packed.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from . import elements, masking, rows
from .emit import Function, Value, aligned, i32, i64, ptr
from .handler import Dims, State
from .isa import Isa
from .visibility import NO_KEY, NO_QUERY


class Blocks:
    """Where packed keys and values lie.

    A block takes ``keys`` keys of the operands and has room for ``keys_per_block``, whole strips; the rest does not
    exist. Strips are the grain in which a masked block is cut to what is visible. ``in_stages``: there is room for two
    groups of ``P`` heads, or for one if that is all (``forward.py``).
    """

    def __init__(
        self,
        isa: Isa,
        dtype: str,
        keys: int,
        strip: int,
        head_dim: int,
        value_head_dim: int,
        *,
        in_stages: bool = False,
    ) -> None:
        self.isa, self.keys, self.strip, self.in_stages = isa, keys, strip, in_stages
        self.head_dim, self.value_head_dim, self.pack = head_dim, value_head_dim, isa.pack(dtype)  # numbers per term
        self.keys_per_block = -(-keys // strip) * strip
        self.key_width, self.value_width = rows.padded(head_dim, isa, self.pack), rows.padded(value_head_dim, isa)
        self.key_terms = self.keys_per_block * self.key_width
        # With tile registers, the terms of a row of transposed values; else 0.
        self.turned = rows.padded(self.keys_per_block, isa, self.pack) if isa.tiles and value_head_dim else 0
        self.value_terms = (self.turned or self.keys_per_block // self.pack) * self.value_width
        self.record_bytes = masking.RECORD * (1 + self.keys_per_block // strip)  # bounds of all keys, and of each strip
        self.spoilt_numbers = 1 + self.keys_per_block

    def count(self, dims: Dims) -> Any:
        """Blocks of one head."""
        return (dims["S"] + (self.keys - 1)) // self.keys

    def length(self, dims: Dims) -> Any:
        """Sp."""
        return self.count(dims) * self.keys_per_block

    def room(self, dims: Dims) -> Any:
        """R: heads that have a place at a time."""
        if not self.in_stages:
            return dims["B"] * dims["K"]
        groups = head_groups(dims)
        return dims["P"] * ((groups * 2 - 2) // groups + 1)

    def _parts(self, dims: Dims) -> dict[str, tuple[Any, Any]]:
        """The parts in their order, by name: heads or rows of the layout, and bytes of each."""
        room, rows_, count = self.room(dims), dims["C"], self.count(dims)
        numbers = rows_, self.length(dims) * 4
        return {
            "keys": (room, count * (self.key_terms * 4)),
            "values": (room, count * (self.value_terms * 4)),
            "positions": numbers,
            "ids": numbers,
            "records": (rows_, count * self.record_bytes),
            "spoilt": (room, count * (self.spoilt_numbers * 4)),
        }

    def place(self, name: str, shared: Value, dims: Dims, index: Value) -> Value:
        """Where a part lies of a head, numbered over the batch, or of a row of the layout."""
        before, parts = 0, self._parts(dims)
        for each, (number, size) in parts.items():
            if each == name:
                break
            before = before + number * size
        number, size = parts[name]
        return shared.at(before + index % number * size)

    def shared_bytes(self, dims: Dims) -> Any:
        """All of it."""
        return aligned(sum(number * size for number, size in self._parts(dims).values()))


def head_groups(dims: Dims) -> Any:
    """Groups of ``P`` KV heads, over the batch."""
    return (dims["B"] * dims["K"] + (dims["P"] - 1)) // dims["P"]


def emit_pack(module: ir.Module, isa: Isa, dtype: str, blocks: Blocks, state: State) -> ir.Function:
    """``item(state, workspace, index)``: one block of keys and values of one KV head.

    The first head that reads a row of the layout also copies that row and finds its bounds.
    """
    size, pack = elements.SIZE[dtype], blocks.pack
    keys_per_block, joined = blocks.keys_per_block, pack == 2 and blocks.value_head_dim > 0
    widths = {"key": blocks.head_dim, "value": blocks.value_head_dim}
    strides = {name: rows.padded(width, isa, pack) for name, width in widths.items()}
    copies = {n: rows.copy_row(module, isa, f"copy_{n}", dtype, width, pack) for n, width in widths.items() if width}
    finite = {n: rows.finite(module, isa, f"finite_{n}", dtype, widths[n]) for n in copies}
    join = rows.join(module, isa, "join_values", blocks.value_width) if joined else None
    turn = rows.transpose(module, isa, "turn_values", blocks.turned, blocks.value_width) if blocks.turned else None
    bounds = _emit_layout_block(module, blocks, state)
    with Function(module, "pack_item", [ptr, ptr, i64]) as (e, (s, w, index)):
        dims = state.dims(s)
        length, heads = dims["S"], dims["K"]
        head, n = index // blocks.count(dims), index % blocks.count(dims)
        batch, start = head // heads, n * blocks.keys
        share = dims["B"] // dims["C"]
        row = batch // share
        shared = state.pointer(s, "shared")
        ids = state.pointer(s, "data:key_id").at(row * length, 4)
        keys = blocks.place("keys", shared, dims, head).at(n * blocks.key_terms, 4)
        values = blocks.place("values", shared, dims, head).at(n * blocks.value_terms, 4)
        spoilt = blocks.place("spoilt", shared, dims, head).at(n * blocks.spoilt_numbers, 4)
        any_spoilt = e.variable(e.const(i32, 0))
        pairs = values if turn is None else w.at(aligned(2 * strides["value"] * 4))
        with e.loop(0, keys_per_block, pack) as term:
            # Rows of values are joined where they lie one behind the other, in the workspace.
            to_value = w if joined else values.at(term * blocks.value_width, 4)
            for i in range(pack):
                j = term + i
                slot = start + j
                exists = e.variable(e.const(ir.IntType(1), 0))
                with e.when((e.const(i64, blocks.keys) > j) & (slot < length)):
                    exists.set(ids.at(slot, 4).load(i32).compare("!=", NO_KEY))
                targets = {"key": keys.at(j * strides["key"], 4), "value": to_value.at(i * strides["value"], 4)}
                row_of = (batch * length + slot) * heads + head % heads
                sources = {name: state.pointer(s, f"data:{name}").at(row_of * widths[name], size) for name in copies}
                bad = e.variable(e.const(i32, 0))
                with e.when(exists()):
                    for name, source in sources.items():
                        exists.set(exists() & e.run(finite[name], source))
                    bad.set(e.select(exists(), e.const(i32, 0), 1))
                spoilt.at(j + 1, 4).store(bad())
                any_spoilt.set(any_spoilt() | bad())
                for name, copy in copies.items():
                    rows.copy_or_zeros(e, isa, exists(), copy, sources[name], targets[name], strides[name])
            if join is not None:
                e.run(join, w, pairs.at(term // pack * blocks.value_width, 4), pack)
        if turn is not None:
            e.run(turn, pairs, values)
        spoilt.store(any_spoilt())
        with e.when((head % heads).equals(0) & (batch % share).equals(0)):
            e.run(bounds, s, row, n)
    return e.function


def _emit_layout_block(module: ir.Module, blocks: Blocks, state: State) -> ir.Function:
    """``layout_block(state, row, block)``: positions, ids and bounds of one block of keys."""
    keys = blocks.keys_per_block
    with Function(module, "layout_block", [ptr, i64, i64]) as (e, (s, row, n)):
        dims = state.dims(s)
        length = dims["S"]
        shared = state.pointer(s, "shared")
        positions, ids = (blocks.place(name, shared, dims, row).at(n * keys, 4) for name in ("positions", "ids"))
        source = [state.pointer(s, f"data:{name}").at(row * length, 4) for name in ("position", "key_id")]
        with e.loop(0, keys) as j:
            slot = n * blocks.keys + j
            at, exists = e.min(slot, length - 1), (e.const(i64, blocks.keys) > j) & (slot < length)
            positions.at(j, 4).store(source[0].at(at, 4).load(i32))
            ids.at(j, 4).store(e.select(exists, source[1].at(at, 4).load(i32), NO_KEY))
        records = blocks.place("records", shared, dims, row).at(n * blocks.record_bytes)
        masking.key_bounds(e, positions, ids, keys, blocks.strip, records)
    return e.function


def emit_row_numbers(module: ir.Module, isa: Isa, state: State) -> ir.Function:
    """``row_numbers(state, batch, start, count, rows, first, last, query_id, bounds)``.

    Interval and id of each of a tile's ``rows`` rows, of which ``count`` exist, and one record of bounds per group.
    """
    with Function(module, "row_numbers", [ptr] + [i64] * 4 + [ptr] * 4) as (e, arguments):
        s, batch, start, count, number, to_first, to_last, to_id, bounds = arguments
        dims = state.dims(s)
        group, tokens = dims["N"] // dims["K"], dims["T"]
        row = batch // (dims["B"] // dims["C"])
        with e.loop(0, number) as i:
            token = e.min((start + i) // group, tokens - 1)
            for name, target, none in zip(
                ("first", "last", "query_id"), (to_first, to_last, to_id), (0, 0, NO_QUERY), strict=True
            ):
                x = state.pointer(s, f"data:{name}").at(row * tokens + token, 4).load(i32)
                target.at(i, 4).store(e.select(i < count, x, none))
        with e.loop(0, number, isa.group) as g:
            real = e.min(e.max(count - g, 0), isa.group)
            record = bounds.at(g // isa.group * masking.QUERY_RECORD)
            masking.query_bounds(e, to_first.at(g, 4), to_last.at(g, 4), to_id.at(g, 4), real, record)
    return e.function
