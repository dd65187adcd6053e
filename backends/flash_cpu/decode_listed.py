"""A decode step that attends to listed units of keys: the decode kernel, whose ranges are parts of a list.

Each KV head has a list of its own. The units are read in place, and no key that is not listed is read. The last phase
is that of ``decode.py``.
"""

from __future__ import annotations

import dataclasses

from llvmlite import ir

from .decode import Walk, emit_join
from .decode_buffers import Buffers, DecodeKernel
from .emit import Function, i32, i64, ptr
from .forward import fits
from .handler import Operand, Phase, Program, State
from .isa import Isa


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeListed:
    """What a kernel of listed units is compiled for: a decode kernel, and the keys of a unit."""

    kernel: DecodeKernel
    unit: int

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Those of the decode kernel, and per KV head distinct indices of units, then -1 to the end."""
        return (*self.kernel.operands, Operand("listed", "int32", ("B", "K", "W")))


def build(module: ir.Module, isa: Isa, this: DecodeListed) -> tuple[Program, State]:
    """The program of a decode step over listed units."""
    buffers, results = Buffers(isa, this.kernel), this.kernel.results
    state = State.of(this.operands, results, 2)
    phases = (
        Phase(lambda dims: dims["B"] * dims["K"] * dims["P"], _emit_part(module, buffers, state, this.unit)),
        Phase(lambda dims: dims["B"] * dims["K"], emit_join(module, buffers, state)),
    )
    return Program(this.operands, results, phases, buffers.shared_bytes, buffers.worker_bytes, fits), state


def _emit_part(module: ir.Module, buffers: Buffers, state: State, unit: int) -> ir.Function:
    """``item(state, workspace, index)``: a part of the list of one KV head."""
    walk = Walk(module, buffers, state)
    with Function(module, "part_item", [ptr, ptr, i64]) as (e, (s, w, index)):
        dims = state.dims(s)
        parts, length = dims["P"], dims["S"]
        head, part = index // parts, index % parts
        names = state.pointer(s, "data:listed").at(head * dims["W"], 4)
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
        e.ret()
    return e.function
