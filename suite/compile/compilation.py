"""Compile one cell ahead of time: one case, one backend, one device, which may be absent.

The result says whether the compiler accepts the program, or gives the compiler's reason in one line. It holds the
program's sizes in bytes and whether they fit the device. Kernels that are compiled outside XLA (Triton) add registers,
spills and shared memory. Nothing is run, so the only time is the compiler's own. XLA's estimate of the run time
(``optimal_seconds``) is left out: it counts a Pallas call as no work at all.

Options on trial (``attnsuite tune --target``) are compiled the same way: kernels outside XLA in this process, the
others in a process for the device, whose compiler says whether it takes them, on a GPU without spilling registers.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

from attnsuite.backends import AttentionSpec, Backend, Target, registry, support
from attnsuite.backends.contract import BackendWithRoles
from attnsuite.backends.sharding import Sharded
from attnsuite.backends.tunable import CompilesKernels, CountsWork, KernelBuild

from ..cell import Case, Outcome
from ..kinds.attention_call import OpCase, spec_of
from ..kinds.model_case import ModelCase
from ..kinds.tuning_case import Trial
from ..measure import lint
from ..measure.program import Program
from ..record import ProgramText
from ..user_function import is_raised_by_user, is_reference, register_functions
from . import slices, topologies
from .by_hand import by_hand
from .programs import attention_specs, model_program, op_program, resolutions, role_program
from .schedules import scheduled

NO_COMPILER = "there is no compiler for this device here."
# XLA then rejects a GPU program whose kernels spill registers into memory, and says so. It reports no other facts.
NO_SPILLS = "--xla_gpu_fail_ptx_compilation_on_register_spilling=true"
ROLE = ":"  # between a backend and its role
KERNEL = "/"  # between a role and the kernel that computes it
_REASON_LENGTH = 300
_LOCATION = re.compile(r"(?: at location:)? loc\(")  # as MLIR writes one
# Memory of the device itself. A kernel that exceeds a core's own memory (vmem, smem, shared memory) counts as crashed.
_DEVICE_MEMORY = re.compile(r"\bHBM\b", re.IGNORECASE)
_SIZES = ("argument", "output", "temp", "alias", "generated_code", "peak")


def in_roles(case: OpCase | ModelCase, backend_name: str, kernels: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The names under which a case is compiled for a backend: one per role for a call on a backend with roles.

    Each role has a name for each of ``kernels``, the values of the backend's option: ``name:reuse/xla``.
    """
    backend = None if is_reference(backend_name) else registry.get(backend_name)
    if isinstance(case, OpCase) and isinstance(backend, BackendWithRoles):
        ends = [f"{KERNEL}{kernel}" for kernel in kernels] or [""]
        return tuple(f"{backend_name}{ROLE}{role}{end}" for role in backend.roles(spec_of(case)) for end in ends)
    return (backend_name,)


def backend_and_role(name: str) -> tuple[str, str]:
    """The backend of a cell's name, and its role with its kernel. A file's function has none.

    >>> backend_and_role("name:reuse/xla"), backend_and_role("my.py:fn")
    (('name', 'reuse/xla'), ('my.py:fn', ''))
    """
    backend, _, role = (name, "", "") if is_reference(name) else name.partition(ROLE)
    return backend, role


def compiled(case: Case, backend_name: str, target: Target, dump: Path | None) -> Outcome:
    """In a process for ``target``: :func:`compile_cell`, with the schedules that the compiler writes into ``dump``.

    Without schedules the library's own call is compiled too: its kernels would be read as the backend's.
    """
    register_functions([backend_name])
    work = functools.partial(compile_cell, case, backend_name, target)  # pyright: ignore[reportArgumentType]  (checked when asked)
    return beside_by_hand(work(), case, backend_name, target) if dump is None else scheduled(dump, work)


def compile_cell(case: OpCase | ModelCase, backend_name: str, target: Target) -> Outcome:
    """The outcome (ok, unsupported, oom, crashed), with what the compiler says of the program.

    ``backend_name`` may name one role of a backend that has roles, and its kernel: ``name:reuse``,
    ``name:reuse/xla``.

    An error of the backend or of the compiler becomes the result; it is never raised.
    """
    backend_name, role = backend_and_role(backend_name)
    backend = registry.get(backend_name)
    if target.topology:
        return _slice_cell(case, backend, target)
    specs = attention_specs(case)
    role, _, kernel = role.partition(KERNEL)
    options = {"kernel": kernel} if kernel else None
    reasons = dict.fromkeys(
        reason for spec in specs for reason in support(backend, spec, target, "compile", options).reasons
    )
    if reasons:
        return _refused(*reasons)
    unavailable = topologies.missing(target)
    try:
        if target.platform == "cuda" and isinstance(backend, CompilesKernels):
            kernels = _kernels(backend.compile_kernels(spec, target) for spec in specs)
            return kernels if kernels.error else _around(kernels, case, backend, target, unavailable)
        if unavailable is not None:
            return _refused(unavailable, error=NO_COMPILER)
        program = _program(case, backend, target, role or None, options or {})
        outcome = compile_program(program, topologies.device(target), spec=_one_call(case))
        return judged_size(outcome, target)
    except Exception as error:  # noqa: BLE001 (whatever the compiler raises is what this cell is about)
        return rejected(error)


