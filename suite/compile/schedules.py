"""The schedule or the launch of a Pallas kernel, read from what a compiler writes for a device that is not here.

A TPU core executes bundles of instructions, one bundle after the other. libtpu writes the final bundles of every
program (``final_bundles``), which units each of them uses (``final_hlo-static-per-bundle-utilization``), the
instruction of the program (``schedule-analysis_final_bundles``), and the kernel as Mosaic received it, with its grid.
The figures count bundles and are no time: a bundle may stall, every branch counts as taken, and a loop inside a step
counts once.

The dump of one attention call takes some ten megabytes. A call whose dump exceeds :data:`LIMIT` has no schedule.

Of an NVIDIA GPU's program (Triton's dialect) XLA writes the launches (``thunk_sequence``: grid, threads, shared
memory), the program (``gpu_after_optimizations``: which of them are Pallas kernels) and the code of each kernel
(``ptx``). XLA keeps the registers to itself. The assembler that Triton brings counts them, where Triton is installed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from attnsuite.backends.tunable import KernelBuild

from ..cell import Outcome
from ..record import Schedule

LIMIT = 2**28  # bytes of a dump
TOO_LARGE = f"no schedule: the compiler's dump exceeds {LIMIT >> 20} MiB; compile a smaller call."
NOTHING_WRITTEN = "no schedule: the compiler wrote none; libtpu 0.0.41 and 0.0.50.1 do."
GPU_FLAGS = "--xla_dump_to={} --xla_dump_emitter_re=ptx"
NO_KERNEL = "no waves: the program has no Pallas kernel."
NO_ASSEMBLER = "no registers: only Triton's assembler says them; install it with: pip install '.[kvax]'."
NO_SHARED = "no waves: XLA of JAX 0.10 does not write the shared memory of a kernel; that of 0.12 does."
_NEWEST = 100  # the architecture with the newest of Triton's assemblers, which XLA's PTX needs
_CALL = re.compile(r'custom_call_target="__gpu\$xla\.gpu\.triton".*, name = "([\w.$-]+)"')
_LAUNCH = re.compile(  # as XLA of JAX 0.12 and of 0.10 writes it
    r"(?:\] |kernel=)([\w.$]+)(?: grid|,.*blocks): [\[{](\d+), (\d+), (\d+)[\]}],? "
    r"threads(?:/block)?: [\[{](\d+), 1, 1[\]}](?: +shared_memory: (\d+))?"
)
_VARIABLE, _GPU_VARIABLE = "LIBTPU_INIT_ARGS", "XLA_FLAGS"
_REGISTER_BYTES = 8 * 128 * 4  # of a vector register, on every TPU
_ANALYSIS, _BUNDLES = "schedule-analysis_final_bundles", "final_bundles"
_UNITS = "final_hlo-static-per-bundle-utilization"
_PROGRAM = re.compile(rf"\d+-(?P<name>.+)-\d+-(?P<what>{_ANALYSIS}|{_UNITS}|{_BUNDLES})\.txt")  # a time, a name, a step
_GRID = re.compile(r"func\.func @([\w.$-]+)\([^\n]*iteration_bounds = array<i64: (-?\d+(?:, -?\d+)*)>")
_BUNDLE = re.compile(r"^ *(?:0x)?[0-9a-f]+ +(?:[A-Z]{2})? *: +((?:> *)*)(\{\}|\{)", re.MULTILINE)


def variables(folder: Path, platform: str = "tpu") -> dict[str, str]:
    """The environment with which a process that compiles for a TPU, or a GPU (cuda), writes its dump into ``folder``.

    The user's own arguments are kept. Of a TPU's program only the last step is written, not all seventy.
    """
    if platform == "cuda":
        return {_GPU_VARIABLE: f"{os.environ.get(_GPU_VARIABLE, '')} {GPU_FLAGS.format(folder)}".strip()}
    dump = (
        f"--xla_mosaic_dump_to={folder} --xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
        "--xla_jf_dump_llo_pass_label_regex=final_"
    )
    return {_VARIABLE: f"{os.environ.get(_VARIABLE, '')} {dump}".strip()}


def scheduled(folder: Path, work: Callable[[], Outcome]) -> Outcome:
    """The outcome of ``work``, which compiles, with the schedules that the compiler wrote into ``folder`` meanwhile.

    Of a GPU's program these are the launches of Pallas kernels. A note says why a kernel has no schedule. The folder is
    empty afterwards.
    """
    _empty(folder)
    with _limited(folder) as full:
        outcome = work()
    if outcome.status == "ok":
        if full.is_set() or _size(folder) > LIMIT:
            outcome = dataclasses.replace(outcome, notes=(*outcome.notes, TOO_LARGE))
        elif GPU_FLAGS.format(folder) in os.environ.get(_GPU_VARIABLE, ""):
            launched, notes = read_launches(folder)
            kernels = (*outcome.kernels, *launched)
            notes = notes if kernels else (NO_KERNEL,)
            outcome = dataclasses.replace(outcome, kernels=kernels, notes=(*outcome.notes, *notes))
        else:
            found, notes = read(folder)
            outcome = dataclasses.replace(outcome, schedules=found, notes=(*outcome.notes, *notes))
    _empty(folder)
    return outcome


def read(folder: Path) -> tuple[tuple[Schedule, ...], tuple[str, ...]]:
    """The schedule of each Pallas kernel in a dump, by name, and a sentence for each kernel that has none."""
    programs: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.iterdir()):  # of a program that was compiled twice, the last
        if match := _PROGRAM.fullmatch(path.name):
            programs.setdefault(match["name"], {})[match["what"]] = path
    if not programs:
        return (), (NOTHING_WRITTEN,)
    grids, found, notes = _grids(folder), [], []
    for name, files in sorted(programs.items()):
        try:
            if _is_kernel(name, files):
                found.append(_schedule(name, files, grids.get(re.sub(r"\.\d+$", "", name), set())))
        except (OSError, ValueError) as damage:
            notes.append(f"no schedule of {name}: {damage}.")
    if not found and not notes:
        notes.append("no schedule: the program has no Pallas kernel.")
    return tuple(found), tuple(notes)


def _is_kernel(name: str, files: dict[str, Path]) -> bool:
    """Whether the program is that of a Pallas call. Raises ValueError."""
    call = rf"scheduled bundles \([^)]*\): %{re.escape(name)} = [^\n]* custom_call_target=\"tpu_custom_call\""
    return re.search(call, _text(files, _ANALYSIS)) is not None


def _schedule(name: str, files: dict[str, Path], grids: set[int | None]) -> Schedule:
    """The schedule of a kernel; ``grids`` are the steps of all grids of this name. Raises ValueError."""
    units, looped = _units(_text(files, _UNITS)), _looped(_text(files, _BUNDLES))
    if len(units) != len(looped):
        raise ValueError(f"its bundles are {len(looped)} in one file of the dump and {len(units)} in another")
    steps = next(iter(grids)) if len(grids) == 1 else None
    body = [row for row, inside in zip(units, looped, strict=True) if inside or steps == 1] or units
    return Schedule(
        kernel=name,
        bundles=len(units),
        step_bundles=len(body),
        grid_steps=steps,
        mxu_bundles=sum(row["MXU"] > 0 for row in body),
        fills=sum(row["VLOAD:FILL"] for row in body),
        spills=sum(row["VSTORE:SPILL"] for row in body),
        vector_bytes=_REGISTER_BYTES * sum(row["VLOAD"] + row["VSTORE"] for row in body),
    )


def _units(text: str) -> list[dict[str, int]]:
    """How many slots of each unit a bundle uses, bundle by bundle. Raises ValueError."""
    lines = text.split("\n")
    names = [name.strip() for name in lines[1].split(",")] if len(lines) > 4 else []  # 0: a title, 2: slots, 3: a title
    if not {"MXU", "VLOAD", "VLOAD:FILL", "VSTORE", "VSTORE:SPILL"} <= set(names):
        raise ValueError("the units of its bundles are not named in the compiler's dump")
    rows = [line.split() for line in lines[4:] if line.strip()]
    if not rows or any(len(row) != len(names) or not all(map(str.isdecimal, row)) for row in rows):
        raise ValueError("the units of its bundles are cut off or damaged in the compiler's dump")
    return [dict(zip(names, map(int, row), strict=True)) for row in rows]


def _looped(text: str) -> list[bool]:
    """Whether each bundle is in a loop, which ``>`` says; an empty bundle is where the one before it is."""
    found: list[bool] = []
    for match in _BUNDLE.finditer(text):
        found.append(found[-1] if match[2] == "{}" and found else ">" in match[1])
    return found


def _grids(folder: Path) -> dict[str, set[int | None]]:
    """The steps of the grids of each kernel, by name; None of a grid whose size is known at run time only."""
    found: dict[str, set[int | None]] = {}
    for path in folder.glob("*-mosaic-dump-*-post-deserialization.txt"):
        for name, sizes in _GRID.findall(path.read_text(errors="replace")):
            steps: int | None = 1
            for size in sizes.split(","):
                steps = steps * int(size) if steps is not None and int(size) > 0 else None
            found.setdefault(name, set()).add(steps)
    return found


def _text(files: dict[str, Path], what: str) -> str:
    if what not in files:
        raise ValueError(f"the compiler's dump has no file {what}")
    return files[what].read_text(errors="replace")


@contextlib.contextmanager
def _limited(folder: Path) -> Iterator[threading.Event]:
    """Set, and the folder emptied again and again, once a dump exceeds the limit."""
    full, done = threading.Event(), threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            with contextlib.suppress(OSError):  # a file that the compiler has just removed
                if full.is_set() or _size(folder) > LIMIT:
                    full.set()
                    _empty(folder)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield full
    finally:
        done.set()
        thread.join()


def _size(folder: Path) -> int:
    return sum(entry.stat().st_size for entry in os.scandir(folder))


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():  # of a program that a function of the user ran beside
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def read_launches(folder: Path) -> tuple[tuple[KernelBuild, ...], tuple[str, ...]]:
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
