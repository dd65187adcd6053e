"""Values with operators, variables and loops over ``llvmlite.ir``: enough to write a SIMD kernel in Python.

A :class:`Value` is one LLVM value; ``x * y + 1`` emits instructions at the end of the function that :class:`Function`
builds. A Python number becomes a constant of the other operand's type. Pointers are opaque and offsets are bytes unless
an element size is given. Control flow is a ``with`` block: ``with e.loop(0, n) as i``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

f32, f16 = ir.FloatType(), ir.HalfType()
i1, i8, i16, i32, i64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
ptr, void = ir.PointerType(), ir.VoidType()

CACHE_LINE = 64


class BFloat(ir.Type):
    """LLVM's ``bfloat``, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


class _Written(ir.Constant):
    """A vector constant in LLVM's short notation; llvmlite writes every lane, a quarter of the module's text."""

    def __init__(self, type_: Any, text: str) -> None:
        self.type, self.constant = type_, text

    def _get_reference(self) -> str:
        return self.constant


def vector(element: Any, lanes: int | None) -> Any:
    """The type of ``lanes`` elements; None: of one, which is no vector."""
    return element if lanes is None else ir.VectorType(element, lanes)


def aligned(size: Any) -> Any:
    """``size`` bytes (an int or a Value) rounded up to whole cache lines."""
    return (size + (CACHE_LINE - 1)) // CACHE_LINE * CACHE_LINE


def offsets(**sizes: int) -> tuple[dict[str, int], int]:
    """The offsets of buffers of these sizes that follow each other in whole cache lines, and where the last one ends.

    >>> offsets(keys=4, values=100)
    ({'keys': 0, 'values': 64}, 192)
    """
    ends = list(itertools.accumulate(map(aligned, sizes.values()), initial=0))
    return dict(zip(sizes, ends, strict=False)), ends[-1]


def _binary(floating: str, integer: str) -> Callable[[Value, Any], Value]:
    """An operator of :class:`Value`, by the names of the builder's functions."""

    def apply(self: Value, other: Any) -> Value:
        operation = getattr(self.e.builder, floating if self.is_float else integer)
        return Value(self.e, operation(self.raw, self._operand(other)))

    return apply


def _comparison(operator: str) -> Callable[[Value, Any], Value]:
    return lambda self, other: self.compare(operator, other)


class Value:
    """An LLVM value in a function under construction."""

    __slots__ = ("e", "raw", "type")

    def __init__(self, e: Function, raw: Any) -> None:
        self.e, self.raw, self.type = e, raw, raw.type

    @property
    def is_float(self) -> bool:
        """Whether it holds floating-point numbers."""
        return isinstance(getattr(self.type, "element", self.type), (ir.FloatType, ir.HalfType))

    def _operand(self, other: Any) -> Any:
        return other.raw if isinstance(other, Value) else self.e.const(self.type, other).raw

    def compare(self, operator: str, other: Any) -> Value:
        """Element by element, signed or ordered (a NaN compares false)."""
        b = self.e.builder
        return Value(
            self.e, (b.fcmp_ordered if self.is_float else b.icmp_signed)(operator, self.raw, self._operand(other))
        )

    __add__ = __radd__ = _binary("fadd", "add")
    __sub__ = _binary("fsub", "sub")
    __mul__ = __rmul__ = _binary("fmul", "mul")
    __truediv__ = __floordiv__ = _binary("fdiv", "sdiv")
    __mod__ = _binary("frem", "srem")
    __lshift__ = _binary("shl", "shl")
    __rshift__ = _binary("lshr", "lshr")
    __or__ = _binary("or_", "or_")
    __and__ = _binary("and_", "and_")
    __lt__, __gt__, __le__, __ge__ = (_comparison(operator) for operator in ("<", ">", "<=", ">="))

    def equals(self, other: Any) -> Value:
        """Element by element."""
        return self.compare("==", other)

    def is_nan(self) -> Value:
        """Element by element."""
        return Value(self.e, self.e.builder.fcmp_unordered("uno", self.raw, self.raw))

    def is_null(self) -> Value:
        """Of a pointer."""
        return Value(self.e, self.e.builder.icmp_unsigned("==", self.raw, ir.Constant(ptr, None)))

    def bits_as(self, type_: Any) -> Value:
        """The same bits as another type."""
        return Value(self.e, self.e.builder.bitcast(self.raw, type_))

    def integer(self, type_: Any) -> Value:
        """An integer widened with its sign, or cut."""
        if self.type == type_:
            return self
        width = getattr(type_, "element", type_).width
        b = self.e.builder
        wider = width > getattr(self.type, "element", self.type).width
        return Value(self.e, (b.sext if wider else b.trunc)(self.raw, type_))

    def at(self, offset: Any, size: int = 1) -> Value:
        """Of a pointer: the address ``offset`` elements of ``size`` bytes further."""
        offset = offset * size if isinstance(offset, Value) else self.e.const(i64, offset * size)
        return Value(self.e, self.e.builder.gep(self.raw, [offset.raw], source_etype=i8))

    def load(self, type_: Any, align: int = 4) -> Value:
        """Of a pointer: what lies there."""
        return Value(self.e, self.e.builder.load(self.raw, typ=type_, align=align))

    def store(self, value: Value, align: int = 4) -> None:
        """Into a pointer."""
        self.e.builder.store(value.raw, self.raw, align=align)

    def add(self, value: Value) -> None:
        """To what a pointer points at."""
        self.store(self.load(value.type) + value)


