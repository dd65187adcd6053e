"""The request of ``attnsuite compile``, checked: its cases, models, backends and devices exist.

Also the request for the kernels that a run of the suite ``quick`` could only interpret (:func:`verdict_request`). An
interpreter shows that a kernel's numbers are right. The compiler shows whether the same kernel is accepted on a GPU,
with its registers, spills and shared memory. It takes seconds for each case.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnsuite.backends import Target, names, registry, support
from attnsuite.backends.tunable import CompilesKernels
from attnsuite.cache_directory import cache_directory
from attnsuite.models import PRESETS

from .compile import topologies
from .compile.programs import model_config
from .compile_run import CompileGrid
from .errors import InputError, as_input
from .flag_values import is_whole, names_of, spelled
from .grid.run_grid import RunGrid
from .grid.running import Limits
from .kinds.attention_call import OpCase, spec_of
from .kinds.model_case import PHASES, ModelCase
from .measure.environment import versions
from .named_model import absolute
from .record import Record
from .store import RECORDS
from .suites import find_suite, select, shipped
from .user_function import known_row

_SUITE = "compile"
COMPILED_KERNELS = ("xla", "pallas")  # native kernels are for the processor at hand
_DEFAULT_LENGTH = "2048"
_OF_MODELS = ("seq_lens", "phases", "longest", "batch", "dtype")
_BATCH = "batch"  # the word of --longest that asks for the largest batch
VERDICT_TARGET = "h100"


def compile_request(flags: Any, out: Path, limits: Limits, command: tuple[str, ...]) -> CompileGrid:
    """The request of the verb's ``flags``. Raises InputError with one sentence for a name that does not exist."""
    if (out / RECORDS).exists():
        raise InputError(
            f"{out} already has records; choose another --out (what was compiled before is not compiled again)."
        )
    if flags.schedule and flags.model is not None:
        raise InputError("--schedule is about attention calls; leave out --model.")
    cells = _cells(flags)
    searches = _searches(flags, cells)
    backends = names() if flags.backends is None else names_of(flags.backends, "--backends")
    kernels = () if flags.kernel is None else names_of(flags.kernel, "--kernel")
    return CompileGrid(
        cases=(*_ops(flags), *cells),
        searches=searches,
        backends=tuple(map(known_row, backends)),
        targets=tuple(map(_known_target, names_of(flags.targets or ",".join(topologies.KINDS), "--targets"))),
        out=out,
        limits=limits,
        cache=flags.cache or cache_directory(_SUITE),
        command=command,
        kernels=tuple(map(_known_kernel, kernels)),
        schedule=flags.schedule,
    )


def _ops(flags: Any) -> tuple[OpCase | ModelCase, ...]:
    if flags.cases is None and flags.suite is None and flags.model is not None:
        return ()
    found = shipped(_SUITE) if flags.suite in (None, _SUITE) else find_suite(flags.suite)
    chosen = found.cases if flags.cases is None else select(found.cases, names_of(flags.cases, "--cases"))
    compilable = tuple(_one_step(case) for case in chosen if isinstance(case, OpCase | ModelCase))
    if not compilable:
        raise InputError(f"suite {found.name} has no case that can be compiled without data; use op and model cases.")
    return compilable


def _one_step(case: OpCase | ModelCase) -> OpCase | ModelCase:
    """A decode case with one token, as it is compiled. Raises InputError for an unknown model."""
    if isinstance(case, OpCase):
        return case
    model_config(case)
    return dataclasses.replace(case, new_tokens=1)


def _cells(flags: Any) -> tuple[ModelCase, ...]:
    """Cases of the models at the given lengths."""
    if flags.model is None:
        for field in dataclasses.fields(flags):
            if field.name in _OF_MODELS and getattr(flags, field.name) != field.default:
                flag = spelled([field.name])
                raise InputError(f"{flag} is about models; add --model, such as --model llama-3.2-1b.")
        return ()
    phases = names_of(flags.phases or ",".join(PHASES), "--phases")
    lengths = [_length(text) for text in names_of(flags.seq_lens or _DEFAULT_LENGTH, "--seq-lens")]
    return tuple(
        dataclasses.replace(base, sequence=length, name="") for base in _bases(phases, flags) for length in lengths
    )


