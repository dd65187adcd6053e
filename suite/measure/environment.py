"""The environment of a run, for later comparison: versions, device, flags, source, clock.

Of an NVIDIA GPU also the state that decides what a time means: clocks, power limit, ECC, MIG, driver, who else is
there. ``nvidia-smi`` is asked, and what it does not say is left out. A TPU says none of it; its libtpu is among the
versions, and refuses a second process itself.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import psutil

import attnsuite
from attnsuite.backends import Target
from attnsuite.backends.devices import cpu_name, usable_cores
from attnsuite.backends.registry import ENTRY_POINT_GROUP

from ..record import Environment
from ..typed import Scalar
from .memory import machine_bytes

DISTRIBUTION = "attnsuite"
_ROOMS = ("backends", "models", "suite", "testing")
_COMPILERS = ("libtpu", "jax-cuda12-plugin")
PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "numpy",
    "scipy",
    "optax",
    "orbax-checkpoint",
    "triton",
    "kvax",
    "jax-triton",
    "llvmlite",
    *_COMPILERS,
    "torch",
    "transformers",
    "tokamax",
)
_FLAGS = (
    "XLA_FLAGS",
    "JAX_DEFAULT_MATMUL_PRECISION",
    "JAX_PLATFORMS",
    "JAX_ENABLE_X64",
    "LIBTPU_INIT_ARGS",
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "ATTNSUITE_POLICY",
)
_GIT_SECONDS = 10.0
# Of nvidia-smi, each with its name here.
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
_ANSWER_SECONDS = 20.0
_IDLE = 10  # percent of the last second with a kernel, up to which nobody computes


def describe() -> Environment:
    """The environment of this process, as JSON (initialises JAX)."""
    target = Target.here()
    found: Environment = {
        "versions": versions(),
        "source": source_digest(),
        "git_revision": git_revision(),
        "target": str(target),
        "device_kind": jax.devices()[0].device_kind,
        "device_count": target.count,
        "device_memory": target.memory_bytes,
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "machine_memory": machine_bytes(),
        "flags": flags(),
        "clock": _clock(),
    }
    if target.platform == "cuda":
        found["accelerator"] = nvidia_state()
    return found


def versions() -> dict[str, str]:
    """Versions of Python, of this package, of the computing libraries, and of every package that brings a backend."""
    found = {"python": platform.python_version()}
    for name in (DISTRIBUTION, *PACKAGES):
        if (version := _version(name)) is not None:
            found[name] = version
    for entry in metadata.entry_points(group=ENTRY_POINT_GROUP):
        if entry.dist is not None:
            found[entry.dist.name] = entry.dist.version
    return found


def flags() -> dict[str, str]:
    """The environment variables that change what is computed, as far as they are set."""
    return {name: os.environ[name] for name in _FLAGS if name in os.environ}


def source_digest() -> str:
    """Digest of this project's Python files and tuned options, which two trees of one version may differ in."""
    digest = hashlib.sha256()
    package = Path(attnsuite.__file__).parent
    rooms = [path for room in _ROOMS for path in (package / room).rglob("*.py")]
    for path in sorted([*package.glob("*.py"), *rooms, *package.glob("backends/*.json")]):
        digest.update(str(path.relative_to(package)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def git_revision() -> str | None:
    """Revision of the checkout that this code runs from, ``+changes`` where it was edited; None outside a checkout."""
    here = Path(__file__).parent
    if _git(here, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    revision = _git(here, "rev-parse", "HEAD")
    changed = _git(here, "status", "--porcelain", "--untracked-files=no")
    return None if revision is None else revision + ("+changes" if changed else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(  # noqa: S603 (fixed arguments)
            ["git", "--no-optional-locks", "-C", str(folder), *arguments],  # noqa: S607 (git as the user has it)
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _clock() -> dict[str, Any]:
    frequency = psutil.cpu_freq() if hasattr(psutil, "cpu_freq") else None
    info = time.get_clock_info("perf_counter")
    return {
        "cpu_mhz": round(frequency.current, 1) if frequency else None,
        "timer": info.implementation,
        "timer_resolution": info.resolution,
        "byte_order": sys.byteorder,
    }


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
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return done.stdout if done.returncode == 0 else None
