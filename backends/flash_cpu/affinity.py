"""Threads of one call that Linux wakes on one processor, where each could have its own.

A thread that wakes another may get it behind itself on its own processor, while another idles; after a pause that is
the rule on small machines, and it lasts milliseconds. So the calling thread yields once when it has asked for helpers,
and a helper that finds itself on the caller's processor takes that out of its affinity mask, by which Linux moves the
thread at once, and restores the mask. A thread that is bound to one processor stays there. One that has moved may keep
the processors that its mask had then, and take none that a container is given later.

A yield may also give the processor to a busy neighbour. When one took long, no call of the kernel yields for so long
that at most a hundredth of the time is lost. Elsewhere than on Linux none of this is emitted.
"""

from __future__ import annotations

import dataclasses

from llvmlite import ir

from .emit import Function, Value, i32, i64, variable

CPUS = 1024  # of the C library's cpu_set_t
UNKNOWN = -1
SHORT = 300_000  # nanoseconds: after a shorter call no thread yields, since a call like it would gain nothing
LONG, TIMES = 200_000, 100  # a yield of more nanoseconds is the last one for so many times as long
_MONOTONIC = 1  # CLOCK_MONOTONIC


def on_linux(module: ir.Module) -> bool:
    """Whether the system has calls for this."""
    return "linux" in module.triple


def current(e: Function) -> Value:
    """The number of the processor that this thread runs on, or :data:`UNKNOWN`."""
    return e.call("sched_getcpu", i32).integer(i64) if on_linux(e.module) else e.const(i64, UNKNOWN)


@dataclasses.dataclass(frozen=True, slots=True)
class Neighbours:
    """Functions of a module, and how long its last call took: ``now() -> nanoseconds``, ``give_way(began)``.

    ``give_way`` lets the threads run that wait for this processor, unless the last call was short, or a busy neighbour
    had the processor not long ago.
    """

    now: ir.Function
    give_way: ir.Function
    last: ir.GlobalVariable

    @staticmethod
    def of(module: ir.Module) -> Neighbours:
        """Emits them."""
        last, quiet_until = variable(module, "last"), variable(module, "quiet_until")
        with Function(module, "now", [], i64) as (e, _):
            if on_linux(module):
                time = e.stack(ir.ArrayType(i64, 2))
                e.call("clock_gettime", i32, e.const(i32, _MONOTONIC), time)
                e.ret(time.load(i64, 8) * 1_000_000_000 + time.at(8).load(i64, 8))
            else:
                e.ret(e.const(i64, 0))
        now = e.function
        with Function(module, "give_way", [i64]) as (e, (began,)):
            quiet = Value(e, quiet_until)
            if on_linux(module):
                with e.when((e.atomic_load(Value(e, last)) > SHORT) & (began > e.atomic_load(quiet))):
                    e.call("sched_yield", i32)
                    took = e.run(now) - began
                    with e.when(took > LONG):
                        quiet.store(began + took * TIMES, 8)
        return Neighbours(now, e.function, last)

    def remember(self, e: Function, began: Value) -> None:
        """At the end of a call."""
        Value(e, self.last).store(e.run(self.now) - began, 8)


def emit_leave(module: ir.Module) -> ir.Function:
    """``leave(processor)``: this thread goes on elsewhere, if it may run elsewhere."""
    with Function(module, "leave", [i64]) as (e, (processor,)):
        if on_linux(module):
            mask, this, size = e.stack(ir.ArrayType(i64, CPUS // 64)), e.const(i32, 0), e.const(i64, CPUS // 8)
            word, bit = mask.at(processor // 64, 8), e.const(i64, 1) << (processor % 64)
            inside = (processor > UNKNOWN) & (processor < CPUS)
            with e.when(inside), e.when(e.call("sched_getaffinity", i32, this, size, mask).equals(0)):
                before = word.load(i64, 8)
                word.store(before & (e.const(i64, -1) - bit), 8)
                with e.when(e.call("sched_setaffinity", i32, this, size, mask).equals(0)):
                    word.store(before, 8)
                    e.call("sched_setaffinity", i32, this, size, mask)
    return e.function
