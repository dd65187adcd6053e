"""Compile a module of LLVM IR to an address in this process, and to an object file for later processes.

llvmlite compiles for this processor. Compiled code stays in memory for the life of the process, since XLA keeps the
address.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import binding as llvm
from llvmlite import ir

from . import isa as isas
from . import tiles
from .isa import Isa


@dataclasses.dataclass(frozen=True, slots=True)
class Processor:
    """The compilation target: LLVM's names of the target, the processor and its features."""

    triple: str
    cpu: str
    features: tuple[tuple[str, bool], ...]

    @staticmethod
    @functools.cache
    def here() -> Processor:
        """The processor of this machine."""
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        features = dict(llvm.get_host_cpu_features())
        return Processor(llvm.get_process_triple(), llvm.get_host_cpu_name(), tuple(sorted(features.items())))

    def isas(self) -> tuple[Isa, ...]:
        """Its instruction sets, the best first; empty if it has no known one."""
        machine = "aarch64" if self.triple.startswith(("aarch64", "arm64")) else "x86_64"
        return isas.available(dict(self.features), machine)

    def isa(self, name: str | None = None) -> Isa | None:
        """The instruction set of that name, by default the best; None if the processor lacks it, or may not use it."""
        named = (isa for isa in self.isas() if name in (None, isa.name))
        return next((isa for isa in named if not isa.tiles or tiles.permitted()), None)

    def feature_text(self, isa: Isa) -> str:
        """The features in LLVM's notation, restricted to ``isa``."""
        features = isas.features_for(isa, dict(self.features))
        return ",".join(("+" if has else "-") + name for name, has in sorted(features.items()))


def new_module(processor: Processor) -> ir.Module:
    """An empty module for the processor."""
    module = ir.Module("flash_cpu")
    module.triple = processor.triple
    return module


def optimised(module: ir.Module, processor: Processor, isa: Isa, *, jit: bool = True) -> tuple[Any, Any]:
    """(LLVM's module after a few passes, the target machine).

    Vectors, tiles and unrolled loops are written by hand. Left for passes are variables on the stack, constant
    arguments, the form of loops, and folding.
    """
    machine = llvm.Target.from_triple(processor.triple).create_target_machine(
        cpu=processor.cpu, features=processor.feature_text(isa), opt=3, jit=jit
    )
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    passes = llvm.create_new_module_pass_manager()
    passes.add_sroa_pass()
    passes.add_ipsccp_pass()
    passes.add_loop_rotate_pass()
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    passes.run(parsed, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    return parsed, machine


def compile_object(build: Callable[[ir.Module, Isa], Any], processor: Processor, isa: Isa) -> bytes:
    """The object file of the module that ``build(module, isa)`` fills."""
    with _no_garbage_collection():
        module = new_module(processor)
        build(module, isa)
        parsed, machine = optimised(module, processor, isa)
    return machine.emit_object(parsed)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A module is thousands of objects: making them would start a collection of JAX's whole heap."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def load(data: bytes) -> Any:
    """LLVM's engine with an object file, whose code lives as long as the engine. Raises RuntimeError if it is none."""
    processor = Processor.here()
    machine = llvm.Target.from_triple(processor.triple).create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(data))
    engine.finalize_object()
    return engine
