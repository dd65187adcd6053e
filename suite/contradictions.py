"""Whether a record that others send contradicts itself: what was judged is restated, and times are held to limits.

- An exact cell that is ``ok`` has no tensor outside its bound. A ``wrong`` one has, unless it was held to the contract,
  which finds faults of other kinds too.
- The bound of an attention call follows from the standard backend's error (``backends/oracle.py``).
- The samples, all their calls counted, fit into the wall time of the cell.
- No exact cell is faster than its machine could be (``measure/plausible.py``), nor than the published peak of a known
  device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from attnsuite.backends import oracle

from .kinds import kind_of
from .measure import plausible
from .measure.tensor_errors import pass_of
from .record import Record, TensorError
from .reportable import shows_speed, times_of
from .statistics import median

# bfloat16 operations per second without sparsity, as the vendors publish them; per device as JAX counts devices.
PEAKS = {
    "v4": 275e12, "v5e": 197e12, "v5p": 459e12, "v6e": 918e12, "tpu7x": 1153.5e12, "a100": 312e12, "h100": 989.4e12,
    "h200": 989.4e12, "b200": 2250e12,
}  # fmt: skip
_ABOVE_PUBLISHED = 1.05


def contradictions(records: Sequence[Record]) -> Iterator[str]:
    """A sentence for each contradiction."""
    for record in records:
        for why in (*_judged(record), *_timed(record)):
            yield f"{record.key}: {why}."


def _judged(record: Record) -> Iterator[str]:
    for name, error in record.accuracy.items():
        if kind_of(record.kind).is_call and not _follows(record, name, error):
            yield f"the bound of {name} does not follow from the standard backend's error"
    if record.exact and record.accuracy:
        right = all(error.passed for error in record.accuracy.values())
        if record.status == "ok" and not right:
            yield "it is ok with a tensor outside its bound"
        if record.status == "wrong" and right and record.facts is None:
            yield "it is wrong with every tensor inside its bound"


def _follows(record: Record, name: str, error: TensorError) -> bool:
    dtype = str(record.problem.get("dtype"))
    if dtype not in oracle.EPSILON:
        return True
    bounds = [oracle.allowed_error(standard, dtype, pass_of(name)) for standard in (error.standard_error, None)]
    return any(math.isclose(error.allowed, bound, rel_tol=1e-6) for bound in bounds)


def _timed(record: Record) -> Iterator[str]:
    if not all(sample > 0 for sample in (*record.samples, *record.device_seconds, *record.cached_seconds)):
        yield "a time is not above zero"
    seconds = sum(record.samples) * record.environment.get("calls_per_sample", 1)
    seconds += sum(record.device_seconds) + sum(record.cached_seconds)
    if record.wall_seconds is not None and seconds > record.wall_seconds:
        yield f"its samples take {seconds:.3g} s and the whole cell {record.wall_seconds:.3g} s"
    if not (record.exact and record.flops and shows_speed(record)):
        return
    times, machine = times_of(record), record.environment.get("machine", {})
    if (why := plausible.floor(times, record, str(record.problem.get("dtype")), machine)) is not None:
        yield why.rstrip(".")
    rate, peak = record.flops / median(times).value, PEAKS.get(record.target.partition(":")[2])
    if peak is not None and rate > _ABOVE_PUBLISHED * peak * record.devices:
        yield f"it computes {rate / peak:.3g} times as fast as the device's published peak"
