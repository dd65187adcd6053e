"""Object files on disk, so that a kernel is compiled once per machine and not once per process.

Each file begins with a line that holds its key and the digest of the object code behind it. The key covers everything
that the code depends on, so a file for another processor, llvmlite, jaxlib or generator is never read. A damaged or
foreign file is treated as absent and written anew. Writing is atomic (a file of its own, then a rename).

The files are code that this process runs. So neither a directory nor a file is used that belongs to somebody else, or
that others may write: the digest only finds damage, since whoever writes a file can write its digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import warnings
from pathlib import Path

from attnsuite.cache_directory import cache_directory

_NOT_OURS = (
    "flash_cpu does not use its cache {place}, which another user owns or may write: each process compiles its kernels "
    "anew. Run chmod 700 on it if it is yours, or set XDG_CACHE_HOME to a directory of your own."
)
MAGIC = b"attention-suite flash_cpu object 1"


def directory() -> Path:
    """Where the object files are."""
    return cache_directory("flash_cpu")


def read(key: str) -> bytes | None:
    """The object file of ``key``; None if there is none that is whole and made for this key."""
    try:
        with (directory() / f"{key}.o").open("rb") as file:
            if not (_is_ours(directory().stat()) and _is_ours(os.fstat(file.fileno()))):
                return None
            data = file.read()
    except OSError:
        return None
    header, separator, content = data.partition(b"\n")
    return content if separator and header == _header(key, content) else None


def write(key: str, content: bytes) -> None:
    """Keep an object file, for the user alone; nothing is kept if the directory cannot be written or trusted."""
    with contextlib.suppress(OSError):
        place = directory()
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _is_ours(place.stat()):
            warnings.warn(_NOT_OURS.format(place=place), RuntimeWarning, stacklevel=2)
            return
        handle, temporary = tempfile.mkstemp(dir=place, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_header(key, content) + b"\n" + content)
            Path(temporary).replace(place / f"{key}.o")
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def _is_ours(status: os.stat_result) -> bool:
    """Whether a file or directory belongs to this user, and nobody else may write it."""
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _header(key: str, content: bytes) -> bytes:
    return b" ".join((MAGIC, key.encode(), hashlib.sha256(content).hexdigest().encode()))
