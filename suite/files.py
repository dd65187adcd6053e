"""Writing results: a file is written whole or not at all, and long work checks at its start that it can write.

An error of the system becomes an InputError: one sentence with the path.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import InputError


@contextlib.contextmanager
def writing(path: Path, note: str = "") -> Iterator[None]:
    """Inside this context an OSError becomes an InputError about ``path``; ``note`` is added to its sentence."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write to {path}: {error.strerror or error}.{note}") from error


def open_here(path: str | Path, flags: int) -> int:
    """An ``opener`` that follows no link in the last place: a directory may be somebody else's data."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def write_text(path: Path, text: str) -> None:
    """Write a text in UTF-8, as :func:`write_bytes`. Raises InputError."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file beside ``path`` and rename it, so that a full disk leaves the old file. Raises InputError.

    A link in the place of ``path`` is replaced, and what it leads to is left alone.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    with writing(path):
        try:
            with open(partial, "xb", opener=open_here) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write an object as JSON with sorted keys, as :func:`write_text`. Raises InputError."""
    write_text(path, json.dumps(data, indent=1, sort_keys=True) + "\n")


def check_directory(directory: Path) -> None:
    """Make the directory, and check that a file can be written into it. Raises InputError."""
    if (directory.is_symlink() or directory.exists()) and not directory.is_dir():
        raise InputError(f"{directory} is no directory; give the path of one, which may be new.")
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"\n")


def check_file(path: Path) -> None:
    """Check that the file can be written; its directory must exist. Raises InputError."""
    if not path.parent.is_dir():
        raise InputError(f"--out {path}: the directory {path.parent} does not exist; make it first.")
    if path.is_dir():
        raise InputError(f"--out {path} is a directory; give the path of a file.")
    check_directory(path.parent)
