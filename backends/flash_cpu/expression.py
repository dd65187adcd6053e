"""Mask and score functions as machine code: a JAX function of numbers, traced to operations, emitted lane by lane.

A function is traced once with scalars. Its jaxpr, with calls inlined, is a list of operations on float32, int32 and
bool (:class:`Expression`), which is a part of the kernel's key in the cache. :func:`emit` writes the operations on
vectors. So a kernel evaluates the function where it has the score, and nothing of size T x S is made, as FlexAttention
does on GPUs (arXiv 2412.05496). An array that the function indexes with scalars, ``table[i, j]``, is a constant of the
kernel (:class:`Table`). The operations of :data:`_OPERATIONS` are taken, everything else is unsupported.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Literal
from llvmlite import ir

from .. import scores
from . import elements
from .emit import Function, Value, constant, f32, i1, i32, i64, vector
from .isa import Isa

_TYPES = {"float32": f32, "int32": i32, "bool": i1}
MOST = 4000  # operations: LLVM takes about a second for so many
MOST_NUMBERS = 2**16  # of a table: 256 KiB in the kernel's object file

# Primitives that are a function and no more, and the parameter that holds its jaxpr. A loop has one too.
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """An array of numbers of four bytes; a bool is 0 or 1. ``digest`` stands for the numbers in a kernel's key."""

    shape: tuple[int, ...]
    dtype: str
    digest: str
    numbers: bytes = dataclasses.field(repr=False)


# The number of an earlier value (arguments first), a constant, or an array.
Operand = int | tuple[float | int | bool, str] | Table


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One operation. ``dtype`` is the result's; ``how`` is its exponent or its way of rounding, if it has one."""

    name: str
    operands: tuple[Operand, ...]
    dtype: str
    how: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Expression:
    """Steps on ``arguments`` values, and which values are the results."""

    arguments: int
    steps: tuple[Step, ...]
    results: tuple[Operand, ...]


class UnsupportedError(ValueError):
    """A clause that says what of a function the kernels cannot take."""


def of_mask(function: Any) -> Expression:
    """Of (query position, key position). Raises UnsupportedError."""
    return _named("mask_function", function, function, ("int32",) * 2, ("bool",))


def of_score(function: Any) -> Expression:
    """Of (score, batch, head, query and key position): the new score, and its derivative. Raises UnsupportedError."""
    derived = functools.partial(scores.derived, function)
    return _named("score_function", function, derived, ("float32", *("int32",) * 4), ("float32",) * 2)


def _named(field: str, function: Any, *traced: Any) -> Expression:
    try:
        return _traced(*traced)
    except UnsupportedError as error:
        raise UnsupportedError(f"{field}={function!r} is not supported by flash_cpu: it {error}") from error


def _traced(function: Any, arguments: tuple[str, ...], results: tuple[str, ...]) -> Expression:
    try:
        with jax.enable_x64(new_val=False):  # the kernels compute in 32 bits, whatever a Python number becomes
            closed = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct((), jnp.dtype(x)) for x in arguments))
    except Exception as error:  # the function is the user's: whatever it raises for a scalar
        first = str(error).splitlines()[:1] or [type(error).__name__]
        raise UnsupportedError(f"cannot be traced with one pair ({first[0]})") from error
    steps: list[Step] = []
    found = tuple(_inlined(closed.jaxpr, closed.consts, list(range(len(arguments))), len(arguments), steps))
    dtypes = tuple(_dtype(x, arguments, steps) for x in found)
    if any(getattr(x, "shape", ()) for x in closed.out_avals):
        raise UnsupportedError(f"gives {', '.join(map(str, closed.out_avals))} for one pair, which is no number")
    if dtypes != results:
        raise UnsupportedError(f"gives {', '.join(dtypes)} for one pair, not {', '.join(results)}")
    if len(steps) > MOST:
        raise UnsupportedError(f"has {len(steps)} operations, more than {MOST}")
    return Expression(len(arguments), tuple(steps), found)


