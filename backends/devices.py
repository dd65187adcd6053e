"""What is here, and what we compute for.

A :class:`Target` names a kind of device: the one in this machine (``Target.here()``), or one that is not
(``Target("cuda", "h100")``). Support is judged against a target, never against whichever device JAX
happens to default to. Memory sizes of the named targets are the vendors' published figures.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import platform as host
import re
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import psutil

Platform = Literal["cpu", "cuda", "tpu", "rocm"]

GIB = 2**30
# kind -> (platform, bytes of device memory, CUDA compute capability). TPU memory is per chip's core as JAX sees it.
KNOWN_KINDS: dict[str, tuple[Platform, int, tuple[int, int] | None]] = {
    "a100": ("cuda", 80 * GIB, (8, 0)),
    "h100": ("cuda", 80 * GIB, (9, 0)),
    "h200": ("cuda", 140 * GIB, (9, 0)),
    "b200": ("cuda", 180 * GIB, (10, 0)),
    "v4": ("tpu", 32 * GIB, None),
    "v5e": ("tpu", 16 * GIB, None),
    "v5p": ("tpu", 95 * GIB, None),
    "v6e": ("tpu", 32 * GIB, None),
    "tpu7x": ("tpu", 96 * GIB, None),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """A kind of device to compute for. ``present`` says whether it is the one in this machine.

    >>> Target("cuda", "h100").compute_capability
    (9, 0)
    """

    platform: Platform
    kind: str = ""
    memory_bytes: int | None = None
    count: int = 1
    compute_capability: tuple[int, int] | None = None
    present: bool = False
    topology: str = ""  # chips of a TPU slice, such as 4x4; then count is their number

    def __post_init__(self) -> None:
        if self.platform not in get_args(Platform):
            raise ValueError(f"platform={self.platform!r} is not known; use one of {', '.join(get_args(Platform))}.")
        known = KNOWN_KINDS.get(self.kind)
        if known is None:
            return
        if known[0] != self.platform:
            raise ValueError(f"{self.kind} is a {known[0]} device, not a {self.platform} device.")
        if self.memory_bytes is None:
            object.__setattr__(self, "memory_bytes", known[1])
        if self.compute_capability is None:
            object.__setattr__(self, "compute_capability", known[2])

    @staticmethod
    def here() -> Target:
        """The default device of this process (initialises JAX's backend)."""
        device = getattr(jax.config, "jax_default_device", None) or jax.devices()[0]
        if isinstance(device, str):
            device = jax.devices(device)[0]
        platform = _platform(device)
        count = len([d for d in jax.devices() if d.platform == device.platform])
        if platform == "cpu":
            return Target("cpu", cpu_name(), psutil.virtual_memory().total, count, present=True)
        return Target(
            platform,
            _short_kind(device.device_kind),
            _device_memory(device),
            count,
            _compute_capability(device),
            present=True,
        )

    @staticmethod
    def named(name: str) -> Target:
        """The target of a short name: ``here``, ``cpu``, one of :data:`KNOWN_KINDS`, or a TPU slice.

        >>> Target.named("v5e:4x4").count
        16
        """
        if name == "here":
            return Target.here()
        if name == "cpu":
            return Target("cpu", cpu_name(), psutil.virtual_memory().total, present=True)
        kind, _, topology = name.partition(":")
        if kind not in KNOWN_KINDS:
            raise ValueError(f"target {name!r} is not known; use here, cpu, or one of {', '.join(KNOWN_KINDS)}.")
        if ":" not in name:
            return Target(KNOWN_KINDS[kind][0], kind)
        if KNOWN_KINDS[kind][0] != "tpu" or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", topology):
            raise ValueError(
                f"target {name!r} is not a TPU slice; give a TPU's name and the chips along each side, such as v5e:4x4 "
                "or v5p:2x2x4."
            )
        return Target("tpu", kind, count=math.prod(map(int, topology.split("x"))), topology=topology)

    @property
    def name(self) -> str:
        """What :meth:`named` makes it from, where its kind is one of :data:`KNOWN_KINDS`."""
        return f"{self.kind}:{self.topology}" if self.topology else self.kind

    def __str__(self) -> str:
        return f"{self.platform}:{self.name}" if self.kind else self.platform


@functools.cache
def cpu_name() -> str:
    """The processor's own name for itself, or its architecture where it has none."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return host.processor() or host.machine()


def usable_cores() -> int:
    """CPU cores that this process may use (a container or ``taskset`` may allow fewer than the machine has)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def _platform(device: Any) -> Any:
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


def _short_kind(device_kind: str) -> str:
    """JAX's device_kind as a key of KNOWN_KINDS where it is one, else unchanged."""
    lowered = device_kind.lower()
    aliases = {"v5 lite": "v5e", "v5litepod": "v5e", "v6 lite": "v6e", "tpu v5": "v5p"}
    for kind in KNOWN_KINDS:
        if kind in lowered:
            return kind
    return next((kind for alias, kind in aliases.items() if alias in lowered), device_kind)


def _device_memory(device: Any) -> int | None:
    stats = device.memory_stats()
    return None if stats is None else stats.get("bytes_limit")


def _compute_capability(device: Any) -> tuple[int, int] | None:
    text = getattr(device, "compute_capability", None)
    if not isinstance(text, str):
        return None
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)
