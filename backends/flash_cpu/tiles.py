"""Products of bfloat16 by AMX: the tile registers, their configuration, and the permission to use them.

A tile register holds up to 16 rows of 64 bytes. One instruction (Intel's Software Developer's Manual, TDPBF16PS) adds
the product of two of them, whose terms are pairs of bfloat16, to a third of float32::

    C[m, n] += sum_k A[m, k][0] B[k, n][0] + A[m, k][1] B[k, n][1]        m, n, k below 16

So the loop of ``products.py`` takes 16 terms at once, in the layouts that it has. The sum over ``k`` starts at zero and
is added to C when it is complete: a long sum is a sum of short sums. Terms of the left operand lie next to each other;
a product whose left operand has them in rows (the probabilities) is computed transposed (``products.py``).

Sizes of registers are configured per thread. A worker of ``handler.py`` loads the configuration before its first item,
and gives the registers back after the last, since the thread is XLA's.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from .emit import Function, Value, constant, i8, i64, ptr, void

# Registers 0 to 3 hold sums. Two more hold a left and a right operand of 16 terms, the last two operands of 8.
SIZES = (*[(16, 64)] * 6, (16, 32), (8, 64))  # rows and bytes per row
WHOLE, HALF = (4, 5), (6, 7)
TERMS, HALF_TERMS = 16, 8

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # Linux on x86-64: arch_prctl(ARCH_REQ_XCOMP_PERM)


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """A register tile ``c[r, :] (+)= sum_n a[r, n] b[n, :]``; strides in elements of four bytes, ``n`` counts terms."""

    rows: int
    vectors: int
    row_stride: int  # from a[r, n] to a[r + 1, n]
    term_stride: int  # from a[r, n] to a[r, n + 1]
    b_stride: int
    c_stride: int
    accumulate: bool
    pack: int


@functools.cache
def permitted() -> bool:
    """Whether the system lets this process use tile registers. Linux is asked once, for all threads."""
    return sys.platform == "linux" and ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


def configuration() -> bytes:
    """The operand of LDTILECFG: palette 1, bytes per row, rows."""
    counts, widths = zip(*SIZES, strict=True)
    return struct.pack("<B15x8H16x8B8x", 1, *widths, *counts)


def operation(e: Function, name: str, *operands: Any) -> None:
    """One instruction on tile registers, of which an int is the number. All are emitted here."""
    e.call(f"llvm.x86.{name}", void, *(e.const(i8, x) if isinstance(x, int) else x for x in operands))


@contextmanager
def configured(e: Function) -> Iterator[None]:
    """Around calls of functions of the module; nothing is emitted where none of them multiplies tiles."""
    used = any(name.endswith(".tdpbf16ps") for name in e.module.globals)
    if used:
        operation(e, "ldtilecfg", Value(e, constant(e.module, "tiles", configuration())))
    yield
    if used:
        operation(e, "tilerelease")


def whole(terms: int) -> int:
    """``terms`` rounded up to what :func:`product` takes."""
    return -(-terms // HALF_TERMS) * HALF_TERMS


def product(module: ir.Module, name: str, tile: Tile) -> ir.Function:
    """A function ``(a, b, c, terms, rows)``: as ``products.product``, for any number of whole tiles of 16 rows.

    ``terms`` is a multiple of 8; pairs that pad are 0. The terms of the left operand lie next to each other. A tile has
    at most 4 vectors, in two halves. The sums of one are stored when those of the next are on their way: a store behind
    its own product would wait for it, and what follows for the store.
    """
    middle = -(-tile.vectors // 2)
    early, late = range(middle), range(middle, tile.vectors)
    with Function(module, name, [ptr, ptr, ptr, i64, i64]) as (e, (a, b, c, terms, rows)):

        def move(way: str, register: int, place: Value, stride: int) -> None:
            operation(e, way, register, place, e.const(i64, stride * 4))

        def multiply(half: range, left: int, right: int, place: Value, n: Value) -> None:
            move("tileloadd64", left, place.at(n, 4), tile.row_stride)
            for j in half:
                move("tileloadd64", right, b.at(n * tile.b_stride + 16 * j, 4), tile.b_stride)
                operation(e, "tdpbf16ps", j, left, right)

        def sums(way: str, half: range, place: Value) -> None:
            for j in half:
                move(way, j, place.at(16 * j, 4), tile.c_stride)

        pending = e.variable(c)
        sums("tileloadd64", late, c)  # stored once more, as it is
        rest = terms // TERMS * TERMS
        with e.loop(0, rows, 16) as r:
            place, out = a.at(r * tile.row_stride, 4), c.at(r * tile.c_stride, 4)
            for half, other in ((early, late), (late, early)):
                if tile.accumulate:
                    sums("tileloadd64", half, out)
                else:
                    for j in half:
                        operation(e, "tilezero", j)
                with e.loop(0, rest, TERMS) as n:
                    multiply(half, *WHOLE, place, n)
                with e.when(rest < terms):
                    multiply(half, *HALF, place, rest)
                sums("tilestored64", other, pending())
                pending.set(out)
        sums("tilestored64", late, pending())
    return e.function