def _dtype(x: Operand, arguments: tuple[str, ...], steps: list[Step]) -> str:
    if isinstance(x, tuple):
        return x[1]
    if isinstance(x, Table):
        return x.dtype
    return arguments[x] if x < len(arguments) else steps[x - len(arguments)].dtype


def _inlined(jaxpr: Any, consts: Any, arguments: list[Operand], first: int, steps: list[Step]) -> list[Operand]:
    """Appends a jaxpr's operations; what its results are."""
    values: dict[Any, Operand] = dict(zip(jaxpr.invars, arguments, strict=True))
    values |= {var: _constant(x) for var, x in zip(jaxpr.constvars, consts, strict=True)}

    def read(x: Any) -> Operand:
        aval: Any = x.aval
        return _constant(np.asarray(x.val, aval.dtype)) if isinstance(x, Literal) else values[x]

    for eqn in jaxpr.eqns:
        name, operands = eqn.primitive.name, [read(x) for x in eqn.invars]
        if name in _CALLS:
            inner = eqn.params[_CALLS[name]]
            values |= dict(zip(eqn.outvars, _inlined(inner.jaxpr, inner.consts, operands, first, steps), strict=True))
            continue
        aval = eqn.outvars[0].aval
        tables = [isinstance(x, Table) for x in operands]
        looks_up = name == "dynamic_slice" and tables[0] and not any(tables[1:])
        scalars = aval.size == 1 and (looks_up or not any(tables))
        if name == "select_n" and (len(operands) != 3 or eqn.invars[0].aval.dtype != bool):
            raise UnsupportedError(f"chooses by {eqn.invars[0].aval.dtype.name}, and the kernels choose by a bool")
        if name not in _OPERATIONS or not scalars or aval.dtype.name not in _TYPES:
            raise UnsupportedError(f"uses {name} of {aval.dtype.name}{list(aval.shape)}, which the kernels do not have")
        how = eqn.params.get("y", eqn.params.get("rounding_method", ""))
        steps.append(Step(name, tuple(operands), aval.dtype.name, getattr(how, "name", str(how))))
        values[eqn.outvars[0]] = first + len(steps) - 1
    return [read(x) for x in jaxpr.outvars]


def _constant(x: Any) -> Operand:
    text = f"{x.dtype.name}{list(x.shape)}"
    if isinstance(x, Tracer):
        raise UnsupportedError(f"holds an array {text} that is traced, and the kernels have constants alone")
    number = np.asarray(x)
    if number.dtype.name not in _TYPES or not 0 < number.size <= MOST_NUMBERS:
        raise UnsupportedError(
            f"holds an array {text}, and the kernels read float32, int32 and bool, of at most {MOST_NUMBERS} numbers"
        )
    if number.size == 1:
        return number.item(), number.dtype.name
    raw = (number.astype(np.int32) if number.dtype == bool else number).tobytes()
    return Table(number.shape, number.dtype.name, hashlib.sha256(raw).hexdigest(), raw)


def emit(e: Function, isa: Isa, expression: Expression, *arguments: Value) -> list[Value]:
    """The results for vectors of arguments."""
    values = list(arguments)

    def value(x: Operand) -> Any:
        if isinstance(x, Table):
            return x
        return values[x] if isinstance(x, int) else e.const(vector(_TYPES[x[1]], isa.lanes), x[0])

    for step in expression.steps:
        lanes = _Lanes(e, isa, vector(_TYPES[step.dtype], isa.lanes), step.how)
        values.append(_OPERATIONS[step.name](lanes, *map(value, step.operands)))
    return [value(x) for x in expression.results]