def _slice_cell(case: OpCase | ModelCase, backend: Backend, target: Target) -> Outcome:
    """As :func:`compile_cell`, with the case divided among the chips of a slice."""
    unavailable = topologies.missing(target)
    if unavailable is not None:
        return _refused(unavailable, error=NO_COMPILER)
    try:
        sharding = slices.shard(case, target)
        if isinstance(sharding, str):
            return _refused(sharding)
        sharded = sharding.backend(backend)
        specs = attention_specs(case)
        reasons = dict.fromkeys(
            reason for spec in specs for reason in support(sharded, spec, target, "compile").reasons
        )
        if reasons:
            return _refused(*reasons)
        program = slices.placed(_program(case, sharded, target), case, sharding)
        outcome = compile_program(program, topologies.device(target), sharding.mesh)
        return judged_size(dataclasses.replace(outcome, notes=(sharding.note(),)), target)
    except Exception as error:  # noqa: BLE001 (as above)
        return rejected(error)


def compile_program(
    program: Program, device: Any, mesh: Mesh | None = None, spec: AttentionSpec | None = None
) -> Outcome:
    """Lower and compile for ``device``: the seconds of both steps, and the compiler's sizes in bytes (of one device).

    With a ``mesh`` the program is for all its devices, and its arguments carry their shardings. The text of a program
    that computes only attention ``spec`` is read. Raises the compiler's error.
    """
    arguments = program.arguments
    if mesh is None:
        mesh, sharding = Mesh(np.array([device]), ("device",)), SingleDeviceSharding(device)
        arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    jitted = jax.jit(program.function, donate_argnums=program.donated)
    # The mesh is what tells Pallas which TPU it lowers for.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        start = time.perf_counter()
        platform = "cuda" if device.platform == "gpu" else device.platform
        lowered = jitted.trace(*arguments).lower(lowering_platforms=(platform,))
        middle = time.perf_counter()
        compiled = lowered.compile()
    end = time.perf_counter()
    return Outcome(
        lower_seconds=middle - start,
        compile_seconds=end - middle,
        memory=_sizes(compiled),
        program=None if spec is None else _text(compiled, spec),
    )


def compile_kernels(backend: CompilesKernels, spec: AttentionSpec, target: Target, options: Mapping[str, Any]) -> Trial:
    """A trial of options whose kernels are compiled outside XLA."""
    try:
        builds = backend.compile_kernels(spec, target, options)
    except Exception as error:  # noqa: BLE001 (a candidate that cannot be compiled is a result)
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return Trial(options=dict(options), error=reason)
    errors = (f"{build.name}: {build.error}" for build in builds if build.error)
    return Trial(options=dict(options), error=next(errors, None), kernels=builds)


def compile_candidate(
    case: OpCase,
    name: str,
    target: Target,
    options: Mapping[str, Any],
    fixed: Mapping[str, Any],
    dump: Path | None = None,
) -> Trial:
    """In a process for ``target``: a trial of ``options`` beside the ``fixed`` ones. Nothing is run.

    ``dump`` is the folder into which the compiler of a TPU writes schedules.
    """
    backend, spec, whole = registry.get(name), spec_of(case), {**fixed, **options}
    try:
        counted = backend.work(spec, target, whole) if isinstance(backend, CountsWork) else None
        if reasons := support(backend, spec, target, "compile", whole).reasons:
            return Trial(options=dict(options), error=" ".join(reasons))
        program = op_program(case, backend, target, whole)

        def judged() -> Outcome:
            return judged_size(compile_program(program, topologies.device(target)), target)

        verdict = judged() if dump is None else scheduled(dump, judged)
    except Exception as error:  # noqa: BLE001 (as above)
        return Trial(options=dict(options), error=rejected(error).error)
    return Trial(options=dict(options), error=verdict.error, work=counted, schedules=verdict.schedules)


def _text(compiled: Any, spec: AttentionSpec) -> ProgramText:
    read = lint.read(compiled.as_text() or "", spec)
    return dataclasses.replace(read, operations=lint.operations(compiled))


