"""The outputs and sums of a tile of query rows, while it attends to one block of keys after the other.

A sum loses digits with every addition: with 131072 keys added one block after the other, float32 errors are about three
times those of ``standard`` (tests/backends/flash_cpu/test_long_sums.py). So the sums of some blocks are added up before
they join those of the blocks before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from llvmlite import ir

from . import rows
from .emit import Function, Value, f32, i64, ptr, vector
from .isa import Isa

JOINED_BLOCKS = 32


class RunningSums:
    """In the buffers ``at``: ``out`` and ``total`` of the latest blocks, ``earlier_out`` and ``earlier_total``.

    Outputs are rows of ``width`` numbers; with tile registers they are transposed (``products.py``).
    """

    def __init__(self, module: ir.Module, isa: Isa, at: dict[str, int], queries: int, width: int) -> None:
        self._isa, self._at, self._width, self._type = isa, at, width, vector(f32, isa.lanes)
        self._sizes, self._queries = {"out": queries * width, "total": queries}, queries
        self._fill, self._rescale, self._add = (
            rows.fill(module, isa),
            self._emit_rescale(module),
            self._emit_add(module),
        )

    @contextlib.contextmanager
    def of_blocks(self, e: Function, w: Value, count: Value) -> Iterator[Value]:
        """A loop over ``count`` blocks, behind which ``out`` and ``total`` are those of all of them."""
        with e.when(count >= JOINED_BLOCKS):
            for name, size in self._sizes.items():
                e.run(self._fill, self._earlier(w, name), size, e.const(f32, 0.0))
        with e.loop(0, count) as block:
            yield block
            with e.when((block % JOINED_BLOCKS).equals(JOINED_BLOCKS - 1)):
                for name, size in self._sizes.items():
                    e.run(self._add, self._earlier(w, name), w.at(self._at[name]), size)
                    e.run(self._fill, w.at(self._at[name]), size, e.const(f32, 0.0))
        with e.when(count >= JOINED_BLOCKS):
            for name, size in self._sizes.items():
                e.run(self._add, w.at(self._at[name]), self._earlier(w, name), size)

    def rescale(self, e: Function, w: Value, block: Value, group: Value, decay: Value) -> None:
        """The maxima of a group of rows were raised in ``block``; the softmax has rescaled its ``total``."""
        e.run(self._rescale, self.of_group(w.at(self._at["out"]), group), decay)
        with e.when(block >= JOINED_BLOCKS):
            e.run(self._rescale, self.of_group(self._earlier(w, "out"), group), decay)
            for lane in range(0, self._isa.group, self._isa.lanes):
                place = self._earlier(w, "total").at(group, 4).at(lane, 4)
                place.store(place.load(self._type) * decay.at(lane, 4).load(self._type))

    def of_group(self, out: Value, group: Value) -> Value:
        """Of outputs: those of a group of rows, which is numbered by its first row."""
        return out.at(group if self._isa.tiles else group * self._width, 4)

    def _earlier(self, w: Value, name: str) -> Value:
        return w.at(self._at[f"earlier_{name}"])

    def _emit_rescale(self, module: ir.Module) -> ir.Function:
        """``rescale(out, decay)``: every row of a group times its factor."""
        isa, arguments = self._isa, [ptr, ptr]
        if isa.tiles:
            with Function(module, "rescale", arguments) as (e, (out, decay)), e.loop(0, isa.group, isa.lanes) as i:
                factor = decay.at(i, 4).load(self._type)
                with e.loop(0, self._width) as d:
                    place = out.at(d * self._queries + i, 4)
                    place.store(place.load(self._type) * factor)
            return e.function
        with Function(module, "rescale", arguments) as (e, (out, decay)), e.loop(0, isa.group) as i:
            factor = e.splat(decay.at(i, 4).load(f32), isa.lanes)
            with e.loop(0, self._width, isa.lanes) as d:
                place = out.at(i * self._width + d, 4)
                place.store(place.load(self._type) * factor)
        return e.function

    def _emit_add(self, module: ir.Module) -> ir.Function:
        """``add_sums(sums, others, numbers)``: ``sums`` plus ``others``."""
        lanes, arguments = self._isa.lanes, [ptr, ptr, i64]
        with Function(module, "add_sums", arguments) as (e, (sums, others, numbers)), e.loop(0, numbers, lanes) as i:
            sums.at(i, 4).add(others.at(i, 4).load(self._type))
        return e.function
