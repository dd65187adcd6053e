"""Check whether the kernels work here: the processor, XLA's FFI, and a self-test in a process of its own.

The self-test compiles and runs one small problem, forward and backward, through XLA, and compares with NumPy. A kernel
that the processor or the system rejects may end its process. Therefore the first use on a machine runs the self-test in
another process. Its result is kept on disk under the key of the kernels.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys

from . import object_cache, targets
from .compiler import Processor
from .isa import Isa

_PASSED = b"passed"
_SECONDS = 120


@functools.cache
def why_not(name: str | None = None) -> str | None:
    """A sentence that says why the kernels do not run here; None where they do.

    ``name`` is that of an instruction set; by default the best of the processor.
    """
    try:
        here = Processor.here()
        if not here.isas():
            return (
                f"flash_cpu has kernels for AVX-512, AVX2 with FMA, and NEON; {here.cpu} has none of them; "
                "use backend='chunked'."
            )
        isa = here.isa(name)
        if isa is None:
            if any(isa.name == name for isa in here.isas()):
                return f"isa={name!r} is refused by the system, which keeps AMX's registers back; leave isa out."
            has = ", ".join(repr(isa.name) for isa in here.isas())
            return f"isa={name!r} is not supported by flash_cpu on {here.cpu} (accepted: {has}); leave isa out."
        targets.check_api(targets.api_version())
        return _self_test(isa)
    except (RuntimeError, OSError) as error:
        return f"flash_cpu does not work here ({error}); use backend='chunked'."


def _self_test(isa: Isa) -> str | None:
    key = targets.cache_key("self-test", "", isa, Processor.here())
    if object_cache.read(key) == _PASSED:
        return None
    failure = _run(isa)
    if failure is None:
        object_cache.write(key, _PASSED)
    return failure


def _run(isa: Isa) -> str | None:
    """Run the self-test; None, or a sentence with its last line."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "attnsuite.backends.flash_cpu.self_test", isa.name]
    try:
        done = subprocess.run(  # noqa: S603 (this interpreter and a module of this package)
            command, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"flash_cpu's self-test did not end within {_SECONDS} s on this machine; use backend='chunked'."
    if done.returncode == 0:
        return None
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    return f"flash_cpu's self-test failed on this machine (exit code {done.returncode}: {last}); use backend='chunked'."
