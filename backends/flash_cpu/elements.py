"""Numbers in a lane: conversion to and from float32, ``exp2`` and ``tanh``.

Arithmetic is float32, except that pairs of bfloat16 numbers can be multiplied and added to a float32. bfloat16 is the
upper half of a float32; it is rounded to nearest, ties to even.
"""

from __future__ import annotations

from .emit import BFloat, Function, Value, f16, f32, i8, i16, i32, vector
from .isa import AVX512, Isa

SIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
INFINITY = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}
# XLA_FFI_DataType
XLA_TYPE = {"float32": 11, "bfloat16": 16, "float16": 10, "int32": 4, "int8": 2, "uint8": 6, "bool": 1}

# 2**f, highest power first, with the relative error before rounding. For |f| <= 1/2: 2e-9.
_EXP2 = (1.5353362e-4, 1.3398874e-3, 9.6184373e-3, 5.5503324e-2, 2.4022648e-1, 6.9314720e-1, 1.0)
# For f from 0 to 1, exact at both ends: 2.2e-9; and 9.2e-8, for what becomes bfloat16. Minimax, by Remez's exchange.
_EXP2_FRACTION = (2.1715021e-4, 1.2440879e-3, 9.6780639e-3, 5.5484153e-2, 2.4022952e-1, 6.9314700e-1, 1.0)
_EXP2_SHORT = (1.8793188e-3, 8.9909947e-3, 5.5818677e-2, 2.4015927e-1, 6.9315171e-1, 1.0)
_ROUND = 12582912.0  # 1.5 * 2**23: adding and subtracting it rounds to an integer
# tanh(x) = x + x**3 * p(x**2) for |x| < 0.625 (Cephes, tanhf)
_TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)


def load(e: Function, place: Value, dtype: str, lanes: int | None) -> Value:
    """``lanes`` numbers (None: one scalar) at ``place`` as float32."""
    if dtype == "float32":
        return place.load(vector(f32, lanes))
    if dtype == "float16":
        return Value(e, e.builder.fpext(place.load(vector(f16, lanes), 2).raw, vector(f32, lanes)))
    if dtype == "int8":
        return Value(e, e.builder.sitofp(place.load(vector(i8, lanes), 1).raw, vector(f32, lanes)))
    bits = Value(e, e.builder.zext(place.load(vector(i16, lanes), 2).raw, vector(i32, lanes)))
    return (bits << 16).bits_as(vector(f32, lanes))


def load_halves(e: Function, place: Value, lanes: int) -> tuple[Value, Value]:
    """Twice ``lanes`` bfloat16 numbers at ``place`` as float32: those at even places and those at odd ones.

    Widened in their order they take twice as many instructions.
    """
    bits = place.load(vector(i32, lanes), 2)
    return (bits << 16).bits_as(vector(f32, lanes)), (bits & -0x10000).bits_as(vector(f32, lanes))


def store(e: Function, place: Value, value: Value, dtype: str) -> None:
    """float32 ``value`` (a vector or a scalar) rounded to ``dtype`` at ``place``."""
    lanes = getattr(value.type, "count", None)
    if dtype == "float32":
        place.store(value)
    elif dtype == "float16":
        place.store(Value(e, e.builder.fptrunc(value.raw, vector(f16, lanes))), 2)
    else:
        bits = value.bits_as(vector(i32, lanes))
        rounded = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
        rounded = e.select(value.is_nan(), e.const(bits.type, 0x7FC0), rounded)
        place.store(rounded.integer(vector(i16, lanes)), 2)


def pairs(e: Function, low: Value, high: Value) -> Value:
    """Two vectors of 16 float32 as 16 pairs of bfloat16, rounded to nearest even; subnormal numbers become zero."""
    both = e.call("llvm.x86.avx512bf16.cvtne2ps2bf16.512", vector(BFloat(), 32), high, low).bits_as(vector(i16, 32))
    return e.shuffle(both, both, [half + lane for lane in range(16) for half in (0, 16)]).bits_as(vector(i32, 16))


def narrow(e: Function, x: Value) -> Value:
    """16 float32 as 16 bfloat16, rounded as in :func:`pairs`."""
    return e.call("llvm.x86.avx512bf16.cvtneps2bf16.512", vector(BFloat(), 16), x)


def multiply_add(e: Function, x: Value, y: Value, total: Value) -> Value:
    """``total + x y`` in each lane; for pairs of bfloat16 (as int32) ``total + x[0] y[0] + x[1] y[1]``."""
    if x.is_float:
        return e.fma(x, y, total)
    x, y = (pair.bits_as(vector(BFloat(), 32)) for pair in (x, y))
    return e.call("llvm.x86.avx512bf16.dpbf16ps.512", total.type, total, x, y)


def exp2(e: Function, isa: Isa, x: Value, *, pack: int = 1) -> Value:
    """2**x for x up to 127, to an ulp or so; for pairs of bfloat16 (a ``pack`` of 2) to two or three.

    Below -126 AVX-512 rounds to a subnormal or zero; elsewhere the result stays at 2**-126.
    """
    lanes = x.type.count
    type_ = vector(f32, lanes)
    if isa.lanes == AVX512.lanes:
        zero, every, floor = e.const(type_, 0.0), e.const(i16, -1), e.const(i32, 9)
        f = e.call("llvm.x86.avx512.mask.reduce.ps.512", type_, x, floor, zero, every, e.const(i32, 4))
        p = _polynomial(e, _EXP2_FRACTION if pack == 1 else _EXP2_SHORT, f)
        return e.call("llvm.x86.avx512.mask.scalef.ps.512", type_, p, x, zero, every, e.const(i32, 4))
    x = e.max(x, -126.0)
    t = x + _ROUND
    p = _polynomial(e, _EXP2, x - (t - _ROUND))
    bits = vector(i32, lanes)
    return (p.bits_as(bits) + (t.bits_as(bits) << 23)).bits_as(type_)


def tanh(e: Function, isa: Isa, x: Value) -> Value:
    """Hyperbolic tangent with a small relative error also near 0, where the scores of a soft cap lie."""
    square = x * x
    near = e.fma(x * square, _polynomial(e, _TANH, square), x)
    size = e.max(x, e.const(x.type, 0.0) - x)
    grown = exp2(e, isa, e.min(size, 20.0) * 2.8853900817779268)  # exp(2 |x|)
    far = e.const(x.type, 1.0) - e.const(x.type, 2.0) / (grown + 1.0)
    far = e.select(x < 0.0, e.const(x.type, 0.0) - far, far)
    return e.select(size < 0.625, near, far)


def _polynomial(e: Function, coefficients: tuple[float, ...], x: Value) -> Value:
    total = e.const(x.type, coefficients[0])
    for coefficient in coefficients[1:]:
        total = e.fma(total, x, e.const(x.type, coefficient))
    return total
