"""The call from XLA: a typed FFI handler that checks its operands and divides the work among XLA's own threads.

A phase is a number of items and a function that computes one. Threads claim items from one counter, and a phase begins
when all items of earlier phases are done. The calling thread works too and waits only for items that another thread has
claimed, so a busy pool delays nothing. XLA allocates (and counts) the scratch memory as a result. The handler allocates
only the block of counters, since a thread that XLA starts late may read it after the call has returned.

Offsets are those of ``xla/ffi/api/c_api.h``, major version 0: equal in jaxlib 0.10.1 and 0.12.0.1. ``targets.py``
refuses another major version before any kernel is compiled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llvmlite import ir

from . import affinity, tiles
from .elements import XLA_TYPE
from .emit import CACHE_LINE, Function, Value, aligned, i32, i64, ptr, text, void

API_MAJOR = 0

# XLA_FFI_CallFrame
_FRAME_EXTENSION, _FRAME_API, _FRAME_CONTEXT = 8, 16, 24
_ARG_COUNT, _ARGS, _RESULT_COUNT, _RESULTS = 56, 72, 96, 112
# XLA_FFI_Api
_API_SIZE, _API_MAJOR, _API_VERSION = 0, 32, 32
_ERROR_CREATE, _ERROR_DESTROY, _SCHEDULE, _NUM_THREADS, _API_KNOWN_SIZE = 48, 64, 136, 144, 152
# XLA_FFI_Buffer
_DTYPE, _DATA, _RANK, _DIMS = 16, 24, 32, 40
_INVALID_ARGUMENT, _RESOURCE_EXHAUSTED, _UNIMPLEMENTED = 3, 8, 12

_COUNTERS = ("next", "done", "references", "seats")
_SPINS = 256  # waits this many pauses before it gives the core away

Dims = Mapping[str, Any]  # sizes by name: int when planned, Value in the handler


@dataclasses.dataclass(frozen=True, slots=True)
class Operand:
    """An array of the call. ``dims`` are names or numbers; the first stands for all leading axes (``vmap`` adds some).

    A name means the same size wherever it occurs.
    """

    name: str
    dtype: str
    dims: tuple[str | int, ...]


SCRATCH = Operand("scratch", "uint8", ("bytes",))


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """``count(dims)`` items, each computed by ``item(state, workspace, index)``.

    With ``stages`` there are that many times ``count`` items, and those of a stage begin when all before it are done.
    """

    count: Callable[[Dims], Any]
    item: ir.Function
    stages: Callable[[Dims], Any] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Signature:
    """How XLA calls a kernel: operands and results in their order. :data:`SCRATCH` is one more result.

    ``shared_bytes(dims)`` and ``worker_bytes(dims)`` are the parts of the scratch memory: one for all threads, one per
    thread. ``requires(dims)`` are further conditions, each with its error sentence.
    """

    operands: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    shared_bytes: Callable[[Dims], Any]
    worker_bytes: Callable[[Dims], Any]
    requires: Callable[[Dims], Sequence[tuple[Any, str]]]
    phases: int = 2

    @property
    def results(self) -> tuple[Operand, ...]:
        """With the scratch memory."""
        return (*self.outputs, SCRATCH)

    def scratch_bytes(self, dims: Dims, workers: int) -> Any:
        """Bytes of scratch memory for ``workers`` threads."""
        return aligned(self.shared_bytes(dims)) + aligned(self.worker_bytes(dims)) * workers + CACHE_LINE


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """The byte offsets of a call's counters, sizes and pointers, by name."""

    offsets: Mapping[str, int]

    @staticmethod
    def of(signature: Signature) -> State:
        """For its operands; where phases end as ``end0``, ``end1``, ..., and items per stage as ``stage0``, ..."""
        of_phases = (f"{name}{p}" for p in range(signature.phases) for name in ("end", "stage"))
        names = [*_COUNTERS, *of_phases, "processor", "began", "worker_bytes", "shared", "private"]
        for operand in (*signature.operands, *signature.results):
            names += [f"data:{operand.name}", *(d for d in operand.dims if isinstance(d, str))]
        # The counters that all threads write lie on lines of their own.
        head = {name: n * CACHE_LINE for n, name in enumerate(_COUNTERS)}
        rest = {name: n for n, name in enumerate(dict.fromkeys(names[len(_COUNTERS) :]))}
        return State({**head, **{name: len(_COUNTERS) * CACHE_LINE + 8 * n for name, n in rest.items()}})

    @property
    def size(self) -> int:
        """Bytes."""
        return aligned(max(self.offsets.values()) + 8)

    def place(self, state: Value, name: str) -> Value:
        """The address of a slot."""
        return state.at(self.offsets[name])

    def number(self, state: Value, name: str) -> Value:
        """An int64."""
        return self.place(state, name).load(i64)

    def pointer(self, state: Value, name: str) -> Value:
        """The address in a slot: ``data:query``, or ``shared``."""
        return self.place(state, name).load(ptr)

    def dims(self, state: Value) -> Dims:
        """All sizes of the call."""
        return _Lazy(self, state)


