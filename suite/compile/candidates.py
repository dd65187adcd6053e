"""Options on trial for a device that is not here: the compiler's facts about a backend's kernels with them.

Kernels that are compiled outside XLA (Kvax's) report registers and spills, in this process. Kernels that XLA compiles
are compiled in a process for the device: the compiler says whether it takes them, on a GPU without spilling
registers. Their work is counted by the backend.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnsuite.backends import Target, registry, support
from attnsuite.backends.contract import AttentionSpec
from attnsuite.backends.tunable import CompilesKernels, CountsWork

from ..cell import Outcome
from ..kinds.attention_call import OpCase, spec_of
from . import topologies
from .compilation import compile_program, judged_size, rejected
from .programs import op_program
from .tpu_schedules import scheduled

# XLA then rejects a GPU program whose kernels spill registers into memory, and says so. It reports no other facts.
NO_SPILLS = "--xla_gpu_fail_ptx_compilation_on_register_spilling=true"


def compile_kernels(
    backend: CompilesKernels, spec: AttentionSpec, target: Target, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The facts of a :class:`attnsuite.suite.kinds.tuning_case.Trial` about kernels that are compiled outside XLA."""
    try:
        builds = backend.compile_kernels(spec, target, options)
    except Exception as error:  # noqa: BLE001 (a candidate that cannot be compiled is a result)
        return {"options": dict(options), "error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    errors = [f"{build.name}: {build.error}" for build in builds if build.error]
    kernels = list(map(dataclasses.asdict, builds))
    return {"options": dict(options), "error": errors[0] if errors else None, "kernels": kernels}


def compile_candidate(
    case: OpCase,
    name: str,
    target: Target,
    options: Mapping[str, Any],
    fixed: Mapping[str, Any],
    dump: Path | None = None,
) -> dict[str, Any]:
    """In a process for ``target``: the facts of a Trial about ``options`` beside the ``fixed`` ones. Nothing is run.

    ``dump`` is the folder into which the compiler of a TPU writes schedules.
    """
    backend, spec, whole = registry.get(name), spec_of(case), {**fixed, **options}
    try:
        counted = backend.work(spec, target, whole) if isinstance(backend, CountsWork) else None
        if reasons := support(backend, spec, target, "compile", whole).reasons:
            return {"options": dict(options), "error": " ".join(reasons)}
        program = op_program(case, backend, target, whole)

        def judged() -> Outcome:
            return judged_size(compile_program(program, topologies.device(target)), target)

        verdict = judged() if dump is None else scheduled(dump, judged)
    except Exception as error:  # noqa: BLE001 (as above)
        return {"options": dict(options), "error": rejected(error).error}
    work = None if counted is None else dataclasses.asdict(counted)
    counts = [dataclasses.asdict(each) for each in verdict.schedules]
    return {"options": dict(options), "error": verdict.error, "work": work, "schedules": counts}
