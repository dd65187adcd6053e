"""The state of an NVIDIA GPU that decides what a time means: clocks, power limit, ECC, MIG, driver, who else is there.

``nvidia-smi`` is asked, and what it does not say is left out. A TPU says none of it; its libtpu is among the versions,
and refuses a second process itself.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence

from ..typed import Scalar

_FIELDS = {
    "driver_version": "driver",
    "clocks.sm": "sm_mhz",
    "clocks.max.sm": "max_sm_mhz",
    "clocks.mem": "memory_mhz",
    "power.limit": "power_limit_watts",
    "power.default_limit": "default_power_limit_watts",
    "ecc.mode.current": "ecc",
    "mig.mode.current": "mig",
    "persistence_mode": "persistence",
}
_SECONDS = 20.0
_IDLE = 10  # percent of the last second with a kernel, up to which nobody computes


def nvidia_state() -> dict[str, Scalar]:
    """The state of JAX's first GPU; empty where ``nvidia-smi`` is missing, fails or answers something else."""
    state = parse_state(_answer("--query-gpu=" + ",".join(_FIELDS)))
    processes = _answer("--query-compute-apps=pid")
    if state and processes is not None:
        state["compute_processes"] = len(processes.split())
    return state


def used_by_others() -> str | None:
    """Who computes on the GPU, in words, asked before this run does; None where nobody does, or nobody knows."""
    load = (_answer("--query-gpu=utilization.gpu") or "").strip()
    if processes := len((_answer("--query-compute-apps=pid") or "").split()):
        return f"{processes} other process{'es' if processes > 1 else ''}"
    return f"somebody else, {load}% of the time" if load.isdecimal() and int(load) > _IDLE else None


def parse_state(text: str | None) -> dict[str, Scalar]:
    """The state in the first line of CSV that ``nvidia-smi`` prints for :data:`_FIELDS`, without units.

    >>> parse_state("570.86.15, 1980, 1980, 2619, 700.00, 700.00, Enabled, Disabled, [N/A]")["power_limit_watts"]
    700.0
    """
    values = [value.strip() for value in (text or "").splitlines()[0].split(",")] if text else []
    if len(values) != len(_FIELDS):
        return {}
    named = zip(_FIELDS.values(), values, strict=True)
    return {name: _scalar(name, value) for name, value in named if value and not value.startswith("[")}


def _scalar(name: str, value: str) -> Scalar:
    number = name.endswith(("_mhz", "_watts")) and re.fullmatch(r"\d{1,9}(?:\.\d{1,9})?", value)
    return float(value) if number else value[:40]


def _answer(*query: str) -> str | None:
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0] or "0"
    command: Sequence[str] = ("nvidia-smi", *query, "--format=csv,noheader,nounits", f"--id={first}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return done.stdout if done.returncode == 0 else None
