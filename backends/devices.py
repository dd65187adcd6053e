"""The device in this machine, and the devices to compute for.

A :class:`Target` names a kind of device: the one in this machine (``Target.here()``), or an absent one
(``Target("cuda", "h100")``). Support is judged against a target, not against JAX's default device. The figures of
named targets are the vendors' published ones.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import platform as host
import re
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import jax
import psutil

Platform = Literal["cpu", "cuda", "tpu", "rocm"]

GIB, MIB, KIB = 2**30, 2**20, 2**10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tpu:
    """A generation of TPUs. ``memory_bytes`` is per chip's core as JAX sees it."""

    memory_bytes: int
    smallest_slice: str  # chips along each side, of the smallest slice that its compiler takes
    # Bytes of a core's vector memory that the compiler grants one kernel unless told otherwise ("limit 16.00M").
    kernel_memory: int
    platform: ClassVar[Platform] = "tpu"
    compute_capability: ClassVar[None] = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NvidiaGpu:
    """A GPU. Sizes in bytes, bandwidth in bytes per second, clock in GHz."""

    memory_bytes: int
    compute_capability: tuple[int, int]
    name: str
    cores: int
    float_units: int  # per core
    shared_memory: int  # per core; a thread block may have all of it but 1 KiB
    bandwidth: int
    l2_cache: int
    clock: float
    platform: ClassVar[Platform] = "cuda"


# All that is known of a device that may not be here: a new one is one row.
KNOWN_KINDS: dict[str, Tpu | NvidiaGpu] = {
    "a100": NvidiaGpu(
        memory_bytes=80 * GIB, compute_capability=(8, 0), name="NVIDIA A100-SXM4-80GB", cores=108, float_units=64,
        shared_memory=164 * KIB, bandwidth=2039 * 10**9, l2_cache=40 * MIB, clock=1.41,
    ),
    "h100": NvidiaGpu(
        memory_bytes=80 * GIB, compute_capability=(9, 0), name="NVIDIA H100 80GB HBM3", cores=132, float_units=128,
        shared_memory=228 * KIB, bandwidth=3352 * 10**9, l2_cache=50 * MIB, clock=1.98,
    ),
    "h200": NvidiaGpu(
        memory_bytes=140 * GIB, compute_capability=(9, 0), name="NVIDIA H200", cores=132, float_units=128,
        shared_memory=228 * KIB, bandwidth=4800 * 10**9, l2_cache=50 * MIB, clock=1.98,
    ),
    "b200": NvidiaGpu(
        memory_bytes=180 * GIB, compute_capability=(10, 0), name="NVIDIA B200", cores=148, float_units=128,
        shared_memory=228 * KIB, bandwidth=7672 * 10**9, l2_cache=126 * MIB, clock=1.965,
    ),
    "v4": Tpu(memory_bytes=32 * GIB, smallest_slice="2x2x1", kernel_memory=16 * MIB),
    "v5e": Tpu(memory_bytes=16 * GIB, smallest_slice="2x2", kernel_memory=16 * MIB),
    "v5p": Tpu(memory_bytes=95 * GIB, smallest_slice="2x2x1", kernel_memory=16 * MIB),
    "v6e": Tpu(memory_bytes=32 * GIB, smallest_slice="2x2", kernel_memory=32 * MIB),
    "tpu7x": Tpu(memory_bytes=96 * GIB, smallest_slice="2x2x1", kernel_memory=32 * MIB),
}  # fmt: skip
TPUS = {kind: known for kind, known in KNOWN_KINDS.items() if isinstance(known, Tpu)}
NVIDIA_GPUS = {kind: known for kind, known in KNOWN_KINDS.items() if isinstance(known, NvidiaGpu)}
# Shared memory of a thread block by compute capability (CUDA programming guide, technical specifications).
SHARED_LIMITS = {known.compute_capability: known.shared_memory - KIB for known in NVIDIA_GPUS.values()}


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
        if known.platform != self.platform:
            raise ValueError(f"{self.kind} is a {known.platform} device, not a {self.platform} device.")
        if self.memory_bytes is None:
            object.__setattr__(self, "memory_bytes", known.memory_bytes)
        if self.compute_capability is None:
            object.__setattr__(self, "compute_capability", known.compute_capability)

    @staticmethod
    def here() -> Target:
        """The default device of this process (initialises JAX's backend)."""
        device = getattr(jax.config, "jax_default_device", None) or jax.devices()[0]
        if isinstance(device, str):
            device = jax.devices(device)[0]
        platform: Any = device.platform
        if platform == "gpu":
            platform = "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
        count = len([d for d in jax.devices() if d.platform == device.platform])
        if platform == "cpu":
            return Target("cpu", cpu_name(), psutil.virtual_memory().total, count, present=True)
        return Target(
            platform,
            _short_kind(device.device_kind),
            (device.memory_stats() or {}).get("bytes_limit"),
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
            return Target(KNOWN_KINDS[kind].platform, kind)
        if kind not in TPUS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", topology):
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
    """The processor's name for itself, or its architecture if it has none."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return host.processor() or host.machine()


def usable_cores() -> int:
    """CPU cores that this process may use (a container or ``taskset`` may allow fewer than the machine has)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def _short_kind(device_kind: str) -> str:
    """JAX's device_kind as a key of KNOWN_KINDS where it is one, else unchanged."""
    lowered = device_kind.lower()
    aliases = {"v5 lite": "v5e", "v5litepod": "v5e", "v6 lite": "v6e", "tpu v5": "v5p"}
    for kind in KNOWN_KINDS:
        if re.search(rf"\b{kind}", lowered):  # a GH200 is no H200
            return kind
    return next((kind for alias, kind in aliases.items() if alias in lowered), device_kind)


def _compute_capability(device: Any) -> tuple[int, int] | None:
    text = getattr(device, "compute_capability", None)
    if not isinstance(text, str):
        return None
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)
