"""Native attention kernels for CPUs, emitted from Python by llvmlite; ``docs/explanation/cpu.md`` explains them."""

from __future__ import annotations

import importlib.util
import platform

if importlib.util.find_spec("llvmlite") is None:
    raise ImportError(
        f"llvmlite, which compiles its kernels, is not installed on this {platform.system()} {platform.machine()}; "
        "it comes with this package on Linux (x86_64, aarch64) and macOS (arm64)"
    )

from .backend import FLASH_CPU as FLASH_CPU