class Variable:
    """A value that changes; it ends up in a register."""

    __slots__ = ("place", "type")

    def __init__(self, place: Value, type_: Any) -> None:
        self.place, self.type = place, type_

    def __call__(self) -> Value:
        """Read."""
        return self.place.load(self.type)

    def set(self, value: Value) -> None:
        """Assign."""
        self.place.store(value)


class Function:
    """One function of a module: ``with Function(...) as (e, arguments)``; one without a result returns at the end."""

    def __init__(
        self, module: ir.Module, name: str, arguments: Sequence[Any], returns: Any = void, *, public: bool = False
    ) -> None:
        self.module = module
        self.function = ir.Function(module, ir.FunctionType(returns, list(arguments)), name)
        if not public:
            self.function.linkage = "internal"
            self.function.attributes.add("noinline")  # called from several places; inlining costs compile time
        self._entry = self.function.append_basic_block("entry")
        self.builder = ir.IRBuilder(self.function.append_basic_block("body"))
        self.arguments = [Value(self, a) for a in self.function.args]

    def __enter__(self) -> tuple[Function, list[Value]]:
        return self, self.arguments

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            end: Any = self.builder.block
            if not end.is_terminated:
                self.builder.ret_void()
            ir.IRBuilder(self._entry).branch(self.function.blocks[1])

    # values

    def const(self, type_: Any, number: Any) -> Value:
        """A number, in every lane of a vector type."""
        if not isinstance(type_, ir.VectorType):
            return Value(self, ir.Constant(type_, number))
        one = ir.Constant(type_.element, number)  # pyright: ignore[reportAttributeAccessIssue]
        return Value(self, _Written(type_, f"splat ({one})"))

    def null(self) -> Value:
        """The null pointer."""
        return Value(self, ir.Constant(ptr, None))

    def variable(self, initial: Value) -> Variable:
        """A variable that starts as ``initial``."""
        variable = Variable(self.stack(initial.type), initial.type)
        variable.set(initial)
        return variable

    def stack(self, type_: Any) -> Value:
        """Room for one ``type_`` until the function returns."""
        place = ir.IRBuilder(self._entry).alloca(type_)
        place.align, place.type = CACHE_LINE, ptr  # pyright: ignore[reportAttributeAccessIssue]  (None until set)
        return Value(self, place)

    def select(self, condition: Value, yes: Value, no: Any) -> Value:
        """``yes`` where the condition holds."""
        no = no if isinstance(no, Value) else self.const(yes.type, no)
        return Value(self, self.builder.select(condition.raw, yes.raw, no.raw))

    def max(self, x: Value, y: Any) -> Value:
        """The larger one; ``y`` where ``x`` is a NaN."""
        y = y if isinstance(y, Value) else self.const(x.type, y)
        return self.select(x > y, x, y)

    def min(self, x: Value, y: Any) -> Value:
        """The smaller one; ``y`` where ``x`` is a NaN."""
        y = y if isinstance(y, Value) else self.const(x.type, y)
        return self.select(x < y, x, y)

    def fma(self, x: Value, y: Value, z: Value) -> Value:
        """The product of ``x`` and ``y`` plus ``z``, rounded once."""
        lanes = f"v{x.type.count}" if isinstance(x.type, ir.VectorType) else ""
        return self.call(f"llvm.fma.{lanes}f32", x.type, x, y, z)

    def splat(self, scalar: Value, lanes: int) -> Value:
        """The scalar in every lane."""
        nothing = _Written(vector(scalar.type, lanes), "poison")
        one = self.builder.insert_element(nothing, scalar.raw, ir.Constant(i32, 0))
        return Value(self, self.builder.shuffle_vector(one, nothing, ir.Constant(vector(i32, lanes), [0] * lanes)))

    def shuffle(self, x: Value, y: Value, lanes: Sequence[int]) -> Value:
        """Lanes of ``x`` and, counted on, of ``y``."""
        mask = ir.Constant(vector(i32, len(lanes)), list(lanes))
        return Value(self, self.builder.shuffle_vector(x.raw, y.raw, mask))

    def any(self, condition: Value) -> Value:
        """Whether it holds in any lane."""
        bits = ir.IntType(condition.type.count)
        return Value(
            self, self.builder.icmp_unsigned("!=", self.builder.bitcast(condition.raw, bits), ir.Constant(bits, 0))
        )

    def reduce(self, operation: str, x: Value) -> Value:
        """All lanes of an integer vector as one, by ``smin`` or ``smax``."""
        bits = x.type.element.width
        return self.call(f"llvm.vector.reduce.{operation}.v{x.type.count}i{bits}", x.type.element, x)

    def add_up(self, x: Value) -> Value:
        """The sum of the lanes of a float vector, by halves, so that the order is fixed."""
        return self._by_halves(x, lambda low, high: low + high)

    def highest(self, x: Value) -> Value:
        """The highest lane of a float vector without a NaN, by halves; LLVM's own reduction goes lane by lane."""
        return self._by_halves(x, self.max)

    def _by_halves(self, x: Value, joined: Callable[[Value, Value], Value]) -> Value:
        while x.type.count > 1:
            half = x.type.count // 2
            x = joined(self.shuffle(x, x, range(half)), self.shuffle(x, x, range(half, 2 * half)))
        return Value(self, self.builder.extract_element(x.raw, ir.Constant(i32, 0)))

    # control

    @contextmanager
    def loop(self, start: Any, stop: Any, step: Any = 1) -> Iterator[Value]:
        """Counts an int64 from ``start`` until it is no longer below ``stop``."""
        first, last = (x if isinstance(x, Value) else self.const(i64, x) for x in (start, stop))
        i = self.variable(first)
        with self.while_(lambda: i() < last):
            yield i()
            i.set(i() + step)

    @contextmanager
    def while_(self, condition: Callable[[], Value]) -> Iterator[None]:
        """Repeats the block while the condition holds, which is evaluated anew each time."""
        head, body, done = (self.function.append_basic_block(x) for x in ("head", "body", "done"))
        self.builder.branch(head)
        self.builder.position_at_end(head)
        self.builder.cbranch(condition().raw, body, done)
        self.builder.position_at_end(body)
        yield
        self.builder.branch(head)
        self.builder.position_at_end(done)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """The block runs where the condition holds."""
        with self.builder.if_then(condition.raw):
            yield

    def either(self, condition: Value, yes: Callable[[], Any], no: Callable[[], Any]) -> None:
        """One of the two."""
        with self.builder.if_else(condition.raw) as (then, otherwise):
            with then:
                yes()
            with otherwise:
                no()

    @contextmanager
    def leave_when(self, condition: Value) -> Iterator[None]:
        """The block, which must end in a return, runs where the condition holds; the function goes on otherwise."""
        leave, go_on = (self.function.append_basic_block(x) for x in ("leave", "on"))
        self.builder.cbranch(condition.raw, leave, go_on)
        self.builder.position_at_end(leave)
        yield
        self.builder.position_at_end(go_on)

    def ret(self, value: Value) -> None:
        """Return a result."""
        self.builder.ret(value.raw)

    # calls

    def call(self, name: str, returns: Any, *arguments: Value) -> Value:
        """A function of LLVM or of the C library, declared on first use."""
        function = self.module.globals.get(name)
        if function is None:
            function = ir.Function(self.module, ir.FunctionType(returns, [a.type for a in arguments]), name)
        return Value(self, self.builder.call(function, [a.raw for a in arguments]))

    def run(self, function: ir.Function, *arguments: Any) -> Value:
        """A function of this module; an int is passed as int64."""
        raw = [(a if isinstance(a, Value) else self.const(i64, a)).raw for a in arguments]
        return Value(self, self.builder.call(function, raw))

    def prefetch(self, place: Value, size: int) -> None:
        """Ask for the cache lines from ``place`` on, ``size`` bytes, in the first cache; any address will do."""
        for start in range(0, size, CACHE_LINE):
            read, first_level, data = (self.const(i32, n) for n in (0, 3, 1))
            self.call("llvm.prefetch.p0", void, place.at(start), read, first_level, data)

    def call_address(self, address: Value, returns: Any, *arguments: Value) -> Value:
        """A function by its address."""
        callee = _Callee(address.raw, ir.FunctionType(returns, [a.type for a in arguments]))
        return Value(self, self.builder.call(callee, [a.raw for a in arguments]))

    # memory that several threads see

    def atomic_add(self, place: Value, amount: int) -> Value:
        """Adds to an int64; returns what was there before."""
        return Value(self, self.builder.atomic_rmw("add", place.raw, ir.Constant(i64, amount), "seq_cst"))

    def atomic_load(self, place: Value) -> Value:
        """Reads an int64."""
        return Value(self, self.builder.load_atomic(place.raw, "seq_cst", 8, typ=i64))


class _Callee:
    """An address that IRBuilder.call takes for a function."""

    def __init__(self, raw: Any, function_type: Any) -> None:
        self._raw, self.function_type, self.type = raw, function_type, raw.type

    def get_reference(self) -> str:
        return self._raw.get_reference()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


def text(module: ir.Module, content: str) -> ir.GlobalVariable:
    """A C string in the module."""
    return constant(module, "text", content.encode() + b"\0")


def constant(module: ir.Module, name: str, data: bytes) -> ir.GlobalVariable:
    """Bytes in the module."""
    type_ = ir.ArrayType(i8, len(data))
    place = ir.GlobalVariable(module, type_, module.get_unique_name(name))
    place.global_constant, place.linkage = True, "internal"
    place.initializer = ir.Constant(type_, bytearray(data))  # pyright: ignore[reportAttributeAccessIssue]  (None until set)
    return place


def variable(module: ir.Module, name: str) -> ir.GlobalVariable:
    """An int64 of the module, at first 0."""
    place = ir.GlobalVariable(module, i64, module.get_unique_name(name))
    place.linkage = "internal"
    place.initializer = ir.Constant(i64, 0)  # pyright: ignore[reportAttributeAccessIssue]  (None until set)
    return place
