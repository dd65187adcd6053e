"""The backward pass of attention to listed units of keys: ``backward.py`` with another loop around it.

An item is a KV head and part of its key blocks, as there. It takes the head's query tiles one after the other. The rows
of one are its panel. The keys of the units that are listed for it are gathered into blocks, a block at a time, whose
gradients are then added to those of the item's keys. So the work follows the lists, and memory is linear in the length.
"""

from __future__ import annotations

from llvmlite import ir

from . import rows
from .backward import emit_add, emit_step
from .backward_buffers import BLOCK_KEYS, Buffers, blocks, operands, results
from .backward_rows import emit_load_block, emit_load_tile, emit_store_block, emit_write
from .emit import Function, f32, i32, i64, ptr, vector
from .handler import Phase, Signature, State
from .isa import Isa
from .sparse import LISTS, SparseKernel, fits


def signature(isa: Isa, this: SparseKernel) -> Signature:
    """How XLA calls a backward pass: as that of dense attention, with the lists of the forward pass."""
    buffers = Buffers(isa, this.kernel, listed=True)
    arguments, found = (*operands(this.kernel), *LISTS), results(this.kernel)
    return Signature(arguments, found, buffers.shared_bytes, buffers.worker_bytes, fits)


def phases(module: ir.Module, isa: Isa, this: SparseKernel, state: State) -> tuple[Phase, ...]:
    """The phases of a backward pass, with their functions in the module."""
    buffers = Buffers(isa, this.kernel, listed=True)
    write = emit_write(module, buffers, state)
    item, add = _emit_item(module, buffers, this.unit, state, write), emit_add(module, buffers, state, write)
    return (
        Phase(lambda dims: dims["B"] * dims["K"] * dims["P"], item),
        Phase(lambda dims: dims["B"] * dims["K"] * buffers.tiles(dims) * buffers.several(dims), add),
    )


def _emit_item(module: ir.Module, buffers: Buffers, unit: int, state: State, write: ir.Function) -> ir.Function:
    """``item(state, workspace, index)``: every ``P``-th key block of a KV head, for the query tiles that list it."""
    load_tile, store = emit_load_tile(module, buffers, state), emit_store_block(module, buffers, state)
    visit = _emit_visit(module, buffers, state)
    tile_terms = buffers.rows * buffers.width
    keep = rows.copy_row(module, buffers.isa, "keep_d_query", "float32", tile_terms)
    fill = rows.fill(module, buffers.isa)
    (of_tile, tile_size), (of_block, block_size), (_, size) = buffers.tile, buffers.block, buffers.gradients
    with Function(module, "listed_item", [ptr, ptr, i64]) as (e, (s, w, index)):
        dims = state.dims(s)
        parts, most, zero = dims["P"], buffers.panel(dims), e.const(f32, 0.0)
        head, part = index // parts, index % parts
        tiles, slots = w.at(block_size), w.at(of_block["slots"])
        gradients = tiles.at(most * tile_size + size)
        partials = state.pointer(s, "shared").at(index * buffers.gradient_bytes(dims))
        with e.loop(part, blocks(dims), parts) as n:
            e.run(fill, gradients.at(n // parts * size), size // 4, zero)
        filled = e.variable(e.const(i64, 0))
        with e.loop(0, dims["I"]) as i:
            with e.loop(0, most) as r:
                e.run(load_tile, s, w, tiles.at(r * tile_size), head, i * most + r)
            listed = state.pointer(s, "data:listed").at((head * dims["I"] + i) * dims["E"], 4)
            with e.loop(0, dims["E"]) as n:
                name = listed.at(n, 4).load(i32).integer(i64)
                with e.when(name >= 0), e.loop(name * unit, e.min(name * unit + unit, dims["S"])) as slot:
                    with e.when((slot // BLOCK_KEYS % parts).equals(part)):
                        slots.at(filled(), 4).store(slot.integer(i32))
                        filled.set(filled() + 1)
                    with e.when(filled().equals(BLOCK_KEYS)):
                        e.run(visit, s, w, head)
                        filled.set(e.const(i64, 0))
            with e.when(filled() > 0):
                with e.loop(filled(), BLOCK_KEYS) as j:
                    slots.at(j, 4).store(e.const(i32, -1))
                e.run(visit, s, w, head)
                filled.set(e.const(i64, 0))
            with e.loop(0, most) as r:
                d_query, n = tiles.at(r * tile_size + of_tile["d_query"]), i * most + r
                e.either(
                    parts.equals(1),
                    lambda d=d_query, n=n: e.run(write, s, w, d, head, n),
                    lambda d=d_query, n=n: e.run(keep, d, partials.at(n * tile_terms, 4)),
                )
        with e.loop(part, blocks(dims), parts) as n:
            e.run(store, s, gradients.at(n // parts * size), head, n * BLOCK_KEYS)
    return e.function


def _emit_visit(module: ir.Module, buffers: Buffers, state: State) -> ir.Function:
    """``visit(state, workspace, head)``: the rows of the panel against the keys in the slots of the block."""
    load_block, step = emit_load_block(module, buffers, state), emit_step(module, buffers, state)
    fill, type_ = rows.fill(module, buffers.isa), vector(f32, buffers.isa.lanes)
    (_, tile_size), (of_block, block_size), (at, size) = buffers.tile, buffers.block, buffers.gradients
    with Function(module, "visit", [ptr, ptr, i64]) as (e, (s, w, head)):
        dims = state.dims(s)
        most, numbers = buffers.panel(dims), state.pointer(s, "data:numbers")
        tiles = w.at(block_size)
        found = tiles.at(most * tile_size)
        e.run(fill, found, size // 4, e.const(f32, 0.0))
        e.run(load_block, s, w, head, 0)
        with e.loop(0, most) as r:
            e.run(step, s, w, tiles.at(r * tile_size), found, numbers, 0)
        with e.loop(0, BLOCK_KEYS) as j:
            slot = w.at(of_block["slots"]).at(j, 4).load(i32).integer(i64)
            with e.when(slot >= 0):
                of_keys = found.at(slot // BLOCK_KEYS // dims["P"] * size + size)
                for name, width in (("d_key", buffers.width), ("d_value", buffers.value_width)):
                    source, target = found.at(at[name]), of_keys.at(at[name])
                    with e.loop(0, width, buffers.isa.lanes) as d:
                        target.at(slot % BLOCK_KEYS * width + d, 4).add(source.at(j * width + d, 4).load(type_))
    return e.function