def beside_by_hand(outcome: Outcome, case: Case, backend: str, target: Target) -> Outcome:
    """The outcome with the operations of the library's own call, compiled for the same device, where there is one."""
    if outcome.program is None or not isinstance(case, OpCase):
        return outcome
    try:
        program = by_hand(case, backend, target)
        if program is None:
            return outcome
        found = compile_program(program, topologies.device(target), spec=spec_of(case)).program
    except Exception as error:  # noqa: BLE001 (the cell is about the backend's program, which compiles)
        note = f"the library called by hand does not compile here: {rejected(error).error}"
        return dataclasses.replace(outcome, notes=(*outcome.notes, note))
    operations = None if found is None else found.operations
    return dataclasses.replace(outcome, program=dataclasses.replace(outcome.program, by_hand=operations))


def _one_call(case: OpCase | ModelCase) -> AttentionSpec | None:
    return spec_of(case) if isinstance(case, OpCase) else None


def _sizes(compiled: Any) -> dict[str, int | None]:
    analysis = compiled.memory_analysis()
    found = {name: getattr(analysis, f"{name}_size_in_bytes", None) for name in _SIZES}
    found["peak"] = getattr(analysis, "peak_memory_in_bytes", None)
    found["generated_code"] = found["generated_code"] or None  # XLA's GPU compiler does not say
    return {f"compiled_{name}": size for name, size in found.items()}


def judged_size(outcome: Outcome, target: Target) -> Outcome:
    """The outcome, ``oom`` where a GPU program is too large for the device.

    XLA's GPU compiler does not check this, TPU compilers do.
    """
    peak, limit = outcome.memory["compiled_peak"], target.memory_bytes
    if peak is not None and limit is not None and peak > limit:
        error = f"needs {peak / 2**30:.2f} GiB of device memory; {target} has {limit / 2**30:g} GiB."
        return dataclasses.replace(outcome, status="oom", error=error)
    return outcome


def _refused(*reasons: str, error: str = "refused before it was compiled.") -> Outcome:
    return Outcome(status="unsupported", reasons=reasons, error=error)


def rejected(error: Exception, outcome: Outcome = Outcome()) -> Outcome:  # noqa: B008 (frozen)
    """The compiler's message, on one line, up to the location in its source: that holds paths of this machine.

    What a function of the user raised says so.
    """
    reason, *_ = _LOCATION.split(" ".join(str(error).split()), maxsplit=1)
    who = "the function raised " if is_raised_by_user(error) else ""
    message = f"{who}{type(error).__name__}: {reason}"[:_REASON_LENGTH]
    out_of_memory = "RESOURCE_EXHAUSTED" in message and _DEVICE_MEMORY.search(message)
    return dataclasses.replace(outcome, status="oom" if out_of_memory else "crashed", error=message)


def _program(
    case: OpCase | ModelCase,
    backend: Backend,
    target: Target,
    role: str | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Program:
    if isinstance(case, OpCase):
        if role is not None and isinstance(backend, BackendWithRoles):
            return role_program(case, backend, target, role, options)
        return op_program(case, backend, target)
    if isinstance(backend, Sharded):
        whole = resolutions(case, backend.backend.name, target)
        return model_program(case, tuple((kind, dataclasses.replace(each, backend=backend)) for kind, each in whole))
    return model_program(case, resolutions(case, backend.name, target))


def _around(
    kernels: Outcome, case: OpCase | ModelCase, backend: Backend, target: Target, unavailable: str | None
) -> Outcome:
    """``kernels`` with the sizes of the XLA program that calls them, or with ``notes`` why these are unknown."""
    if unavailable is not None:
        return dataclasses.replace(kernels, notes=(unavailable,))
    try:
        outcome = compile_program(_program(case, backend, target), topologies.device(target), spec=_one_call(case))
    except ImportError as error:  # what puts the kernels into XLA's program (jax-triton)
        return dataclasses.replace(kernels, notes=(" ".join(str(error).split()),))
    except Exception as error:  # noqa: BLE001 (as above)
        return rejected(error, kernels)
    seconds = (kernels.compile_seconds or 0) + (outcome.compile_seconds or 0)
    return judged_size(dataclasses.replace(outcome, compile_seconds=seconds, kernels=kernels.kernels), target)


def _kernels(builds: Iterable[tuple[KernelBuild, ...]]) -> Outcome:
    """The result for kernels that their own compiler compiles, not XLA."""
    start = time.perf_counter()
    made = tuple(build for group in builds for build in group)
    failed = [f"{build.name}: {build.error}" for build in made if build.error is not None]
    return Outcome(
        status="crashed" if failed else "ok",
        error=" ".join(failed)[:_REASON_LENGTH] or None,
        compile_seconds=time.perf_counter() - start,
        kernels=made,
    )
