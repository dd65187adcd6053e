"""Confines the present process, on Linux with Landlock, to what a cell of the user's function needs.

It may write in its own folders alone, and read what it was installed with: no run directory, no reference, no file of
another cell. It reaches no TCP port and sends no signal to a process that it did not start. All that it starts is
confined with it, for good. See landlock(7).
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # system calls, the same on every architecture
_PATH_BENEATH, _VERSION, _NO_NEW_PRIVILEGES, _ADOPT_ORPHANS, _AT_END_OF_PARENT = 1, 1, 38, 36, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_TRUNCATE = 1 << 14
# Rights over files by the version of Landlock that knows them; that over devices' ioctl is left to whoever opens one.
_FILES = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1}
_NETWORK_SINCE, _SCOPE_SINCE = 4, 6
_TCP, _SCOPES = 3, 3
END_OF_WRITABLE = "--"  # between folders and files in the command line of a confined process


def confine(writable: Iterable[Path], readable: Iterable[Path]) -> bool:
    """Confine this process to writing in ``writable`` and reading ``readable``; False where the system cannot.

    Only the thread that calls is confined, and what it starts from then on.
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)  # what it starts stays below it in the table of processes, and counts
    libc.prctl(_AT_END_OF_PARENT, signal.SIGCONT, 0, 0, 0)  # who is stopped then would never see that its stdin ended
    version = libc.syscall(_CREATE, None, ctypes.c_size_t(0), _VERSION)
    if version < 1:
        return False
    files = _FILES[min(version, max(_FILES))]
    fields = [files]
    fields += [_TCP] if version >= _NETWORK_SINCE else []
    fields += [_SCOPES] if version >= _SCOPE_SINCE else []
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    rules = libc.syscall(_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    if rules < 0:
        return False
    try:
        devices = _READ | _WRITE_FILE | _TRUNCATE
        allowed = dict.fromkeys(readable, _READ) | dict.fromkeys((Path("/proc"), Path("/dev")), devices)
        allowed |= dict.fromkeys(writable, files)
        for path, rights in allowed.items():
            _allow(libc, rules, path, rights & files)
        return libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0 and libc.syscall(_RESTRICT, rules, 0) == 0
    finally:
        os.close(rules)


def readable_beside(files: Iterable[Path]) -> list[Path]:
    """What a program is installed with, and the folders of ``files``; beside these no folder of temporary files."""
    temporary = Path(tempfile.gettempdir()).resolve()
    system = [path for path in Path("/").iterdir() if not temporary.is_relative_to(path.resolve())]
    installed = [sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), *sys.path]
    package = Path(__file__).resolve().parents[2]
    return [*system, *(Path(entry or ".") for entry in installed), package, *(file.resolve().parent for file in files)]


def _allow(libc: ctypes.CDLL, rules: int, path: Path, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # what is not there needs no right
    try:
        if not path.is_dir():
            rights &= _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
        libc.syscall(_ADD, rules, _PATH_BENEATH, struct.pack("=Qi", rights, place), 0)
    finally:
        os.close(place)
