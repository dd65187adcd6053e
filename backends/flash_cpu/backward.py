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

from . import added, masking, rows
from .added import Added, sharing
from .backward_buffers import BLOCK_KEYS, Buffers, blocks, operands, results
from .backward_rows import emit_load_block, emit_load_tile, emit_store_block, emit_write, emit_write_slopes
from .emit import Function, Value, f32, i64, ptr, vector
from .forward import Kernel, fits
from .handler import Dims, Phase, Signature, State
from .isa import Isa
from .products import Scores, Weighted
from .slopes import slopes


def signature(isa: Isa, kernel: Kernel) -> Signature:
    """How XLA calls a backward pass."""
    buffers = Buffers(isa, kernel)
    return Signature(
        operands(kernel),
        results(kernel),
        buffers.shared_bytes,
        buffers.worker_bytes,
        lambda dims: [*fits(dims), *added.fits(kernel.arrays, dims)],
    )


def phases(module: ir.Module, isa: Isa, kernel: Kernel, state: State) -> tuple[Phase, ...]:
    """The phases of a backward pass, with their functions in the module."""
    buffers = Buffers(isa, kernel)
    write = emit_write(module, buffers, state)

    def sets(dims: Dims) -> Any:
        """Sets of KV heads that share nothing of a bias."""
        batches, kinds, _ = sharing(dims) if "bias" in kernel.arrays.learned else (dims["B"], dims["K"], 1)
        return batches * kinds

    columns = _emit_columns(module, buffers, state, write)
    add = emit_add(module, buffers, state, write)
    return (
        Phase(lambda dims: sets(dims) * dims["P"], columns),
        Phase(lambda dims: dims["B"] * dims["K"] * buffers.tiles(dims) * buffers.several(dims), add),
    )


