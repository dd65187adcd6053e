"""Pallas kernels of an NVIDIA GPU's program (Triton's dialect), read from what XLA writes when it compiles the program.

XLA writes the launches (``thunk_sequence``: grid, threads, shared memory), the program (``gpu_after_optimizations``:
which of them are Pallas kernels) and the code of each kernel (``ptx``). XLA keeps the registers to itself. The
assembler that Triton brings counts them, where Triton is installed.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from attnsuite.backends.tunable import KernelBuild

FLAGS = "--xla_dump_to={} --xla_dump_emitter_re=ptx"
NO_KERNEL = "no waves: the program has no Pallas kernel."
NO_ASSEMBLER = "no registers: only Triton's assembler says them; install it with: pip install '.[kvax]'."
NO_SHARED = "no waves: XLA of JAX 0.10 does not write the shared memory of a kernel; that of 0.12 does."
_NEWEST = 100  # the architecture with the newest of Triton's assemblers, which XLA's PTX needs
_CALL = re.compile(r'custom_call_target="__gpu\$xla\.gpu\.triton".*, name = "([\w.$-]+)"')
_LAUNCH = re.compile(  # as XLA of JAX 0.12 and of 0.10 writes it
    r"(?:\] |kernel=)([\w.$]+)(?: grid|,.*blocks): [\[{](\d+), (\d+), (\d+)[\]}],? "
    r"threads(?:/block)?: [\[{](\d+), 1, 1[\]}](?: +shared_memory: (\d+))?"
)


def read(folder: Path) -> tuple[tuple[KernelBuild, ...], tuple[str, ...]]:
    """Each launch of a Pallas kernel in a dump of one program, and a sentence for what is not known."""
    codes = {match[1]: text for text in _texts(folder, "*.ptx") if (match := re.search(r"\.entry ([\w.$]+)\(", text))}
    calls = {name for text in _texts(folder, "*_gpu_after_optimizations.txt") for name in _CALL.findall(text)}
    launches = [each for text in _texts(folder, "*.thunk_sequence.txt") for each in _LAUNCH.findall(text)]
    found, notes = [], []
    for name, *sizes, shared in launches:
        if re.sub(r"_\d+$", "", name) in calls or name in calls:  # XLA numbers kernels of one name
            *grid, threads = map(int, sizes)
            figures, *why = _assembled(name, codes.get(name))
            static = figures.pop("static", 0)
            if shared:
                figures["shared_bytes"] = int(shared) + static
            else:
                why.append(NO_SHARED)
            warps = {"num_warps": -(-threads // 32)}
            found.append(KernelBuild(name=name, configuration={**warps}, blocks=math.prod(grid), **figures))
            notes += filter(None, why)
    return tuple(found), tuple(dict.fromkeys(notes))


def _texts(folder: Path, pattern: str) -> list[str]:
    return [path.read_text(errors="replace") for path in sorted(folder.glob(pattern))]


def _assembled(name: str, ptx: str | None) -> tuple[dict[str, Any], str | None]:
    """What the assembler says of a kernel's code, or a sentence why it says nothing."""
    architecture = re.search(r"^\.target sm_(\d+)", ptx or "", re.MULTILINE)
    if ptx is None or architecture is None:
        return {}, f"no registers of {name}: the compiler's dump does not have its code."
    try:
        from attnsuite.backends.kvax import build  # noqa: PLC0415 (imports Triton, which may be missing)
    except ImportError:
        return {}, NO_ASSEMBLER
    try:
        report = build.assemble(ptx, int(architecture[1]), _NEWEST)
    except (OSError, RuntimeError, ValueError) as error:
        return {}, f"no registers of {name}: {' '.join(str(error).split())[:200]}"
    loads = build.count_loads(ptx)
    patterns = {
        "registers": r"Used (\d+) registers",
        "spilled_bytes": r"(\d+) bytes spill stores",
        "static": r"(\d+) bytes smem",
    }
    numbers = {what: int(match[1]) for what, pattern in patterns.items() if (match := re.search(pattern, report))}
    columns = sum(map(int, re.findall(r"tcgen05\.alloc\.[^;]*, (\d+);", ptx)))
    limit = build.SHARED_LIMITS.get(divmod(int(architecture[1]), 10))
    return numbers | {
        "vector_loads": loads["vector"],
        "scalar_loads": loads["scalar"],
        "tensor_columns": columns,
        "shared_limit_bytes": limit,
    }, None
