"""AMX's instructions on tile registers as functions of the module that uses them, as Intel's manual defines them.

``tiles.operation`` is replaced by :func:`operation`; then a kernel for AMX runs on a processor without it. Every thread
has registers of its own. A register without a configured size loads, multiplies and stores nothing. A product of
registers whose sizes do not fit is NaN, where a processor would end the process.
"""

from llvmlite import ir

from attnsuite.backends.flash_cpu import tiles
from attnsuite.backends.flash_cpu.emit import Function, Value, f32, i8, i16, i32, i64, ptr, vector, void

THREADS = 64
OWNER, WIDTHS, ROWS, REGISTERS = 0, 64 + 16, 64 + 48, 128  # the configuration lies at 64
BYTES = 1024  # of a register
STATE = REGISTERS + 8 * BYTES
LANES = vector(f32, 16)


def emulate(monkeypatch):
    """From now on."""
    monkeypatch.setattr(tiles, "operation", operation)


def operation(e, name, *operands):
    """As ``tiles.operation``."""
    known = e.module.globals.get(f"emulated.{name}")
    e.run(known or INSTRUCTIONS[name](e.module, f"emulated.{name}"), *operands)


def _state(module):
    """``state() -> pointer``: of this thread, from a table in the module."""
    name = "emulated.state"
    if name in module.globals:
        return module.globals[name]
    table = ir.GlobalVariable(module, ir.ArrayType(i8, THREADS * STATE), "emulated.table")
    table.linkage, table.align, table.initializer = "internal", 64, ir.Constant(table.type.pointee, None)
    with Function(module, name, [], ptr) as (e, _):
        thread = e.call("pthread_self", i64)
        with e.loop(0, THREADS) as i:
            place = Value(e, table).at(i * STATE)
            swapped = e.builder.cmpxchg(place.raw, ir.Constant(i64, 0), thread.raw, "seq_cst", "seq_cst")
            owner = Value(e, e.builder.extract_value(swapped, 0))
            with e.leave_when(owner.equals(0) | owner.equals(thread)):
                e.ret(place)
        e.call("abort", void)
        e.ret(e.null())
    return e.function


class _Register:
    """A register of the present thread: its configured size, and its place."""

    def __init__(self, e, number):
        state = e.run(_state(e.module))
        self.rows = state.at(ROWS + number).load(i8, 1).integer(i64)
        self.lanes = state.at(WIDTHS + number * 2).load(i16, 2).integer(i64) // 4
        self.place = state.at(REGISTERS + number * BYTES)

    def row(self, m):
        return self.place.at(m * 64)


def _clear(e, place, size):
    with e.loop(0, size, 64) as i:
        place.at(i).store(e.const(vector(i32, 16), 0))


def _ldtilecfg(module, name):
    with Function(module, name, [ptr]) as (e, (configuration,)):
        state = e.run(_state(module))
        _clear(e, state.at(64), STATE - 64)
        state.at(64).store(configuration.load(vector(i32, 16), 1))
    return e.function


def _tilerelease(module, name):
    with Function(module, name, []) as (e, _):
        _clear(e, e.run(_state(module)).at(64), STATE - 64)
    return e.function


def _tilezero(module, name):
    with Function(module, name, [i64]) as (e, (number,)):
        _clear(e, _Register(e, number).place, BYTES)
    return e.function


def _move(module, name):
    """Both directions."""
    with Function(module, name, [i64, ptr, i64]) as (e, (number, place, stride)):
        register = _Register(e, number)
        if name.endswith("tileloadd64"):
            _clear(e, register.place, BYTES)
        with e.loop(0, register.rows) as m, e.loop(0, register.lanes) as n:
            ends = [place.at(m * stride + n * 4), register.row(m).at(n, 4)]
            source, target = ends if name.endswith("tileloadd64") else ends[::-1]
            target.store(source.load(i32))
    return e.function


def _flushed(e, x):
    """Subnormal numbers are zero."""
    bits = x.bits_as(vector(i32, 16))
    return e.select((bits & 0x7F800000).equals(0), (bits & -(2**31)).bits_as(LANES), x)


def _tdpbf16ps(module, name):
    with Function(module, name, [i64] * 3) as (e, numbers):
        c, a, b = (_Register(e, number) for number in numbers)
        fits = a.lanes.equals(b.rows) & a.rows.equals(c.rows) & b.lanes.equals(c.lanes)
        with e.loop(0, c.rows) as m:
            halves = [e.variable(e.const(LANES, 0.0)) for _ in range(2)]
            with e.loop(0, a.lanes) as k:
                pairs = e.splat(a.row(m).at(k, 4).load(i32), 16), b.row(k).load(vector(i32, 16))
                for half, widen in zip(halves, (lambda x: x << 16, lambda x: x & -(2**16)), strict=True):
                    x, y = (_flushed(e, widen(pair).bits_as(LANES)) for pair in pairs)
                    half.set(_flushed(e, e.fma(x, y, half())))
            total = _flushed(e, halves[0]() + halves[1]())
            total = _flushed(e, _flushed(e, c.row(m).load(LANES)) + total)
            wide = e.splat(fits, 16)
            c.row(m).store(e.select(wide, total, float("nan")))
    return e.function


INSTRUCTIONS = {
    "ldtilecfg": _ldtilecfg,
    "tilerelease": _tilerelease,
    "tilezero": _tilezero,
    "tileloadd64": _move,
    "tilestored64": _move,
    "tdpbf16ps": _tdpbf16ps,
}
