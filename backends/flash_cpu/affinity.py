"""Threads of one call that Linux wakes on one processor, where each could have its own.

A thread that wakes another may get it behind itself on its own processor, while another idles; after a pause that is
the rule on small machines, and it lasts milliseconds. So the calling thread yields once when it has asked for helpers.
A helper that finds itself on the caller's processor takes it out of its affinity mask, by which Linux moves the thread
at once, and then restores the mask. A thread that is bound to one processor stays there. Elsewhere than on Linux
nothing is emitted.
"""

from __future__ import annotations

from llvmlite import ir

from .emit import Function, Value, i32, i64

CPUS = 1024  # of the C library's cpu_set_t
UNKNOWN = -1


def known(module: ir.Module) -> bool:
    """Whether the system has calls for this."""
    return "linux" in module.triple


def current(e: Function) -> Value:
    """The number of the processor that this thread runs on, or :data:`UNKNOWN`."""
    return e.call("sched_getcpu", i32).integer(i64) if known(e.module) else e.const(i64, UNKNOWN)


def let_others_run(e: Function) -> None:
    """The threads that wait for this processor come first."""
    if known(e.module):
        e.call("sched_yield", i32)


def emit_leave(module: ir.Module) -> ir.Function:
    """``leave(processor)``: this thread goes on elsewhere, if it may run elsewhere."""
    with Function(module, "leave", [i64]) as (e, (processor,)):
        if known(module):
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
