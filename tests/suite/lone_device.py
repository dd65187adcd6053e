"""Put into the path as ``sitecustomize``: this CPU passes for a TPU, and admits one process as libtpu does.

``LONE_DEVICE`` is the file that a process locks when it touches the device; one that sees CPUs only does not. With
``dies`` in ``LONE_FAULTS`` the first process that compiles a program dies, with ``hangs`` the next one hangs, each
while it holds the lock.
"""

# ruff: noqa: PLC0415 (what touches no device imports no JAX)
import fcntl
import os
import sys
import time
from pathlib import Path

LOCK = Path(os.environ["LONE_DEVICE"])


def install():
    import jax
    from jax._src import xla_bridge

    from attnsuite.backends import devices
    from attnsuite.suite.measure import machine

    held = []
    made = xla_bridge.backends

    def backends():
        if not held:
            file = LOCK.open("a+")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                raise RuntimeError(f"The TPU is already in use by process with pid {file.read()}") from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            held.append(file)
            with Path(f"{LOCK}.log").open("a") as log:
                log.write(f"{os.getpid()}\n")
        return made()

    xla_bridge.backends = backends

    def here():
        jax.devices()
        return devices.Target("tpu", "v5e", 2**34, 1, present=True)

    devices.Target.here = staticmethod(here)
    # The process that measures the peaks touches the device all the same; ten seconds of measuring would be a CPU's.
    peak = dict.fromkeys(("float32", "bfloat16"), 1e11)
    machine.measure_machine = lambda: {"matmul_flops": peak, "copy_bytes_per_second": 1e10}


def fail_once(what, act):
    """Act when a program is first compiled, in the first process that comes to it."""
    mark = Path(f"{LOCK}.{what}")
    if what not in os.environ.get("LONE_FAULTS", "") or mark.exists():
        return

    from attnsuite.suite.measure import speed

    compile_program = speed.compile_program

    def compiled(*arguments, **given):
        if not mark.exists():
            mark.touch()
            act()
        return compile_program(*arguments, **given)

    speed.compile_program = compiled


if os.environ.get("JAX_PLATFORMS") != "cpu" and "attnsuite.suite.grid.worker" in " ".join(sys.orig_argv):
    install()
    fail_once("hangs", lambda: time.sleep(3600))
    fail_once("dies", lambda: os._exit(9))  # comes before the other, being put around it
