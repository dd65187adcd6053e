"""The attention mass of every unit of keys in a decode step: the decode kernel with a range per unit, mostly no values.

With values the step is dense attention that also gives the mass. A range ends with each row's maximum and sum
(``decode.py``). Phase 2 pools them over the rows of a KV head::

    mass[u] = sum_r total[r, u] 2**(top[r, u] - top[r]) / total[r]
"""

from __future__ import annotations

import dataclasses
from typing import Any

from llvmlite import ir

from .decode import Walk, emit_join
from .decode_buffers import Buffers, DecodeKernel
from .decode_parts import exp2_scalar
from .emit import Function, f32, i64, ptr
from .forward import fits
from .handler import Dims, Operand, Phase, Program, State
from .isa import Isa
from .softmax import HIDDEN

RUN_KEYS = 2048  # of an item, in whole units


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeMass:
    """What a kernel of the mass is compiled for: a decode kernel, mostly without values, and the keys of a unit."""

    kernel: DecodeKernel
    unit: int

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Those of the decode kernel; the result says how many units there are."""
        without = ("ranges",) if self.kernel.value_head_dim else ("ranges", "value")
        return tuple(x for x in self.kernel.operands if x.name not in without)

    @property
    def results(self) -> tuple[Operand, ...]:
        """The mass of every unit, with values the output, and scratch memory."""
        out, scratch = self.kernel.results  # it has no sums
        mass = Operand("mass", "float32", ("B", "K", "P"))
        return (mass, out, scratch) if self.kernel.value_head_dim else (mass, scratch)


def build(module: ir.Module, isa: Isa, this: DecodeMass) -> tuple[Program, State]:
    """The program of the mass of all units for one new token, float32."""
    buffers = Buffers(isa, this.kernel)
    state = State.of(this.operands, this.results, 2)

    def whole(dims: Dims) -> list[tuple[Any, str]]:
        units = (dims["S"] + (this.unit - 1)) // this.unit
        return [*fits(dims), (units.equals(dims["P"]), "the mass has not one number for each unit of keys.")]

    units = _emit_units(module, buffers, state, this.unit)
    phases = (
        Phase(lambda dims: dims["B"] * dims["K"] * _runs(this.unit, dims), units),
        Phase(lambda dims: dims["B"] * dims["K"], _emit_pool(module, buffers, state)),
    )
    return Program(this.operands, this.results, phases, buffers.shared_bytes, buffers.worker_bytes, whole), state


def _runs(unit: int, dims: Dims) -> Any:
    """Runs of units that are one item each: keys that lie behind each other are read the fastest."""
    run = max(1, RUN_KEYS // unit)
    return (dims["P"] + (run - 1)) // run


def _emit_units(module: ir.Module, buffers: Buffers, state: State, unit: int) -> ir.Function:
    """``item(state, workspace, index)``: a run of units of one KV head."""
    walk, run = Walk(module, buffers, state), max(1, RUN_KEYS // unit)
    with Function(module, "units_item", [ptr, ptr, i64]) as (e, (s, w, index)):
        dims = state.dims(s)
        units, runs = dims["P"], _runs(unit, dims)
        head, first = index // runs, index % runs * run
        of_head = walk.of_heads(e, s, w, head)
        with e.loop(first, e.min(first + run, units)) as u:
            partial, end = walk.partial(s, head * units + u), (u + 1) * unit
            e.run(walk.read, s, w, partial, head)
            of_head(lambda _, at=partial: at, u * unit, e.min(end, dims["S"]), end)
        e.ret()
    return e.function


def _emit_pool(module: ir.Module, buffers: Buffers, state: State) -> ir.Function:
    """``item(state, workspace, index)``: the mass of the units of one KV head.

    A row that saw nothing adds zero, and so does a unit for a row whose score there is not finite.
    """
    isa = buffers.isa
    top_at, total_at = buffers.value_width, buffers.value_width + 1
    join = emit_join(module, buffers, state) if buffers.kernel.value_head_dim else None
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
            top = e.variable(e.const(f32, HIDDEN))
            with e.loop(0, units) as u:
                top.set(e.max(row.at(u * whole + top_at, 4).load(f32), top()))
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
                place = mass.at(u, 4)
                place.store(place.load(f32) + row.at(u * whole + total_at, 4).load(f32) * factor)
        e.ret()
    return e.function
