"""The threads of XLA's pool, one per processor while a cell is timed.

Between its samples a cell pauses while the others take theirs. After a pause Linux may wake two threads on one
processor and leave both there while the other processor idles: a call of ``chunked`` then takes up to 1.9 times as
long, for some samples, for a whole run, or never (method.md of the docs has the figures). A program that calls
attention without pausing does not see this.
"""

from __future__ import annotations

import os
from pathlib import Path

_POOL = "tf_XLAEigen"  # the name that Linux shows of these threads, in jaxlib 0.10 to 0.12
_THREADS = Path("/proc/self/task")


def bind(processors: int) -> None:
    """Bind this process to so many processors, where the system can; before JAX makes its threads."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:processors])


def pin_pool() -> int | None:
    """Keep each thread of XLA's CPU pool on a processor of its own, from now on; returns how many there are.

    Returns None, and moves nothing, where the system has no such call, where JAX has made no pool yet, and where the
    pool does not have one thread per processor that this process may use.
    """
    if not hasattr(os, "sched_setaffinity"):
        return None
    processors = sorted(os.sched_getaffinity(0))
    try:
        threads = sorted(int(path.parent.name) for path in _THREADS.glob("*/comm") if path.read_text().strip() == _POOL)
        if len(threads) != len(processors):
            return None
        for thread, processor in zip(threads, processors, strict=True):
            os.sched_setaffinity(thread, {processor})
    except OSError:
        return None
    return len(threads)
