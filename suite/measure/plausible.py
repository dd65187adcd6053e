"""Times that cannot be: a clock that another process contradicts, and calls faster than the machine.

Both bounds are wide, for they are about lies and faults, and not about noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ..record import Machine, Measured

_SLOWER, _SECONDS = 1.5, 0.02  # of two clocks that see the same request: a factor, and seconds for each request
_FASTER = 2.0  # than the best product that XLA reached on this machine
_CACHED = 10.0  # a cache that holds all of it is read at most so much faster than memory


def clock(spent: float, waited: float, requests: int) -> str | None:
    """A sentence where ``waited`` seconds of this process are not those that the cell's own clock ``spent``."""
    if waited <= _SLOWER * spent + _SECONDS * requests:
        return None
    return f"its process says that its samples took {spent:.3g} s, and they took {waited:.3g} s."


def floor(samples: Sequence[float], measured: Measured, dtype: str, machine: Machine) -> str | None:
    """A sentence where the median of ``samples`` is less than the machine needs for the products or the bytes."""
    rates = machine.get("matmul_flops", {})
    bandwidth = machine.get("read_bytes_per_second")
    needed = 0.0
    if measured.flops and rates:
        needed = measured.flops / (_FASTER * rates.get(dtype, max(rates.values())))
    if measured.bytes_moved and bandwidth:
        needed = max(needed, measured.bytes_moved / (_CACHED * bandwidth))
    found = statistics.median(samples)
    if found >= needed:
        return None
    return f"{found * 1e3:.3g} ms a call, and this machine needs at least {needed * 1e3:.3g} ms for its arithmetic."
