"""Native attention kernels for CPUs, emitted from Python. Needs llvmlite; ``docs/cpu.md`` explains the method."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("llvmlite") is None:
    raise ImportError("llvmlite compiles its kernels and is not installed: pip install 'attnsuite[cpu]'")

from .backend import FLASH_CPU as FLASH_CPU
