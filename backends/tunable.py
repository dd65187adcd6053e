"""What a backend says about its options so that ``attnsuite tune`` can try them.

:class:`Tunable` names options to try. :class:`CountsWork` counts what a kernel does with options, for devices that are
not here and cannot be timed; :class:`CompilesKernels` compiles such kernels where XLA does not. :class:`MadeExact` is
for approximate backends, whose kernels are judged where everything is computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Protocol, runtime_checkable

from msgspec import Meta

from .devices import Target
from .features import Options
from .spec import AttentionSpec

_Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]  # records hold them


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelWork:
    """What a kernel does for one problem, counted from its blocks: no speed.

    - ``steps``: steps of its grid (on a GPU: of its loops) that compute something.
    - ``loaded_bytes``: keys, values and queries that these steps load from the device's memory.
    - ``buffer_bytes``: about the memory of a core that one step holds.
    """

    steps: _Size
    loaded_bytes: _Size
    buffer_bytes: _Size


@runtime_checkable
class Tunable(Protocol):
    """A backend with options worth trying. ``options`` hold for every candidate."""

    def defaults(self, spec: AttentionSpec, target: Target, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """The options that hold where no table has an entry."""
        ...

    def candidates(
        self, spec: AttentionSpec, target: Target, options: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], ...]:
        """Options to try for ``spec`` on ``target``."""
        ...


@runtime_checkable
class CountsWork(Protocol):
    """A backend whose kernels XLA compiles, for devices that may be absent."""

    def work(self, spec: AttentionSpec, target: Target, options: Mapping[str, Any]) -> KernelWork:
        """The work of the pass that is tuned for ``spec``: the backward pass if there is one, else the forward pass."""
        ...


@runtime_checkable
class MadeExact(Protocol):
    """An approximate backend with options under which every visible pair is computed."""

    @property
    def exact_options(self) -> Mapping[str, Any]:
        """These options. With them the oracle can judge the kernels."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelBuild:
    """One GPU kernel compiled ahead of time, as its assembler reports it: sizes, never a speed.

    ``configuration`` holds its compile-time parameters (block sizes, warps, stages). ``registers`` and
    ``spilled_bytes`` are per thread; ``shared_bytes`` is per thread block, and the target has ``shared_limit_bytes`` of
    it. ``blocks`` is the number of thread blocks that the problem launches, ``tensor_columns`` the columns of tensor
    memory that each of them takes (from compute capability 10 on). If the compiler refused, ``error`` is the first line
    of its message, and the sizes are None.
    """

    name: str
    configuration: dict[str, int]
    registers: _Size | None = None
    spilled_bytes: _Size | None = None
    shared_bytes: _Size | None = None
    shared_limit_bytes: _Size | None = None
    vector_loads: _Size | None = None
    scalar_loads: _Size | None = None
    blocks: _Size | None = None
    tensor_columns: _Size | None = None
    error: str | None = None


@runtime_checkable
class CompilesKernels(Protocol):
    """A backend whose GPU kernels are compiled outside XLA, and that can report the result."""

    def compile_kernels(self, spec: AttentionSpec, target: Target, options: Options = None) -> tuple[KernelBuild, ...]:
        """Compile every kernel of ``spec`` for ``target``, which need not be present. No GPU, no driver."""
        ...
