"""tokamax's Triton kernels in Pallas' interpreter, on a CPU.

tokamax has no argument for the interpreter, and the interpreter of JAX 0.12 finds no program id inside a conditional,
where the backward kernels ask for theirs ("MLIR translation rule for primitive 'program_id' not found for platform
cpu", upstream-issues.md of the docs). :func:`modules` gives copies of tokamax's modules of which only these two names
differ: ``pallas_call``, which interprets, and ``program_id``, which answers with what was read where the kernel begins.
The code of the kernels is tokamax's own, and its modules stay as they are.
"""

from __future__ import annotations

import contextvars
import functools
import importlib.util
import types
from collections.abc import Callable
from typing import Any

from jax.experimental import pallas

_BLOCK = "tokamax._src.pallas.block"


@functools.cache
def modules(*names: str) -> tuple[Any, ...]:
    """Copies of tokamax's modules whose kernels are interpreted."""
    ids: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar("program ids of the kernel that is traced")

    def program_id(axis: int) -> Any:
        if axis >= len(ids.get()):
            raise ValueError(f"axis {axis} is not of the grid.")  # as pallas does; tokamax counts the axes so
        return ids.get()[axis]

    def pallas_call(kernel: Callable[..., None], *arguments: Any, grid: tuple[int, ...], **named: Any) -> Any:
        def run(*refs: Any) -> None:
            before = ids.set(tuple(map(pallas.program_id, range(len(grid)))))
            try:
                kernel(*refs)
            finally:
                ids.reset(before)

        return block.pallas_call(run, *arguments, grid=grid, interpret=True, **named)

    ours = types.SimpleNamespace(**vars(pallas) | {"program_id": program_id})
    block = _copy(_BLOCK, pl=ours)
    wrapped = types.SimpleNamespace(**vars(block) | {"pallas_call": pallas_call})
    return tuple(_copy(name, pl=ours, block=wrapped) for name in names)


def _copy(name: str, **replaced: Any) -> Any:
    """A second copy of a module, beside that in ``sys.modules``, with other values of some names."""
    importlib.import_module(name)  # its classes look for their module there
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise ImportError(f"{name} has no source to copy.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module).update(replaced)
    return module