def _emit_columns(module: ir.Module, buffers: Buffers, state: State, write: ir.Function) -> ir.Function:
    """``item(state, workspace, index)``: every ``P``-th key block of a KV head, against all its rows."""
    write_slopes = emit_write_slopes(module, buffers, state) if "alibi" in buffers.kernel.arrays.learned else None
    load_tile = emit_load_tile(module, buffers, state)
    extra = Added(buffers.isa, buffers.kernel.arrays, state, buffers.rows)
    find_rows = extra.emit_rows(module) if extra.arrays.any else None
    clear = extra.emit_clear(module, BLOCK_KEYS) if "bias" in extra.arrays.learned else None
    load_block = emit_load_block(module, buffers, state)
    step = emit_step(module, buffers, state)
    store = emit_store_block(module, buffers, state)
    tile_terms = buffers.rows * buffers.width
    keep = rows.copy_row(module, buffers.isa, "keep_d_query", "float32", tile_terms)
    fill = rows.fill(module, buffers.isa)
    (of_tile, tile_size), (_, block_size), (_, gradients_size) = buffers.tile, buffers.block, buffers.gradients
    with Function(module, "columns", [ptr, ptr, i64, i64]) as (e, (s, w, head, part)):
        dims = state.dims(s)
        parts, count, most = dims["P"], buffers.tiles(dims), buffers.panel(dims)
        tiles = w.at(block_size)
        gradients = tiles.at(most * tile_size)
        partials = state.pointer(s, "shared").at((head * parts + part) * buffers.gradient_bytes(dims))
        zero, numbers = e.const(f32, 0.0), state.pointer(s, "data:numbers")
        with e.loop(0, count, most) as first:
            panel = e.min(count - first, most)
            with e.loop(0, panel) as i:
                tile = tiles.at(i * tile_size)
                e.run(load_tile, s, w, tile, head, first + i)
                if find_rows is not None:
                    start, real = buffers.rows_of(e, dims, first + i)
                    of_rows = tile.at(of_tile["added_rows"])
                    e.run(find_rows, s, head // dims["K"], head % dims["K"], start, real, of_rows)
            with e.loop(part, blocks(dims), parts) as n:
                of_block = gradients.at(n // parts * gradients_size)
                with e.when(first.equals(0)):
                    e.run(fill, of_block, gradients_size // 4, zero)
                e.run(load_block, s, w, head, n * BLOCK_KEYS)
                with e.loop(0, panel) as i:
                    tile = tiles.at(i * tile_size)
                    if clear is not None:
                        e.run(clear, s, tile.at(of_tile["added_rows"]), n * BLOCK_KEYS)
                    e.run(step, s, w, tile, of_block, numbers, n * BLOCK_KEYS)
                with e.when(first + panel >= count):
                    e.run(store, s, of_block, head, n * BLOCK_KEYS)
            with e.loop(0, panel) as i:
                d_query, n = tiles.at(i * tile_size + of_tile["d_query"]), first + i
                e.either(
                    parts.equals(1),
                    lambda d=d_query, n=n: e.run(write, s, w, d, head, n),
                    lambda d=d_query, n=n: e.run(keep, d, partials.at(n * tile_terms, 4)),
                )
                if write_slopes is not None:
                    e.run(write_slopes, s, tiles.at(i * tile_size + of_tile["added_rows"]), head, n, part)
    return _emit_sets(module, state, e.function, alone=clear is None)


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
    return e.function


def emit_step(module: ir.Module, buffers: Buffers, state: State) -> ir.Function:
    """``step(state, workspace, tile, gradients, numbers, slot)``: a tile of rows against the block of keys at slot."""
    isa, kernel, n, pack = buffers.isa, buffers.kernel, buffers.rows, buffers.pack
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
    to_query = Weighted.of(module, isa, "to_query", width, (1, n), pack, BLOCK_KEYS // 2 * isa.tiles)
    extra = Added(isa, kernel.arrays, state, n)
    modify = extra.modified if kernel.arrays.score is not None else None
    options: dict[str, Any] = {"soft_cap": kernel.soft_cap, "pack": pack, "added": kernel.arrays.any, "modify": modify}
    plain, masked = (slopes(module, isa, n, mixed=mixed, **options) for mixed in (False, True))
    fetch = extra.emit_fetch(module) if kernel.arrays.any else None
    keep = extra.emit_gradient(module) if kernel.arrays.learned else None
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
                pointers = (block["by_key"].at(g, 4), per_query, block["position"], block["key_id"])
                modified = [] if modify is None else [rows_["added_rows"].at(g, 4)]
                narrow = [block[name].at(g, 2) for name in ("scores", "d_probs")] if pack == 2 else []
                arguments = (s, d, *pointers, numbers, *to_add, *modified, *narrow, live.start, live.stop)
                e.either(live.mixed, lambda a=arguments: e.run(masked, *a), lambda a=arguments: e.run(plain, *a))
                if keep is not None:
                    e.run(keep, *of_group, *to_add)
            keys, all_rows = (live.start, live.stop), (0, n)
            to_value.emit(e, block["scores"], rows_["d_out"], d_value, keys, all_rows)
            to_key.emit(e, block["d_probs"], rows_["query"], d_key, keys, all_rows)
            by_key = (block["d_probs"], block["key"]) if pack == 1 else (block["by_key"], block["key_joined"])
            to_query.emit(e, *by_key, rows_["d_query"], all_rows, keys)
    return e.function


def emit_add(module: ir.Module, buffers: Buffers, state: State, write: ir.Function) -> ir.Function:
    """``item(state, workspace, index)``: one tile of dq, the sum of its parts in their order."""
    tile = buffers.rows * buffers.width
    type_ = vector(f32, buffers.isa.lanes)
    with Function(module, "add_item", [ptr, ptr, i64]) as (e, (s, w, index)):
        dims = state.dims(s)
        count, parts = buffers.tiles(dims), dims["P"]
        head, n = index // count, index % count
        whole = buffers.gradient_bytes(dims)
        first: Value = state.pointer(s, "shared").at(head * parts * whole).at(n * tile, 4)
        with e.loop(1, parts) as p, e.loop(0, tile, buffers.isa.lanes) as d:
            first.at(d, 4).add(first.at(p * whole).at(d, 4).load(type_))
        e.run(write, s, w, first, head, n)
    return e.function