class _Lazy(dict[str, Value]):
    """Sizes that are loaded each time they are used."""

    def __init__(self, state: State, address: Value) -> None:
        self._state, self._address = state, address

    def __missing__(self, name: str) -> Value:
        return self._state.number(self._address, name)


def emit(module: ir.Module, signature: Signature, state: State, phases: Sequence[Phase]) -> None:
    """Adds the public function ``handler`` to the module, which holds the items' functions."""
    worker = _emit_worker(module, state, phases)
    emit_helper(module, state, worker, f"end{len(phases) - 1}")
    _Handler(module, signature, state, phases).emit()


def _emit_worker(module: ir.Module, state: State, phases: Sequence[Phase]) -> ir.Function:
    wait = _emit_wait(module)
    release = _emit_release(module, state)
    with Function(module, "worker", [ptr]) as (e, (s,)):
        with tiles.configured(e):
            seat = e.atomic_add(state.place(s, "seats"), 1)
            workspace = state.pointer(s, "private").at(seat * state.number(s, "worker_bytes"))
            total = state.number(s, f"end{len(phases) - 1}")
            claimed = e.variable(e.atomic_add(state.place(s, "next"), 1))
            with e.while_(lambda: claimed() < total):
                for p, phase in enumerate(phases):
                    start = state.number(s, f"end{p - 1}") if p else e.const(i64, 0)
                    with e.when((claimed() >= start) & (claimed() < state.number(s, f"end{p}"))):
                        index, before = claimed() - start, start
                        if phase.stages is not None:
                            count = state.number(s, f"stage{p}")
                            before = start + index // count * count
                        if p or phase.stages is not None:
                            e.run(wait, state.place(s, "done"), before)
                        e.run(phase.item, s, workspace, index)
                e.atomic_add(state.place(s, "done"), 1)
                claimed.set(e.atomic_add(state.place(s, "next"), 1))
        e.run(release, s)
    return e.function


def emit_helper(module: ir.Module, state: State, worker: ir.Function, end: str) -> ir.Function:
    """``helper(state)``: a worker on another processor than the calling thread's, if one is to be had."""
    leave = affinity.emit_leave(module)
    with Function(module, "helper", [ptr]) as (e, (s,)):
        processor = affinity.current(e)
        more = e.atomic_load(state.place(s, "next")) < state.number(s, end)
        with e.when(more & processor.equals(e.atomic_load(state.place(s, "processor")))):
            e.run(leave, processor)
        e.run(worker, s)
    return e.function


def _emit_wait(module: ir.Module) -> ir.Function:
    """``wait(place, number)``: until the counter at ``place`` has reached ``number``."""
    pause = {"x86": "llvm.x86.sse2.pause", "aar": "llvm.aarch64.hint", "arm": "llvm.aarch64.hint"}[module.triple[:3]]
    with Function(module, "wait", [ptr, i64]) as (e, (place, number)):
        spins = e.variable(e.const(i64, 0))
        with e.while_(lambda: e.atomic_load(place) < number):
            e.call(pause, void, *([] if "x86" in pause else [e.const(i32, 1)]))
            spins.set(spins() + 1)
            with e.when((spins() % _SPINS).equals(0)):
                e.call("sched_yield", i32)
    return e.function


def _emit_release(module: ir.Module, state: State) -> ir.Function:
    """``release(state)``: the last holder frees it."""
    with Function(module, "release", [ptr]) as (e, (s,)):
        last = e.atomic_add(state.place(s, "references"), -1).equals(1)
        with e.when(last):
            e.call("free", void, s)
    return e.function


