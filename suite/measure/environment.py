"""The environment of a run, for later comparison: versions, device, flags, source, clock."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import time
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
from .accelerator import nvidia_state
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
