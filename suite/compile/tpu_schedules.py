"""The schedule of a Pallas kernel, read from what a TPU's compiler writes of it for a device that is not here.

A TPU core executes bundles of instructions, one bundle after the other. libtpu writes the final bundles of every
program (``final_bundles``), which units each of them uses (``final_hlo-static-per-bundle-utilization``), the
instruction of the program (``schedule-analysis_final_bundles``), and the kernel as Mosaic received it, with its grid.
The figures count bundles and are no time: a bundle may stall, every branch counts as taken, and a loop inside a step
counts once.

The dump of one attention call takes some ten megabytes. A call whose dump exceeds :data:`LIMIT` has no schedule.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from ..cell import Outcome
from ..record import Schedule
from . import launches

LIMIT = 2**28  # bytes of a dump
TOO_LARGE = f"no schedule: the compiler's dump exceeds {LIMIT >> 20} MiB; compile a smaller call."
NOTHING_WRITTEN = "no schedule: the compiler wrote none; libtpu 0.0.41 and 0.0.50.1 do."
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
        return {_GPU_VARIABLE: f"{os.environ.get(_GPU_VARIABLE, '')} {launches.FLAGS.format(folder)}".strip()}
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
        elif launches.FLAGS.format(folder) in os.environ.get(_GPU_VARIABLE, ""):
            launched, notes = launches.read(folder)
            kernels = (*outcome.kernels, *launched)
            notes = notes if kernels else (launches.NO_KERNEL,)
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