class _Handler:
    """Emits ``handler(frame) -> error or null``."""

    def __init__(self, module: ir.Module, signature: Signature, state: State, phases: Sequence[Phase]) -> None:
        self.module, self.signature, self.state, self.phases = module, signature, state, phases
        self.fail, self.neighbours = self._emit_fail(), affinity.Neighbours.of(module)
        self.worker, self.helper, self.wait, self.release = (
            module.globals[name] for name in ("worker", "helper", "wait", "release")
        )

    def emit(self) -> None:
        with Function(self.module, "handler", [ptr], ptr, public=True) as (e, (frame,)):
            for name in ("optnone", "noinline"):  # it runs once per call, and is a sixth of what LLVM would optimise
                e.function.attributes.add(name)
            api, extension = frame.at(_FRAME_API).load(ptr), frame.at(_FRAME_EXTENSION).load(ptr)
            self._answer_version(e, api, extension)
            known = api.at(_API_MAJOR).load(i32).equals(API_MAJOR) & (api.at(_API_SIZE).load(i64) >= _API_KNOWN_SIZE)
            with e.leave_when(known.equals(0)):
                e.ret(e.null())  # unreachable after the check in targets.py; an unknown version offers no error call
            buffers = self._buffers(e, frame, api)
            dims = self._sizes(e, api, buffers)
            s = self._new_state(e, api, buffers, dims)
            self._schedule(e, frame, api, s, dims)
            e.run(self.worker, s)
            e.run(self.wait, self.state.place(s, "done"), self.state.number(s, f"end{len(self.phases) - 1}"))
            self.neighbours.remember(e, self.state.number(s, "began"))
            e.run(self.release, s)
            e.ret(e.null())

    def _emit_fail(self) -> ir.Function:
        """``fail(api, message, code) -> error``."""
        with Function(self.module, "fail", [ptr, ptr, i64], ptr) as (e, (api, message, code)):
            e.ret(e.call_address(api.at(_ERROR_CREATE).load(ptr), ptr, _struct(e, 28, message, code)))
        return e.function

    def _require(self, e: Function, api: Value, condition: Value, sentence: str, code: int = _INVALID_ARGUMENT) -> None:
        with e.leave_when(condition.equals(0)):
            message = Value(e, text(self.module, f"flash_cpu: {sentence}"))
            e.ret(e.run(self.fail, api, message, code))

    def _answer_version(self, e: Function, api: Value, extension: Value) -> None:
        """Answer XLA's question for the API version: this major version, and XLA's own minor one."""
        version = api.at(_API_VERSION).load(i64)
        requested = e.variable(e.const(i64, 0))
        with e.when(extension.is_null().equals(0)):
            requested.set(extension.at(8).load(i32).integer(i64))
        with e.leave_when(requested().equals(1)):
            metadata = extension.at(24).load(ptr)
            minor = version >> 32
            metadata.at(24).store((minor << 32) + API_MAJOR, 8)
            metadata.at(32).store(e.const(i32, 0))
            e.ret(e.null())

    def _buffers(self, e: Function, frame: Value, api: Value) -> dict[str, Value]:
        """The operands' buffers by name, their number, rank and dtype checked."""
        found: dict[str, Value] = {}
        for operands, count, table in (
            (self.signature.operands, _ARG_COUNT, _ARGS),
            (self.signature.results, _RESULT_COUNT, _RESULTS),
        ):
            number = frame.at(count).load(i64)
            self._require(e, api, number.equals(len(operands)), "the number of operands is not the planned one.")
            for n, operand in enumerate(operands):
                buffer = frame.at(table).load(ptr).at(8 * n).load(ptr)
                code = XLA_TYPE[operand.dtype]
                right = buffer.at(_DTYPE).load(i32).equals(code)
                self._require(e, api, right, f"{operand.name} is not {operand.dtype}, for which this was compiled.")
                deep = buffer.at(_RANK).load(i64) >= len(operand.dims)
                self._require(e, api, deep, f"{operand.name} has fewer than {len(operand.dims)} dimensions.")
                found[operand.name] = buffer
        return found

    def _sizes(self, e: Function, api: Value, buffers: Mapping[str, Value]) -> dict[str, Value]:
        """The sizes by name, where all operands agree on them."""
        dims: dict[str, Value] = {}
        for operand in (*self.signature.operands, *self.signature.results):
            buffer = buffers[operand.name]
            rank, sizes = buffer.at(_RANK).load(i64), buffer.at(_DIMS).load(ptr)
            leading = rank - (len(operand.dims) - 1)
            product = e.variable(e.const(i64, 1))
            with e.loop(0, leading) as i:
                product.set(product() * sizes.at(i, 8).load(i64))
            for n, dim in enumerate(operand.dims):
                size = sizes.at(leading + (n - 1), 8).load(i64) if n else product()
                if isinstance(dim, str) and dim not in dims:
                    dims[dim] = size
                    continue
                expected = e.const(i64, dim) if isinstance(dim, int) else dims[dim]
                shape = " x ".join(map(str, operand.dims))
                self._require(
                    e, api, size.equals(expected), f"{operand.name} is not {shape}, as the other operands say."
                )
        for condition, sentence in self.signature.requires(dims):
            self._require(e, api, condition, sentence)
        return dims

    def _new_state(self, e: Function, api: Value, buffers: Mapping[str, Value], dims: Dims) -> Value:
        state = self.state
        s = e.call("aligned_alloc", ptr, e.const(i64, CACHE_LINE), e.const(i64, state.size))
        self._require(e, api, s.is_null().equals(0), "no memory for the call's counters.", _RESOURCE_EXHAUSTED)
        for name, size in dims.items():
            state.place(s, name).store(size, 8)
        for name, buffer in buffers.items():
            state.place(s, f"data:{name}").store(buffer.at(_DATA).load(ptr), 8)
        end: Value = e.const(i64, 0)
        for p, phase in enumerate(self.phases):
            count = phase.count(dims)
            state.place(s, f"stage{p}").store(count, 8)
            end = end + (count if phase.stages is None else count * phase.stages(dims))
            state.place(s, f"end{p}").store(end, 8)
        for name in ("next", "done", "seats"):
            state.place(s, name).store(e.const(i64, 0), 8)
        return s

    def _schedule(self, e: Function, frame: Value, api: Value, s: Value, dims: Dims) -> None:
        """Places the scratch memory and asks XLA for as many threads as it has room and work for."""
        state, context = self.state, frame.at(_FRAME_CONTEXT).load(ptr)
        shared, private = aligned(self.signature.shared_bytes(dims)), aligned(self.signature.worker_bytes(dims))
        shared, private = (x if isinstance(x, Value) else e.const(i64, x) for x in (shared, private))
        address = Value(e, e.builder.ptrtoint(state.pointer(s, f"data:{SCRATCH.name}").raw, i64))
        start = (address + (CACHE_LINE - 1)) // CACHE_LINE * CACHE_LINE
        base = Value(e, e.builder.inttoptr(start.raw, ptr))
        room = (dims["bytes"] - (start - address) - shared) / private
        enough = room >= 1
        with e.leave_when(enough.equals(0)):
            e.call("free", void, s)
            message = Value(e, text(self.module, "flash_cpu: the scratch memory is smaller than the shapes need."))
            e.ret(e.run(self.fail, api, message, _RESOURCE_EXHAUSTED))
        state.place(s, "shared").store(base, 8)
        state.place(s, "private").store(base.at(shared), 8)
        state.place(s, "worker_bytes").store(private, 8)
        threads = e.stack(i64)
        threads.store(e.const(i64, 1), 8)
        self._call(e, api, _NUM_THREADS, context, threads)
        work = state.number(s, f"end{len(self.phases) - 1}")
        extra = e.max(e.min(e.min(threads.load(i64, 8), work), room) - 1, 0)
        state.place(s, "references").store(extra + 2, 8)
        state.place(s, "processor").store(affinity.current(e), 8)
        state.place(s, "began").store(e.run(self.neighbours.now), 8)
        with e.loop(0, extra), e.when(self._call(e, api, _SCHEDULE, context, Value(e, self.helper), s).equals(0)):
            e.atomic_add(state.place(s, "references"), -1)  # that thread never comes
        with e.when(extra > 0):
            e.run(self.neighbours.give_way, state.number(s, "began"))

    def _call(self, e: Function, api: Value, function: int, context: Value, *fields: Value) -> Value:
        """``api->function({size, NULL, context, fields...})``; whether there was no error. Errors are destroyed."""
        arguments = _struct(e, 24 + 8 * len(fields), context, *fields)
        error = e.call_address(api.at(function).load(ptr), ptr, arguments)
        fine = error.is_null()
        with e.when(fine.equals(0)):
            e.call_address(api.at(_ERROR_DESTROY).load(ptr), void, _struct(e, 24, error))
        return fine


def _struct(e: Function, size: int, *fields: Value) -> Value:
    """The arguments of a function of XLA's: their size in bytes, no extension, and the fields."""
    place = e.stack(ir.ArrayType(i64, 2 + len(fields)))
    for n, x in enumerate((e.const(i64, size), e.null(), *fields)):
        place.at(8 * n).store(x, 8)
    return place
