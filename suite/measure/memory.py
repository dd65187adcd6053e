"""Memory by every method that the platform offers, each under its own name, in bytes.

``compiled_argument``, ``compiled_output`` and ``compiled_temp`` are the compiler's own sizes. XLA's peak is not used,
because on CPU it leaves out temporaries. ``process_high_water`` is the rise of the process during one execution, above
its size with the program compiled and the inputs made. ``device_peak`` is the allocator's statistic, where the device
keeps one; on a TPU, where the cells of a case share a process, by difference (:func:`by_difference`).
"""

from __future__ import annotations

import dataclasses
import resource
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import psutil

from .speed import wait

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"  # Linux, proc(5): resets the peak resident set size (VmHWM)


@dataclasses.dataclass(frozen=True, slots=True)
class Baseline:
    """Resident bytes before a run, and the method that reads the high-water mark above them."""

    resident: int
    method: str


def compiled_sizes(executable: Any, devices: int = 1) -> dict[str, int | None]:
    """The compiler's argument, output and temporary sizes, of all devices; None where the platform gives none."""
    analysis = executable.memory_analysis()  # of one device
    sizes = {name: getattr(analysis, f"{name}_size_in_bytes", None) for name in ("argument", "output", "temp")}
    return {f"compiled_{name}": None if size is None else size * devices for name, size in sizes.items()}


def mark_baseline() -> Baseline:
    """Start watching the process's high-water mark."""
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK, encoding="ascii")
    except OSError:
        return Baseline(_lifetime_peak(), "growth of getrusage ru_maxrss")
    return Baseline(psutil.Process().memory_info().rss, "VmHWM after a reset by /proc/self/clear_refs")


def high_water(baseline: Baseline) -> int:
    """The largest growth of the process above ``baseline``, in bytes."""
    peak = _status_peak() if baseline.method.startswith("VmHWM") else _lifetime_peak()
    return max(0, peak - baseline.resident)


def device_statistics() -> dict[str, int]:
    """What the device's allocator counts; empty where it keeps no statistics (CPU)."""
    return jax.devices()[0].memory_stats() or {}


def by_difference(sizes: Mapping[str, int | None], before: Mapping[str, int]) -> dict[str, int | None]:
    """``sizes`` of a cell in a process that other cells use too, whose device counted ``before`` when it began.

    The allocator keeps one peak for the process. Where it rose, ``device_peak`` is the rise above what the other cells
    held; where it did not, the cell's own peak is not known.
    """
    peak = sizes.get("device_peak")
    if peak is None:
        return dict(sizes)
    rose = peak > before.get("peak_bytes_in_use", 0)
    return {**sizes, "device_peak": peak - before.get("bytes_in_use", 0) if rose else None}


def measure(call: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, dict[str, int | None], str]:
    """Run once; returns the outputs, the memory by process and device, and the method of the process's figure."""
    baseline = mark_baseline()
    outputs = wait(call(*arguments))
    sizes = {"process_high_water": high_water(baseline), "device_peak": device_statistics().get("peak_bytes_in_use")}
    return outputs, sizes, baseline.method


def held_since(resident: int | None, arguments: tuple[Any, ...]) -> int:
    """Bytes by which the process is larger than ``resident``, less the arguments; 0 where that is not known."""
    if resident is None:
        return 0
    inputs = sum(x.nbytes for x in jax.tree.leaves(arguments))
    return psutil.Process().memory_info().rss - resident - inputs


def machine_bytes() -> int:
    """Memory of this machine, or the limit of the control group that this process is in."""
    total = psutil.virtual_memory().total
    limits = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
    for path in limits:
        text = path.read_text(encoding="ascii").strip() if path.is_file() else ""
        if text.isdigit():
            total = min(total, int(text))
    return total


def available_bytes() -> int:
    """Memory that a process can still get, with what may be swapped out; at most that of :func:`machine_bytes`."""
    return min(machine_bytes(), psutil.virtual_memory().available + psutil.swap_memory().free)


def _lifetime_peak() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _status_peak() -> int:
    for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return _lifetime_peak()