@dataclasses.dataclass(frozen=True, slots=True)
class _Lanes:
    """Where an operation is emitted, and the type of its result."""

    e: Function
    isa: Isa
    type: Any
    how: str

    def const(self, number: float) -> Value:
        """Of the result's type."""
        return self.e.const(self.type, number)

    def intrinsic(self, name: str, *operands: Value) -> Value:
        """LLVM's own function of float32 vectors."""
        return self.e.call(f"llvm.{name}.v{self.isa.lanes}f32", self.type, *operands)

    def library(self, name: str, *operands: Value) -> Value:
        """The C library's function, lane by lane."""
        return self.one_by_one(lambda *numbers: self.e.call(f"{name}f", f32, *numbers), *operands)

    def one_by_one(self, function: Callable[..., Value], *operands: Value) -> Value:
        """``function`` of the numbers of each lane."""
        b, result = self.e.builder, ir.Constant(self.type, ir.Undefined)
        for lane in range(self.isa.lanes):
            at = ir.Constant(i32, lane)
            numbers = [Value(self.e, b.extract_element(x.raw, at)) for x in operands]
            result = b.insert_element(result, function(*numbers).raw, at)
        return Value(self.e, result)


def _divided(lanes: _Lanes, x: Value, y: Value, *, remainder: bool) -> Value:
    """As XLA's: towards zero; by zero -1, or the dividend as remainder. The processor would end the process."""
    if x.is_float:
        return lanes.library("fmod", x, y) if remainder else x / y
    none, minus = y.equals(0), y.equals(-1)
    safe = lanes.e.select(none | minus, lanes.const(1), y)
    if remainder:
        return lanes.e.select(none, x, x % safe)
    return lanes.e.select(none, lanes.const(-1), lanes.e.select(minus, lanes.const(0) - x, x // safe))


def _looked_up(lanes: _Lanes, table: Value | Table, *indices: Value) -> Value:
    """The numbers at these indices, lane by lane. An index is moved into the array, as XLA does."""
    if not isinstance(table, Table):  # an array of one number is that number
        return table
    e, name, place = lanes.e, f"table_{table.digest}", lanes.e.const(indices[0].type, 0)
    for i, (index, size) in enumerate(zip(indices, table.shape, strict=True)):
        inside = e.max(e.min(index, size - 1), 0)
        place = place + inside * math.prod(table.shape[i + 1 :])
    if name not in e.module.globals:
        constant(e.module, name, table.numbers)
    start, type_ = Value(e, e.module.globals[name]), f32 if table.dtype == "float32" else i32

    def number(index: Value) -> Value:
        found = start.at(index.integer(i64), 4).load(type_, 1)
        return _unequal(lanes, found, e.const(i32, 0)) if table.dtype == "bool" else found

    return lanes.one_by_one(number, place)


def _number(lanes: _Lanes, x: Any) -> Any:
    """A bool as 0 or 1: true is -1 where it is compared as a signed number of one bit."""
    return Value(lanes.e, lanes.e.builder.zext(x.raw, vector(i32, lanes.isa.lanes))) if x.type.element == i1 else x


def _larger(lanes: _Lanes, x: Value, y: Value) -> Value:
    if x.type.element == i1:
        return x | y
    return lanes.intrinsic("maximum", x, y) if x.is_float else lanes.e.max(x, y)


def _smaller(lanes: _Lanes, x: Value, y: Value) -> Value:
    if x.type.element == i1:
        return x & y
    return lanes.intrinsic("minimum", x, y) if x.is_float else lanes.e.min(x, y)


def _negative(lanes: _Lanes, x: Value) -> Value:
    return lanes.const(-0.0) - x if x.is_float else lanes.const(0) - x


def _unequal(lanes: _Lanes, x: Value, y: Value) -> Value:
    return Value(lanes.e, lanes.e.builder.not_(x.equals(y).raw))  # a NaN is unequal to all


def _converted(lanes: _Lanes, x: Value) -> Value:
    source, target, b = x.type.element, lanes.type.element, lanes.e.builder
    if source == target:
        return x
    if target == i1:
        return _unequal(lanes, x, lanes.e.const(x.type, 0))
    if source == i1:
        return Value(lanes.e, (b.uitofp if target == f32 else b.zext)(x.raw, lanes.type))
    if target == f32:
        return Value(lanes.e, b.sitofp(x.raw, lanes.type))
    n = lanes.isa.lanes
    return lanes.e.call(f"llvm.fptosi.sat.v{n}i32.v{n}f32", lanes.type, x)  # at the ends of int32, a NaN is 0


def _power(lanes: _Lanes, x: Value) -> Value:
    exponent, product, square = abs(int(lanes.how)), lanes.const(1), x
    while exponent:
        product = product * square if exponent % 2 else product
        square, exponent = square * square, exponent // 2
    return lanes.const(1) / product if int(lanes.how) < 0 else product


_LIBRARY = ("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "exp", "exp2",
            "expm1", "log", "log1p", "cbrt", "atan2")  # fmt: skip
_OPERATIONS: Mapping[str, Callable[..., Value]] = {
    **{name: functools.partial(lambda lanes, *x, name: lanes.library(name, *x), name=name) for name in _LIBRARY},
    **dict.fromkeys(("add", "add_any"), lambda _, x, y: x + y),
    "sub": lambda _, x, y: x - y,
    "mul": lambda _, x, y: x * y,
    "div": functools.partial(_divided, remainder=False),
    "rem": functools.partial(_divided, remainder=True),
    "neg": _negative,
    "abs": lambda lanes, x: lanes.intrinsic("fabs", x) if x.is_float else lanes.e.max(x, _negative(lanes, x)),
    "sign": lambda lanes, x: lanes.e.select(x > 0, lanes.const(1), lanes.e.select(x < 0, lanes.const(-1), x)),
    "max": _larger,
    "min": _smaller,
    "clamp": lambda lanes, low, x, high: _smaller(lanes, _larger(lanes, low, x), high),
    "square": lambda _, x: x * x,
    "one_minus_square": lambda lanes, x: (lanes.const(1.0) - x) * (x + 1.0),
    "pow": lambda lanes, x, y: lanes.library("pow", x, _converted(lanes, y)),
    "integer_pow": _power,
    "sqrt": lambda lanes, x: lanes.intrinsic("sqrt", x),
    "rsqrt": lambda lanes, x: lanes.const(1.0) / lanes.intrinsic("sqrt", x),
    "floor": lambda lanes, x: lanes.intrinsic("floor", x),
    "ceil": lambda lanes, x: lanes.intrinsic("ceil", x),
    "round": lambda lanes, x: lanes.intrinsic("round" if lanes.how == "AWAY_FROM_ZERO" else "roundeven", x),
    "tanh": lambda lanes, x: elements.tanh(lanes.e, lanes.isa, x),
    "logistic": lambda lanes, x: lanes.const(1.0) / (lanes.library("exp", _negative(lanes, x)) + 1.0),
    "eq": lambda _, x, y: x.equals(y),
    "ne": _unequal,
    "lt": lambda lanes, x, y: _number(lanes, x) < _number(lanes, y),
    "le": lambda lanes, x, y: _number(lanes, x) <= _number(lanes, y),
    "gt": lambda lanes, x, y: _number(lanes, x) > _number(lanes, y),
    "ge": lambda lanes, x, y: _number(lanes, x) >= _number(lanes, y),
    "and": lambda _, x, y: x & y,
    "or": lambda _, x, y: x | y,
    "xor": lambda lanes, x, y: Value(lanes.e, lanes.e.builder.xor(x.raw, y.raw)),
    "not": lambda lanes, x: Value(lanes.e, lanes.e.builder.not_(x.raw)),
    "is_finite": lambda _, x: (x - x).equals(0.0),
    "select_n": lambda lanes, which, no, yes: lanes.e.select(which, yes, no),
    "convert_element_type": _converted,
    "dynamic_slice": _looked_up,
    **dict.fromkeys(("broadcast_in_dim", "copy", "reshape", "squeeze", "stop_gradient"), lambda _, x: x),
}
