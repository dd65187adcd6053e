"""A Python process of its own, which has other environment variables or may end."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def python(
    *words: object, folder: Path | None = None, first: Path | None = None, limit: float | None = 550, **environment: str
) -> subprocess.CompletedProcess[str]:
    """What Python wrote in ``folder``, and its exit code. It imports what this process does, and from ``first``.

    It may take ``limit`` seconds.
    """
    path = os.pathsep.join(str(entry) for entry in (first, *sys.path) if entry)
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"} | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )


def run(script: str, *words: object, **how: Any) -> subprocess.CompletedProcess[str]:
    """The same of a script and its arguments."""
    return python("-c", script, *words, **how)


def printed(script: str, *words: object, **how: Any) -> str:
    """What a script wrote that ended well."""
    done = run(script, *words, **how)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
