"""Emitted functions as Python functions on NumPy arrays, for the instruction sets that this processor has.

And kernels of a changed generator, apart from those of all other tests.
"""

import ctypes
import functools

import llvmlite.binding as llvm
import numpy as np

from attnsuite.backends.flash_cpu import compiler, targets
from attnsuite.backends.flash_cpu.emit import Function, i1, i64, ptr

PROCESSOR = compiler.Processor.here()
ISAS = tuple(isa for isa in PROCESSOR.isas() if PROCESSOR.isa(isa.name))

_KEPT = []  # code that one of XLA's threads may still enter when its test is over


def compiled(isa, build, returns=None):
    """A Python function of what ``build(module)`` gives, a function of the module.

    An array is passed by its address, an int as int64, a float as float32.
    """
    module = compiler.new_module(PROCESSOR)
    function = build(module)
    function.linkage = ""  # public
    parsed, machine = compiler.optimised(module, PROCESSOR, isa)
    code = compiler.load(machine.emit_object(parsed))

    def run(*arguments):
        converted = [_argument(x) for x in arguments]
        prototype = ctypes.CFUNCTYPE(returns, *(type(x) for x in converted))
        return prototype(code.get_function_address(function.name))(*converted)

    return run


def assembly(processor, isa, kind, kernel):
    """The code of a kernel as text, for a processor that need not be here."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = compiler.new_module(processor)
    targets.build(kind, kernel, module, isa)
    parsed, machine = compiler.optimised(module, processor, isa, jit=False)
    return machine.emit_assembly(parsed)


def call(isa, build, *arguments, returns=None):
    """The same, called once with these arguments."""
    return compiled(isa, build, returns)(*arguments)


def _argument(x):
    if isinstance(x, np.ndarray):
        assert x.flags.c_contiguous
        return ctypes.c_void_p(x.ctypes.data)
    return ctypes.c_float(x) if isinstance(x, float) else ctypes.c_int64(x)


def everything_finite(module, isa, name, dtype, width):
    """For ``rows.finite``, whose answer it makes yes: a planted fault."""
    del isa, dtype, width
    with Function(module, name, [ptr], i1) as (e, _):
        e.ret(e.const(i1, 1))
    return e.function


def nothing_done(module, isa, stride):
    """For ``forward._emit_spoil``: a planted fault."""
    del isa, stride
    with Function(module, "spoil", [ptr] * 7 + [i64] * 2) as (e, _):
        return e.function


def set_apart(monkeypatch, directory, digest):
    """What is compiled from now on has a cache in ``directory``, and names that ``digest`` makes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory))
    monkeypatch.setattr(targets, "generator_digest", lambda: digest)
    monkeypatch.setattr(targets, "_target", functools.cache(targets._target.__wrapped__))
    _KEPT.append(targets._target)
