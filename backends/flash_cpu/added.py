"""What is added to the scores of a tile, and the user's functions of positions and of scores.

A mask array, a bias array and ALiBi's slopes are read where the caller has them.

For a group of queries and a block of keys, :meth:`Added.emit_fetch` writes one number per pair in powers of two, one
lane per query as the scores: the bias times log2(e), less slope times distance, and ``-inf`` where the mask or a bias
of ``-inf`` hides the key. A block in which every pair is hidden is skipped. The backward pass leaves the slopes ``dS``
in the place of these numbers, and :meth:`Added.emit_gradient` adds them to the bias's gradient, row by row, and their
products with the distances to a number per row. The first row of a bias's row clears its part of the gradient block by
block, in the core's cache (:meth:`Added.emit_clear`). A mask function (``expression.py``) adds ``-inf`` as a mask does.
A score function is called where the scores become probabilities and slopes, by :meth:`Added.modified`.

Mask and bias are ``[batch, heads, queries, keys]``, any of which may be 1. Row ``r`` of a tile begins at an offset that
is computed once per tile; axes of size 1 leave it where it is. A mask that is the same for all heads and queries, or
for all heads and keys, is not read here: it is padding, and part of the ids (``visibility.py``).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from llvmlite import ir

from . import elements, expression, rows
from .emit import Function, Value, Variable, f32, i1, i8, i16, i32, i64, ptr, vector
from .expression import Expression
from .handler import Dims, Operand, State
from .isa import Isa
from .softmax import HIDDEN, LOG2_E

# A finite bias hides nothing: below this (far below any logit) it is raised to it. Times log2(e) none is infinite.
_LEAST, _MOST_BIAS = HIDDEN * 0.4, 2e38

_AXES = {"mask": ("MB", "MN", "MT", "MS"), "bias": ("BB", "BN", "BT", "BS")}


@dataclasses.dataclass(frozen=True, slots=True)
class Arrays:
    """What a kernel adds: a mask, a bias of a dtype (empty: none), ALiBi's slopes, a mask and a score function.

    ``learned`` are those of bias and ALiBi whose gradient a backward kernel computes.
    """

    mask: bool = False
    bias: str = ""
    alibi: bool = False
    visible: Expression | None = None
    score: Expression | None = None
    learned: tuple[str, ...] = ()

    @property
    def any(self) -> bool:
        """Whether there is one."""
        return self != Arrays()

    @property
    def names(self) -> tuple[str, ...]:
        """Those with a number per pair."""
        return ("mask",) * self.mask + ("bias",) * bool(self.bias)

    @property
    def operands(self) -> tuple[Operand, ...]:
        """What the kernel is given behind all others."""
        found = [Operand("mask", "bool", _AXES["mask"])] if self.mask else []
        found += [Operand("bias", self.bias, _AXES["bias"])] if self.bias else []
        found += [Operand("alibi", "float32", ("A", "N"))] if self.alibi else []
        found += [Operand("query_position", "int32", ("C", "T"))] if self.needs_positions else []
        if self.score is not None:
            found += [Operand("batch_index", "int32", ("B",)), Operand("head_index", "int32", ("E", "N"))]
        return tuple(found)

    @property
    def needs_positions(self) -> bool:
        """Whether something depends on the queries' positions."""
        return self.alibi or self.visible is not None or self.score is not None


def fits(arrays: Arrays, dims: Dims) -> list[tuple[Any, str]]:
    """Conditions on the shapes."""
    found = []
    for name in arrays.names:
        batch, *others = _AXES[name]
        found.append(((dims["B"] % dims[batch]).equals(0), f"the batch of the {name} does not divide the batch."))
        for axis, size in zip(others, ("N", "T", "S"), strict=True):
            right = dims[axis].equals(1) | dims[axis].equals(dims[size])
            found.append((right, f"an axis of the {name} is neither 1 nor as long as that of the scores."))
    if arrays.alibi:
        found.append(((dims["B"] % dims["A"]).equals(0), "the rows of slopes do not divide the batch."))
    if arrays.score is not None:
        found.append(((dims["B"] % dims["E"]).equals(0), "the rows of head indices do not divide the batch."))
    return found


