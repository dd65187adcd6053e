"""Kernels for methods that select keys: attention to listed units of keys, and the attention mass of every unit.

Queries of one KV head are cut into tiles of ``Q`` tokens, keys into units; a unit is one block of packed keys
(``panels.py``). The kernels are the forward kernel with another loop around it::

    listed    O = softmax over the keys of the units that are listed for the tile
    mass      mass[u] = sum over the rows of the tile and the keys of unit u of the softmax over all keys

The mass takes one pass: a row keeps the sum of every unit relative to the maximum at that time. At the end the sums are
rescaled, ``sums[u] * 2**(tops[u] - top) / total``. The same pass may weigh the values: dense attention that also gives
the mass. A row that is not finite adds nothing to a mass; a key that is not finite counts as zeros.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from llvmlite import ir

from . import forward
from .elements import exp2
from .emit import Function, Value, aligned, f32, i32, i64, ptr, vector
from .forward import SUMS, Kernel, block_rows
from .handler import Dims, Operand, Phase, Signature, State
from .isa import Isa
from .panels import Blocks, emit_pack
from .softmax import HIDDEN

# The units of each query tile, and an array whose length is the tokens of one.
LISTS = (Operand("listed", "int32", ("B", "K", "I", "E")), Operand("tile", "float32", ("U", "Q")))


@dataclasses.dataclass(frozen=True, slots=True)
class SparseKernel:
    """The choices that a kernel is compiled for, and the keys of a unit. A mass alone has no values (dimension 0)."""

    kernel: Kernel
    unit: int
    units: Literal["listed", "mass"]

    def blocks(self, isa: Isa) -> Blocks:
        """The layout of packed units; a strip is one score tile, so that a unit of 16 keys is not mostly padding."""
        kernel = self.kernel
        return Blocks(isa, kernel.dtype, self.unit, isa.score_rows, kernel.head_dim, kernel.value_head_dim)


def signature(isa: Isa, this: SparseKernel) -> Signature:
    """How XLA calls a kernel; the length of ``tile`` is the tokens of a query tile.

    ``listed[b, k, tile]`` has distinct indices of units, then -1 to the end. With values the mass has further results,
    those of attention to all keys.
    """
    kernel, blocks = this.kernel, this.blocks(isa)
    worker = forward.workspace(isa, kernel, blocks.keys_per_block)[1]
    if this.units == "listed":
        operands = (*kernel.operands, *LISTS)
        return Signature(operands, (kernel.out, *SUMS), blocks.shared_bytes, lambda _: worker, fits)
    operands = (*(x for x in kernel.operands if kernel.value_head_dim or x.name != "value"), LISTS[1])
    results = (
        Operand("mass", "float32", ("B", "K", "I", "W")),
        *((kernel.out, *SUMS) if kernel.value_head_dim else ()),
    )

    def has_all_units(dims: Dims) -> list[tuple[Any, str]]:
        whole = blocks.count(dims).equals(dims["W"])
        return [*fits(dims), (whole, "the mass has not one number for each unit of keys.")]

    def worker_bytes(dims: Dims) -> Any:
        """A thread also keeps two numbers per unit and row."""
        return aligned(worker) + blocks.count(dims) * (2 * block_rows(isa) * 4)

    return Signature(operands, results, blocks.shared_bytes, worker_bytes, has_all_units)


def phases(module: ir.Module, isa: Isa, this: SparseKernel, state: State) -> tuple[Phase, ...]:
    """The phases of attention to listed units, or of the mass of all units, with their functions in the module."""
    blocks, listed = this.blocks(isa), this.units == "listed"
    pack = emit_pack(module, isa, this.kernel.dtype, blocks, state)
    item = (_emit_listed_item if listed else _emit_mass_item)(module, isa, this, state)

    def items(dims: Dims) -> Any:
        tiles = dims["B"] * dims["K"] * dims["I"]
        return tiles * _parts(dims, isa) if listed else tiles

    return Phase(lambda dims: dims["B"] * dims["K"] * blocks.count(dims), pack), Phase(items, item)


def fits(dims: Dims) -> list[tuple[Any, str]]:
    """Conditions on the shapes."""
    tiles = (dims["T"] + dims["Q"] - 1) // dims["Q"]
    return [*forward.fits(dims), (tiles.equals(dims["I"]), "the query tiles are not those of the queries.")]


def _tile_rows(dims: Dims) -> Any:
    """Rows of a query tile: its tokens times the heads of a group."""
    return dims["Q"] * (dims["N"] // dims["K"])


def _parts(dims: Dims, isa: Isa) -> Any:
    """Parts of a query tile: a thread takes :func:`forward.block_rows` rows at a time."""
    return (_tile_rows(dims) + (block_rows(isa) - 1)) // block_rows(isa)


def _part(e: Function, isa: Isa, dims: Dims, tile: Value, part: Value) -> tuple[Value, Value, Value]:
    """Of a part of a query tile, numbered over all: the KV head, its first row and how many there are (or none)."""
    of_tile = _tile_rows(dims)
    start = tile % dims["I"] * of_tile + part * block_rows(isa)
    there = e.min(of_tile - part * block_rows(isa), dims["T"] * (dims["N"] // dims["K"]) - start)
    return tile // dims["I"], start, e.min(there, block_rows(isa))


def _emit_listed_item(module: ir.Module, isa: Isa, this: SparseKernel, state: State) -> ir.Function:
    """``item(state, workspace, index)``: a part of a query tile of one KV head."""
    kernel, blocks = this.kernel, this.blocks(isa)
    at = forward.workspace(isa, kernel, blocks.keys_per_block)[0]
    read = forward.emit_read(module, isa, kernel, state, at)
    attend = forward.emit_attend(module, isa, kernel, blocks, at, listed=True)
    write = forward.emit_write(module, isa, kernel, state, at)
    with Function(module, "listed_item", [ptr, ptr, i64]) as (e, (s, w, index)):
        dims = state.dims(s)
        tile, part = index // _parts(dims, isa), index % _parts(dims, isa)
        head, start, count = _part(e, isa, dims, tile, part)
        with e.when(count > 0):
            e.run(read, s, w, head, start, count)
            names, number = state.pointer(s, "data:listed").at(tile * dims["E"], 4), e.variable(e.const(i64, 0))
            with e.loop(0, dims["E"]) as i, e.when(names.at(i, 4).load(i32) >= 0):
                number.set(number() + 1)
            e.run(attend, w, *forward.of_head(blocks, state, s, dims, head), names, number())
            e.run(write, s, w, head, start, count)
    return e.function


def _emit_mass_item(module: ir.Module, isa: Isa, this: SparseKernel, state: State) -> ir.Function:
    """``item(state, workspace, index)``: the mass of a query tile of one KV head, part by part; its output, if any."""
    kernel, blocks, queries = this.kernel, this.blocks(isa), block_rows(isa)
    at, end = forward.workspace(isa, kernel, blocks.keys_per_block)
    read = forward.emit_read(module, isa, kernel, state, at)
    attend, pool = forward.emit_attend(module, isa, kernel, blocks, at, pooled=True), _emit_pool(module, isa, at)
    write = forward.emit_write(module, isa, kernel, state, at) if kernel.value_head_dim else None
    with Function(module, "mass_item", [ptr, ptr, i64]) as (e, (s, w, tile)):
        dims = state.dims(s)
        count = blocks.count(dims)
        mass = state.pointer(s, "data:mass").at(tile * count, 4)
        sums = w.at(aligned(end))
        tops = sums.at(count * queries, 4)
        with e.loop(0, count) as n:
            mass.at(n, 4).store(e.const(f32, 0.0))
        with e.loop(0, _parts(dims, isa)) as part:
            head, start, there = _part(e, isa, dims, tile, part)
            with e.when(there > 0):
                e.run(read, s, w, head, start, there)
                e.run(attend, w, *forward.of_head(blocks, state, s, dims, head), sums, tops, count)
                e.run(pool, w, sums, tops, mass, count, there)
                if write is not None:
                    e.run(write, s, w, head, start, there)
    return e.function


def _emit_pool(module: ir.Module, isa: Isa, at: dict[str, int]) -> ir.Function:
    """``pool(workspace, sums, tops, mass, units, rows)``: adds every unit's share of the rows to its mass.

    A row that saw nothing has a weight of zero, and so has one whose output is NaN, and those behind the last row.
    """
    type_, queries = vector(f32, isa.lanes), block_rows(isa)
    with Function(module, "pool", [ptr] * 4 + [i64] * 2) as (e, (w, sums, tops, mass, count, there)):
        top, total, weight = (w.at(at[name]) for name in ("top", "total", "decay"))
        with e.loop(0, queries, isa.lanes) as r:
            inverse = e.const(type_, 1.0) / total.at(r, 4).load(type_)
            saw = (top.at(r, 4).load(type_) > HIDDEN / 2) & (inverse > 0.0)
            weight.at(r, 4).store(e.select(saw, inverse, 0.0))
        with e.loop(there, queries) as r:
            weight.at(r, 4).store(e.const(f32, 0.0))
        with e.loop(0, count) as n:
            pooled = e.variable(e.const(type_, 0.0))
            with e.loop(0, queries, isa.lanes) as r:
                below = exp2(e, isa, tops.at(n * queries + r, 4).load(type_) - top.at(r, 4).load(type_))
                share = sums.at(n * queries + r, 4).load(type_) * below
                pooled.set(e.fma(share, weight.at(r, 4).load(type_), pooled()))
            mass.at(n, 4).add(e.add_up(pooled()))
    return e.function
