"""A script in a Python process of its own, which has other environment variables or may end."""

import os
import subprocess
import sys


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What the script wrote, and its exit code."""
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
