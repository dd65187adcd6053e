"""Products of bfloat16 by AMX: the tile registers, their configuration, and the permission to use them.

A tile register holds up to 16 rows of 64 bytes. One instruction (Intel's Software Developer's Manual, TDPBF16PS) adds
the product of two of them, whose terms are pairs of bfloat16, to a third of float32::

    C[m, n] += sum_k A[m, k][0] B[k, n][0] + A[m, k][1] B[k, n][1]        m, n, k below 16

So the loop of ``products.py`` takes 16 terms at once, in the layouts that it has. The sum over ``k`` starts at zero and
is added to C when it is complete: a long sum is a sum of short sums. A keys-major left operand (the probabilities) has
its terms in rows instead of columns, and 16 x 16 of its terms are transposed on the way into a register.

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

from . import rows
from .emit import Function, Value, constant, i8, i32, i64, ptr, vector, void

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
    """As ``products.product``, for 16 rows and at most 4 vectors. ``terms`` is a multiple of 8; pairs that pad are 0.

    Of the left operand's strides one is 1.
    """
    with Function(module, name, [ptr, ptr, ptr, i64]) as (e, (a, b, c, terms)):
        turned = None if tile.term_stride == 1 else e.stack(ir.ArrayType(i32, 16 * TERMS))

        def move(way: str, register: int, place: Value, stride: int) -> None:
            operation(e, way, register, place, e.const(i64, stride * 4))

        def multiply(left: int, right: int, n: Value, count: int) -> None:
            place = a.at(n * tile.term_stride, 4)
            if turned is None:
                move("tileloadd64", left, place, tile.row_stride)
            else:
                row = vector(i32, 16)
                square = [place.at(i * tile.term_stride, 4).load(row) for i in range(count)]
                square += [e.const(row, 0)] * (TERMS - count)
                for i, x in enumerate(rows.turned(e, square)):
                    turned.at(i * TERMS, 4).store(x)
                move("tileloadd64", left, turned, TERMS)
            for j in range(tile.vectors):
                move("tileloadd64", right, b.at(n * tile.b_stride + 16 * j, 4), tile.b_stride)
                operation(e, "tdpbf16ps", j, left, right)

        for j in range(tile.vectors):
            if tile.accumulate:
                move("tileloadd64", j, c.at(16 * j, 4), tile.c_stride)
            else:
                operation(e, "tilezero", j)
        rest = terms // TERMS * TERMS
        with e.loop(0, rest, TERMS) as n:
            multiply(*WHOLE, n, TERMS)
        with e.when(rest < terms):
            multiply(*HALF, rest, HALF_TERMS)
        for j in range(tile.vectors):
            move("tilestored64", j, c.at(16 * j, 4), tile.c_stride)
    return e.function
