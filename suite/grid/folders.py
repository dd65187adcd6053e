"""Temporary directories that go with the process that made them, or at the next start where it was killed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

import psutil

_NAME = re.compile(r"attnsuite-([0-9]+)-")


def make() -> tempfile.TemporaryDirectory[str]:
    """A new directory that only this user can open."""
    return tempfile.TemporaryDirectory(prefix=f"attnsuite-{os.getpid()}-")


def sweep() -> None:
    """Remove this user's directories whose processes are gone."""
    for path in Path(tempfile.gettempdir()).glob("attnsuite-*"):
        found = _NAME.match(path.name)
        if found is None or psutil.pid_exists(int(found[1])):
            continue
        with contextlib.suppress(FileNotFoundError):  # its process, or another that sweeps, has removed it meanwhile
            facts = path.lstat()
            if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid():
                shutil.rmtree(path, ignore_errors=True)
