"""Emitted functions as Python functions on NumPy arrays, for the instruction sets that this processor has."""

import ctypes

import numpy as np

from backends.flash_cpu import compiler
from backends.flash_cpu.isa import KNOWN

PROCESSOR = compiler.Processor.here()
_HERE = dict(PROCESSOR.features)
ISAS = [isa for isa in KNOWN if all(_HERE.get(name) for name in isa.needs)] or [PROCESSOR.isa()]


def call(isa, build, *arguments, returns=None):
    """``build(module)`` gives a function of the module; it is compiled and called with these arguments.

    An array is passed by its address, an int as int64, a float as float32.
    """
    module = compiler.new_module(PROCESSOR)
    function = build(module)
    function.linkage = ""  # public
    parsed, machine = compiler.optimised(module, PROCESSOR, isa)
    code = compiler.load(machine.emit_object(parsed))
    converted = [_argument(x) for x in arguments]
    prototype = ctypes.CFUNCTYPE(returns, *(type(x) for x in converted))
    return prototype(code.address(function.name))(*converted)


def _argument(x):
    if isinstance(x, np.ndarray):
        assert x.flags.c_contiguous
        return ctypes.c_void_p(x.ctypes.data)
    return ctypes.c_float(x) if isinstance(x, float) else ctypes.c_int64(x)
