"""The verb ``attnsuite compile``: its flags, and the function that runs it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from .flags import NO_RESULT, OnFleet, arguments_of, directory, flag, fleet_of, limits_of, progress, tell


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compile(OnFleet):
    """Compile every backend for devices that are not here: does it compile, does it fit. Nothing is run."""

    backends: Annotated[str | None, flag("NAMES", "all that are registered")] = None
    """Backends to compile, separated by commas; PATH.py:NAME is a function of a file."""
    targets: Annotated[str | None, flag("NAMES", "all that are known")] = None
    """Devices to compile for, such as v5e,h100, separated by commas."""
    suite: Annotated[str | None, flag("NAME|FILE", "compile")] = None
    """Where the cases are from: compile, quick, full, or the path of a .toml file."""
    cases: Annotated[str | None, flag("PATTERNS", "all, or none with --model")] = None
    """Glob patterns of case names, separated by commas."""
    model: Annotated[str | None, flag("NAMES|DIRS", "none")] = None
    """Whole models to compile (presets such as llama-3.2-1b, text, directories), separated by commas."""
    seq_lens: Annotated[str | None, flag("LENGTHS", "2048")] = None
    """Sequence lengths of the models, separated by commas."""
    phases: Annotated[str | None, flag("NAMES", "prefill,train,decode")] = None
    """What the models do, separated by commas."""
    kernel: Annotated[str | None, flag("NAMES", "the device's")] = None
    """The layers of a sparse backend by each of these kernels: xla, pallas, separated by commas."""
    schedule: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Count what the compiler scheduled of each Pallas kernel: bundles for TPUs, registers and waves for GPUs."""
    longest: Annotated[str | None, flag("PHASES|batch", "none")] = None
    """Phases whose longest sequence that fits each device is searched (to 131072, by quarters of powers of two);
    or batch: the largest batch of --phases at --seq-lens that fits (to 448 for each chip that shares the batch)."""
    batch: Annotated[int, flag("N")] = 1
    """Sequences per batch of the models."""
    dtype: Annotated[str, flag("DTYPE")] = "bfloat16"
    """What the models compute in."""
    out: Annotated[Path | None, flag("DIR", "runs/<UTC time>-compile")] = None
    """Directory for records and report."""
    cache: Annotated[Path | None, flag("DIR", "~/.cache/attnsuite/compile")] = None
    """Where answers of the compilers are kept."""
    cell_timeout: Annotated[float, flag("SECONDS")] = 600.0
    """Time that one program may take to compile."""
    cell_memory: Annotated[str | None, flag("SIZE", "70% of the machine")] = None
    """Memory of this machine that one compiler may hold, such as 4GiB."""


def run(command: Compile) -> int:
    """Compile every cell, and render the page."""
    from .. import compile_run
    from ..compile_request import compile_request
    from ..compile_run import nothing_compiled
    from .report import show

    limits = limits_of(command.cell_timeout, command.cell_memory)
    request = compile_request(command, directory(command.out, "compile"), limits, arguments_of(command))
    fleet = fleet_of(command)
    with progress(lambda: "what is compiled is kept; the same with another --out goes on.") as display:
        records = compile_run.compile_all(request, display, fleet)
    show(request.out)
    if nothing_compiled(records):
        tell("attnsuite: nothing was compiled, for want of a compiler; the reasons above say how to get one.")
        return NO_RESULT
    return 0
