"""A script in a Python process of its own, which has other environment variables or may end."""

import os
import subprocess
import sys


def run(script: str, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """What the script wrote, and its exit code. ``words`` are its arguments; its imports are those of this process."""
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, words)],
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def printed(script: str, *words: object, **environment: str) -> str:
    """What a script wrote that ended well."""
    done = run(script, *words, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