def sharing(dims: Dims) -> tuple[Any, Any, Any]:
    """Of a bias: rows of its batch, sets of KV heads that it tells apart, and KV heads of a set (all, or one)."""
    kinds = (dims["BN"] * dims["K"] + dims["N"] - 1) // dims["N"]
    return dims["BB"], kinds, dims["K"] // kinds


@dataclasses.dataclass(frozen=True, slots=True)
class Added:
    """For tiles of ``queries`` rows, which is also the stride from one key's numbers to the next's."""

    isa: Isa
    arrays: Arrays
    state: State
    queries: int

    @property
    def _at(self) -> dict[str, int]:
        """Byte offsets of what is kept of a tile's rows."""
        n = self.queries
        four = {name: (16 + 4 * i) * n for i, name in enumerate(("slope", "position", "distance", "batch", "head"))}
        return {"mask": 0, "bias": 8 * n, **four, "first": 36 * n}

    @staticmethod
    def row_bytes(queries: int) -> int:
        """Of a tile."""
        return 40 * queries

    def distances(self, rows_: Value) -> Value:
        """Of a tile: per row the sum of ``dS`` times distance."""
        return rows_.at(self._at["distance"])

    def emit_rows(self, module: ir.Module) -> ir.Function:
        """``added_rows(state, batch, kv_head, start, count, to)``: where the rows of a tile lie in the arrays.

        Rows behind the last are the last again.
        """
        with Function(module, "added_rows", [ptr] + [i64] * 4 + [ptr]) as (e, (s, batch, kv_head, start, count, to)):
            dims = self.state.dims(s)
            group = dims["N"] // dims["K"]
            with e.loop(0, self.queries) as i:
                r = e.min(start + i, start + count - 1)
                t, h = r // group, kv_head * group + r % group
                for name in self.arrays.names:
                    batches, heads, tokens, keys = (dims[axis] for axis in _AXES[name])
                    row = (batch // (dims["B"] // batches) * heads + h % heads) * tokens + t % tokens
                    to.at(self._at[name]).at(i, 8).store(row * keys, 8)
                if "bias" in self.arrays.learned:
                    first = (batch % (dims["B"] // dims["BB"])).equals(0) & (h < dims["BN"]) & (t < dims["BT"])
                    to.at(self._at["first"]).at(i, 4).store(e.select(first, e.const(i32, 1), 0))
                if self.arrays.alibi:
                    of_batch = batch // (dims["B"] // dims["A"]) * dims["N"]
                    slope = self.state.pointer(s, "data:alibi").at(of_batch + h, 4).load(f32)
                    to.at(self._at["slope"]).at(i, 4).store(slope * -LOG2_E)
                    self.distances(to).at(i, 4).store(e.const(f32, 0.0))
                if self.arrays.needs_positions:
                    place = batch // (dims["B"] // dims["C"]) * dims["T"] + t
                    position = self.state.pointer(s, "data:query_position").at(place, 4).load(i32)
                    to.at(self._at["position"]).at(i, 4).store(position)
                if self.arrays.score is not None:
                    of_batch = batch // (dims["B"] // dims["E"]) * dims["N"]
                    for name, array, place in (("batch", "batch_index", batch), ("head", "head_index", of_batch + h)):
                        number = self.state.pointer(s, f"data:{array}").at(place, 4).load(i32)
                        to.at(self._at[name]).at(i, 4).store(number)
        return e.function

    def emit_fetch(self, module: ir.Module) -> ir.Function:
        """``fetch(state, rows, g, positions, slot, start, stop, to) -> whether any pair is visible``.

        Of the group that begins at row ``g`` of a tile; ``rows`` is what :meth:`emit_rows` wrote. Keys ``start`` to
        ``stop`` of a block that begins at key ``slot`` of the operands, rounded out to whole vectors.
        """
        isa, queries, lanes, type_ = self.isa, self.queries, self.isa.lanes, vector(f32, self.isa.lanes)
        with Function(module, "fetch", [ptr, ptr, i64, ptr] + [i64] * 3 + [ptr], i1) as (e, arguments):
            s, rows_, g, positions, slot, start, stop, to = arguments
            dims = self.state.dims(s)
            square, rest = (e.stack(ir.ArrayType(f32, n)) for n in (lanes * lanes, lanes))
            rest.store(e.const(type_, 0.0))
            hidden = e.variable(e.const(vector(i1, lanes), 1))
            with e.loop(start // lanes * lanes, stop, lanes) as k, e.loop(0, isa.group, lanes) as q:
                columns = [e.const(type_, 0.0)] * lanes
                if self.arrays.names:
                    with e.loop(0, lanes) as i:
                        x = self._of_row(e, s, dims, rows_, g + q + i, slot + k, rest)
                        square.at(i * lanes, 4).store(x)
                    columns = rows.turned(e, [square.at(i * lanes, 4).load(type_) for i in range(lanes)])
                for j, x in enumerate(columns):
                    if self.arrays.alibi:
                        slope = rows_.at(self._at["slope"]).at(g + q, 4).load(type_)
                        x = e.fma(slope, self._distance(e, rows_, g + q, positions.at(k + j, 4)), x)  # noqa: PLW2901
                    to.at((k + j) * queries + q, 4).store(x)
                    if self.arrays.visible is None:
                        hidden.set(hidden() & (x <= HIDDEN / 2))
            if self.arrays.visible is not None:
                with e.loop(start, stop) as k, e.loop(0, isa.group, lanes) as q:
                    place, position = to.at(k * queries + q, 4), e.splat(positions.at(k, 4).load(i32), lanes)
                    query = rows_.at(self._at["position"]).at(g + q, 4).load(vector(i32, lanes))
                    (seen,) = expression.emit(e, isa, self.arrays.visible, query, position)
                    x = e.select(seen, place.load(type_), -math.inf)
                    place.store(x)
                    hidden.set(hidden() & (x <= HIDDEN / 2))
            e.ret(e.any(hidden().equals(0)))
        return e.function

    def of_keys(
        self, e: Function, s: Value, rows_: Value, row: Value, first: Value, positions: Value, rest: Value
    ) -> Value:
        """As :meth:`emit_fetch`, of one row and the vector of keys that begins at ``first``: one lane per key.

        ``rest`` is room for a vector, ``positions`` are the keys' own.
        """
        lanes, type_ = self.isa.lanes, vector(i32, self.isa.lanes)
        x = e.const(vector(f32, lanes), 0.0)
        if self.arrays.names:
            x = self._of_row(e, s, self.state.dims(s), rows_, row, first, rest)
        if self.arrays.needs_positions:
            query, keys = e.splat(self._number(rows_, "position", row, i32), lanes), positions.load(type_)
            if self.arrays.alibi:
                x = e.fma(e.splat(self._number(rows_, "slope", row, f32), lanes), _apart(e, query, keys), x)
            if self.arrays.visible is not None:
                (seen,) = expression.emit(e, self.isa, self.arrays.visible, query, keys)
                x = e.select(seen, x, -math.inf)
        return x

    def modified_keys(self, e: Function, score: Value, rows_: Value, row: Value, positions: Value) -> Value:
        """The first result of :meth:`modified`, of one row and a vector of keys; ``score`` is scaled and capped."""
        lanes = self.isa.lanes
        of_row = [e.splat(self._number(rows_, name, row, i32), lanes) for name in ("batch", "head", "position")]
        return self._called(e, score, *of_row, positions.load(vector(i32, lanes)))[0]

    def _number(self, rows_: Value, name: str, row: Value, type_: Any) -> Value:
        return rows_.at(self._at[name]).at(row, 4).load(type_)

    def _called(self, e: Function, *arguments: Value) -> tuple[Value, Value]:
        code = self.arrays.score
        assert code is not None  # noqa: S101 (asked by kernels with a score function)
        found, slope = expression.emit(e, self.isa, code, *arguments)
        return found * LOG2_E, slope

    def modified(
        self, e: Function, score: Value, power: Value | float, rows_: Value, v: int, position: Value
    ) -> tuple[Value, Value]:
        """The score function's result in powers of two, and its derivative, for vector ``v`` of a group of queries.

        ``score * power`` is the scaled and soft-capped score; ``rows_`` points at the group's first row.
        """
        lanes, type_ = self.isa.lanes, vector(i32, self.isa.lanes)
        indices = [rows_.at(self._at[name]).at(v * lanes, 4).load(type_) for name in ("batch", "head", "position")]
        return self._called(e, score * power, *indices, e.splat(position, lanes))

    def _of_row(self, e: Function, s: Value, dims: Dims, rows_: Value, row: Value, first: Value, rest: Value) -> Value:
        """Mask and bias of one row and a vector of keys."""
        lanes, type_ = self.isa.lanes, vector(f32, self.isa.lanes)
        x = e.const(type_, 0.0)
        if self.arrays.bias:
            size = elements.SIZE[self.arrays.bias]
            place = self._vector_at(e, s, dims, "bias", rows_, row, first, (size, i32 if size == 4 else i16), rest)
            x = elements.load(e, place(), self.arrays.bias, lanes)
            held = e.max(e.min(x, _MOST_BIAS), _LEAST / LOG2_E)
            x = e.select((x - x).equals(0.0), held * LOG2_E, x)  # infinity and NaN stay
        if self.arrays.mask:
            place = self._vector_at(e, s, dims, "mask", rows_, row, first, (1, i8), rest)
            x = e.select(place().load(vector(i8, lanes), 1).compare("!=", 0), x, -math.inf)
        return x

    def _vector_at(
        self,
        e: Function,
        s: Value,
        dims: Dims,
        name: str,
        rows_: Value,
        row: Value,
        first: Value,
        element: tuple[int, Any],
        rest: Value,
    ) -> Variable:
        """Where a vector of keys of a row lies: in the array, or copied to ``rest``, of which all can be read."""
        (size, type_), lanes = element, self.isa.lanes
        source = self._row(s, f"data:{name}", name, rows_, row, size)
        place = e.variable(source.at(first, size))
        with e.when(self._is_whole(dims, name, first).equals(0)):
            with e.loop(0, e.min(dims["S"] - first, lanes)) as j:
                index = (first + j) % dims[_AXES[name][3]]
                rest.at(j, size).store(source.at(index, size).load(type_, size), size)
            place.set(rest)
        return place

    def _row(self, s: Value, data: str, name: str, rows_: Value, row: Value, size: int) -> Value:
        return self.state.pointer(s, data).at(rows_.at(self._at[name]).at(row, 8).load(i64, 8), size)

    def _is_whole(self, dims: Dims, name: str, first: Value) -> Value:
        """Whether a vector of keys lies in the array: there are so many, and a number for each."""
        return (first + self.isa.lanes <= dims["S"]) & dims[_AXES[name][3]].equals(dims["S"])

    def _distance(self, e: Function, rows_: Value, row: Value, position: Value) -> Value:
        """Of a vector of queries from a key."""
        query = self._number(rows_, "position", row, vector(i32, self.isa.lanes))
        return _apart(e, query, e.splat(position.load(i32), self.isa.lanes))

    def emit_clear(self, module: ir.Module, keys: int) -> ir.Function:
        """``clear(state, rows, slot)``: zeros in the bias's gradient for ``keys`` keys from ``slot`` on.

        Of the rows that are the first, in the order of the items, to add there. The others find what these have left.
        """
        lanes = self.isa.lanes
        with (
            Function(module, "clear", [ptr, ptr, i64]) as (e, (s, rows_, slot)),
            e.loop(0, self.queries) as i,
            e.when(self._number(rows_, "first", i, i32).equals(1)),
        ):
            target = self._row(s, "data:d_bias", "bias", rows_, i, 4)
            stop = e.min(slot + keys, self.state.dims(s)["BS"])
            whole = e.max(stop - slot, 0) // lanes * lanes + slot
            with e.loop(slot, whole, lanes) as k:
                target.at(k, 4).store(e.const(vector(f32, lanes), 0.0))
            with e.loop(whole, stop) as k:
                target.at(k, 4).store(e.const(f32, 0.0))
        return e.function

    def emit_gradient(self, module: ir.Module) -> ir.Function:
        """``added_gradient(state, rows, g, positions, slot, start, stop, slopes)``: the arguments as of ``fetch``.

        ``slopes`` holds ``dS`` of keys ``start`` to ``stop``.
        """
        with Function(module, "added_gradient", [ptr, ptr, i64, ptr] + [i64] * 3 + [ptr]) as (e, arguments):
            s, rows_, g, positions, slot, start, stop, slopes = arguments
            if "alibi" in self.arrays.learned:
                self._add_distances(e, rows_, g, positions, (start, stop), slopes)
            if "bias" in self.arrays.learned:
                self._add_to_bias(e, s, rows_, g, slot, (start, stop), slopes)
        return e.function

    def _add_distances(
        self, e: Function, rows_: Value, g: Value, positions: Value, keys: tuple[Value, Value], slopes: Value
    ) -> None:
        type_ = vector(f32, self.isa.lanes)
        with e.loop(0, self.isa.group, self.isa.lanes) as q:
            total = e.variable(e.const(type_, 0.0))
            with e.loop(*keys) as k:
                apart = self._distance(e, rows_, g + q, positions.at(k, 4))
                total.set(e.fma(slopes.at(k * self.queries + q, 4).load(type_), apart, total()))
            self.distances(rows_).at(g + q, 4).add(total())

    def _add_to_bias(
        self, e: Function, s: Value, rows_: Value, g: Value, slot: Value, keys: tuple[Value, Value], slopes: Value
    ) -> None:
        lanes, type_, dims = self.isa.lanes, vector(f32, self.isa.lanes), self.state.dims(s)
        square, (start, stop) = e.stack(ir.ArrayType(f32, lanes * lanes)), keys
        with e.loop(start // lanes * lanes, stop, lanes) as k, e.loop(0, self.isa.group, lanes) as q:
            columns = []
            for j in range(lanes):
                x = slopes.at((k + j) * self.queries + q, 4).load(type_)
                columns.append(e.select((k + j >= start) & (k + j < stop), x, 0.0))
            for i, x in enumerate(rows.turned(e, columns)):
                square.at(i * lanes, 4).store(x)
            first = slot + k
            with e.loop(0, lanes) as i:
                target, source = self._row(s, "data:d_bias", "bias", rows_, g + q + i, 4), square.at(i * lanes, 4)

                def whole(target: Value = target, source: Value = source) -> None:
                    target.at(first, 4).add(source.load(type_))

                def one_by_one(target: Value = target, source: Value = source) -> None:
                    with e.loop(0, e.min(dims["S"] - first, lanes)) as j:
                        target.at((first + j) % dims["BS"], 4).add(source.at(j, 4).load(f32))

                e.either(self._is_whole(dims, "bias", first), whole, one_by_one)


def _apart(e: Function, x: Value, y: Value) -> Value:
    """Distances of vectors of positions, as float32."""
    apart = x - y
    apart = e.max(apart, e.const(x.type, 0) - apart)
    return Value(e, e.builder.sitofp(apart.raw, vector(f32, x.type.count)))
