"""Kernels as FFI targets of this process: compiled or read from the cache, then loaded and registered once each.

A kernel depends on its arguments alone, so these functions cache pure results. XLA keeps registered kernels for the
life of the process in any case.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import re
import threading
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from . import backward, compiler, decode, forward, handler, object_cache, sparse, sparse_backward
from .compiler import Processor
from .handler import API_MAJOR, State
from .isa import Isa

# Modules with ``signature(isa, kernel)`` and ``phases(module, isa, kernel, state)``.
KINDS: dict[str, Any] = {
    "forward": forward,
    "backward": backward,
    "decode": decode,
    "sparse": sparse,
    "sparse_backward": sparse_backward,
}

_LOCK = threading.Lock()  # two threads that ask for one kernel must not register its name twice


@dataclasses.dataclass(frozen=True, slots=True)
class Registered:
    """A registered kernel, which keeps its code loaded."""

    name: str
    code: Any


def target(kind: str, kernel: Any, isa: Isa) -> Registered:
    """The FFI target of a kernel of one of :data:`KINDS`."""
    with _LOCK:
        return _target(kind, kernel, isa)


@functools.cache
def _target(kind: str, kernel: Any, isa: Isa) -> Registered:
    key = cache_key(kind, kernel, isa, Processor.here())
    code = None
    if (cached := object_cache.read(key)) is not None:
        with contextlib.suppress(RuntimeError):  # whole, but not an object file that this llvmlite loads
            code = compiler.load(cached)
    if code is None:
        content = compiler.compile_object(functools.partial(build, kind, kernel), Processor.here(), isa)
        object_cache.write(key, content)
        code = compiler.load(content)
    function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(code.get_function_address("handler"))
    name = f"attention_suite_flash_cpu_{key[:24]}"
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform="cpu")
    return Registered(name, code)


def build(kind: str, kernel: Any, module: Any, isa: Isa) -> None:
    """Fill a module with a kernel and its handler."""
    signature = KINDS[kind].signature(isa, kernel)
    state = State.of(signature)
    handler.emit(module, signature, state, KINDS[kind].phases(module, isa, kernel, state))


def cache_key(kind: str, kernel: Any, isa: Isa, processor: Processor) -> str:
    """A digest of everything that the object code depends on."""
    versions = (metadata.version("llvmlite"), metadata.version("jaxlib"), generator_digest())
    parts = kind, repr(kernel), isa.name, processor.triple, processor.cpu, processor.feature_text(isa), *versions
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@functools.cache
def generator_digest() -> str:
    """The digest of this folder's sources: the version of the generator."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()


def api_version() -> tuple[int, int]:
    """The version of XLA's FFI that this jaxlib has, from the header that it ships. Raises RuntimeError without one."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    text = header.read_text(encoding="utf-8", errors="replace") if header.is_file() else ""
    found = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    if found[0] is None or found[1] is None:
        raise RuntimeError(f"jaxlib {metadata.version('jaxlib')} ships no version of its FFI in {header}.")
    return int(found[0][1]), int(found[1][1])


def check_api(version: tuple[int, int]) -> None:
    """Raise RuntimeError where the offsets in ``handler.py`` do not hold."""
    if version[0] != API_MAJOR:
        raise RuntimeError(
            f"XLA's FFI here has version {version[0]}.{version[1]}; the kernels know version {API_MAJOR}, "
            "use backend='chunked' or another jaxlib."
        )