def _searches(flags: Any, cells: tuple[ModelCase, ...]) -> tuple[tuple[str, ModelCase], ...]:
    """Cases whose longest length is to be searched, and those of ``cells`` whose largest batch is, if it is."""
    requested = names_of(flags.longest, "--longest") if flags.longest is not None else ()
    phases = [name for name in requested if name != _BATCH]
    lengths = [("sequence", base) for base in (_bases(phases, flags) if phases else ())]
    return (*lengths, *(("batch", cell) for cell in cells if _BATCH in requested))


def _bases(phases: Sequence[str], flags: Any) -> tuple[ModelCase, ...]:
    for name in phases:
        if name not in PHASES:
            raise InputError(f"phase {name!r} is not known; use {', '.join(PHASES)}.")
    models = [name if name in PRESETS else absolute(name) for name in names_of(flags.model, "--model")]
    bases = [
        ModelCase(kind=PHASES[phase], model=model, batch=flags.batch, dtype=flags.dtype, new_tokens=1)
        for model in models
        for phase in phases
    ]
    for base in bases:
        model_config(base)
    return tuple(bases)


def _known_target(name: str) -> Target:
    if name.partition(":")[0] not in topologies.KINDS:
        raise InputError(
            f"target {name!r} cannot be compiled for; use {', '.join(topologies.KINDS)}, or a slice such as v5e:4x4."
        )
    with as_input():
        return Target.named(name)


def _known_kernel(name: str) -> str:
    if name not in COMPILED_KERNELS:
        raise InputError(f"--kernel {name!r} is not compiled for other devices; use {', '.join(COMPILED_KERNELS)}.")
    return name


def _length(text: str) -> int:
    if not is_whole(text) or int(text) < 1:
        raise InputError(f"--seq-lens {text!r} is not a length; give integers of at least 1, separated by commas.")
    return int(text)


def verdict_request(request: RunGrid, records: Sequence[Record]) -> CompileGrid | None:
    """The cases whose interpreted kernels are compiled for an H100; None if there are none.

    Left out are cases that the backend refuses there (Kvax: float32), and runs of nodes with other versions than the
    driver's, which compiles: a page holds one version.
    """
    if request.suite != "quick" or request.shard is not None or _of_other_versions(records):
        return None
    target = Target.named(VERDICT_TARGET)
    interpreted = {(record.case, record.requested) for record in records if record.mode == "interpret"}
    pairs = [
        (case, row)
        for case in request.cases
        for row in request.backends
        if isinstance(case, OpCase)
        and (case.name, row) in interpreted
        and isinstance(registry.get(row), CompilesKernels)
        and support(registry.get(row), spec_of(case), target, "compile")
    ]
    if not pairs:
        return None
    cases, rows = tuple(dict.fromkeys(case for case, _ in pairs)), tuple(dict.fromkeys(row for _, row in pairs))
    out = request.out / VERDICT_TARGET
    arguments = ("--suite", "quick", "--cases", ",".join(case.name for case in cases), "--backends", ",".join(rows))
    return CompileGrid(
        cases=cases,
        backends=rows,
        targets=(target,),
        out=out,
        limits=request.limits,
        cache=cache_directory(_SUITE),
        command=("attnsuite", "compile", *arguments, "--targets", VERDICT_TARGET, "--out", str(out)),
    )


def _of_other_versions(records: Sequence[Record]) -> bool:
    mine = versions()
    return any(
        version != mine.get(name, version)
        for record in records
        for name, version in record.environment.get("versions", {}).items()
    )
