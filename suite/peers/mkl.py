"""PyTorch with MKL's fast code on processors that are not Intel's.

The math library (MKL) asks one exported function whether the processor is Intel's, and takes slower code where it is
not. Preloading a library whose function answers yes shows the speed of the same binary without this check. It is used
for the measurement only, in a row of its own beside PyTorch as installed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_SOURCE = "int mkl_serv_intel_cpu_true(void) { return 1; }\n"
_NAME = "libintelcputrue.so"
_SECONDS = 60.0


def refusals(cpu: str) -> tuple[str, ...]:
    """Why there is no such row on this machine."""
    reasons = []
    if not sys.platform.startswith("linux"):
        reasons.append(f"a library is preloaded on Linux only, and this is {sys.platform}.")
    if "intel" in cpu.lower():
        reasons.append(f"the math library has no brake on {cpu}; the plain row is the honest one.")
    if shutil.which("cc") is None:
        reasons.append("no C compiler (cc) for the library of one line that is preloaded; install gcc or clang.")
    return tuple(reasons)


def environment(folder: Path) -> Mapping[str, str]:
    """Build the library in ``folder`` if it is not there, and the variable that preloads it."""
    library = folder / _NAME
    if not library.is_file():
        source = folder / "intelcputrue.c"
        source.write_text(_SOURCE, encoding="ascii")
        command = ["cc", "-shared", "-fPIC", "-o", str(library), str(source)]
        subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS)  # noqa: S603 (fixed arguments)
    return {"LD_PRELOAD": str(library)}
