"""The rules for what may be shown of a record, shared by tables and terminal.

- An interpreted cell shows accuracy only, a compiled one memory only.
- A cell whose numbers are wrong shows neither speed nor memory. A peer (an implementation outside this project) shows
  its time all the same, and its name says that its numbers are outside the bound.
- A fallback is labelled with the name of the backend that ran.
- A time is the device's own where its profile tells it (on an accelerator), else that of the samples.
- A ratio is to the baseline of the case's kind (``standard`` in most) in the same rounds. Times of profiles have no
  rounds; there it is the ratio of the medians.
- A share of the machine's peak is of the peak in the case's own dtype.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from .kinds import kind_of
from .peers import PEERS
from .record import Record, Schedule
from .statistics import Interval, median, paired_ratio, unpaired_ratio

STANDARD = "standard"
_SHORTEST = 1e-12  # seconds of a call: a ratio of two times stays finite


@dataclasses.dataclass(frozen=True, slots=True)
class Speed:
    """Speed from the samples of one cell; times are seconds, rates per second."""

    median: Interval
    ratio: Interval | None  # to the baseline, paired by round; None without its cell
    flops_rate: float | None
    peak_share: float | None  # of the matmul rate measured on this machine in the case's dtype
    tokens_rate: float | None
    step: Interval | None  # seconds of one pass of a model: time to the first token, or for each more
    read_share: float | None = None  # of the read bandwidth measured on this machine, by the bytes that must be read
    in_flight: Interval | None = None  # by the samples, where the median is the device's own time
    cached: Interval | None = None  # with the inputs in a GPU's L2 cache

    @property
    def samples(self) -> int:
        """How many samples the median is of."""
        return self.median.count

    @property
    def beside_device(self) -> float:
        """How much longer calls in flight take than the device computes, as a share of its time; 0 where one is known.

        The host starts calls slower than the device computes them, or its kernels have gaps.
        """
        return self.in_flight.value / self.median.value - 1 if self.in_flight else 0.0


def label(record: Record) -> str:
    """The backend that ran, the one asked for if it differs, and several devices: ``chunked (for kvax), 2 devices``.

    A cell in which nothing ran has the name that was asked for.
    """
    name = f"{record.requested} (numbers outside the bound)" if is_peer_outside(record) else record.requested
    if record.resolved not in (None, record.requested):
        name = f"{record.resolved} (for {record.requested})"
    return name if record.devices == 1 else f"{name}, {record.devices} devices"


def is_trusted(record: Record) -> bool:
    """Whether the cell ran and none of its tensors failed the oracle."""
    judged = record.exact is not False
    return record.status == "ok" and not (judged and any(not error.passed for error in record.accuracy.values()))


def is_peer_outside(record: Record) -> bool:
    """Whether the cell is a peer's that was timed with numbers outside the judge's bound."""
    return record.requested in PEERS and record.status == "wrong" and len(record.samples) > 0


def shows_speed(record: Record) -> bool:
    """Whether the samples are times of the real kernel on the real device, with right numbers or a peer's."""
    return (
        (is_trusted(record) or is_peer_outside(record))
        and record.mode in ("native", "fallback")
        and len(record.samples) > 0
        and all(math.isfinite(time) and time >= _SHORTEST for time in (*record.samples, *record.device_seconds))
    )


def same_rounds(first: Record, second: Record) -> bool:
    """Whether sample i of both was taken in the same round. A resumed run starts new rounds."""
    return first.environment.get("session") == second.environment.get("session")


def shows_memory(record: Record) -> bool:
    """Whether the sizes are those of the real kernel, run here or compiled for another device."""
    return is_trusted(record) and record.mode in ("native", "fallback", "compile")


def standard_of(records: Sequence[Record]) -> Record | None:
    """The baseline of a case: the cell of its kind's baseline, asked for by that name, with right numbers."""
    for mode in ("native", "compile"):
        for record in records:
            named = record.requested == record.resolved == kind_of(record.kind).baseline
            if named and record.mode == mode and is_trusted(record):
                return record
    return None


def same_problem(one: Record, other: Record) -> bool:
    """Whether no field that both problems have differs: a name may have meant another problem in an earlier run."""
    return all(one.problem[name] == other.problem[name] for name in one.problem.keys() & other.problem.keys())


def baseline_of(kinds: Iterable[str]) -> str:
    """The row that times of these kinds of case are relative to; ``baseline`` where the kinds have several."""
    names = {kind_of(kind).baseline for kind in kinds}
    return names.pop() if len(names) == 1 else "baseline"


def speed_of(record: Record, standard: Record | None) -> Speed | None:
    """The speed of a cell; None where no speed may be shown. ``standard`` is :func:`standard_of` the case."""
    if not shows_speed(record):
        return None
    typical = median(times_of(record))
    comparable = standard is not None and standard is not record and shows_speed(standard)
    rate = _over(record.flops, typical.value)
    machine, moved = record.environment.get("machine", {}), _over(record.bytes_moved, typical.value)
    return Speed(
        median=typical,
        ratio=ratio_of(record, standard) if standard and comparable and same_rounds(record, standard) else None,
        flops_rate=rate,
        peak_share=_over(rate, matmul_peak(record)),
        tokens_rate=_over(record.tokens, typical.value),
        step=median([time / record.steps for time in times_of(record)]) if record.steps else None,
        read_share=_over(moved, _rate(machine.get("read_bytes_per_second"))),
        in_flight=median(record.samples) if record.device_seconds else None,
        cached=median(record.cached_seconds) if record.cached_seconds else None,
    )


def times_of(record: Record) -> tuple[float, ...]:
    """Seconds per call: the device's own where its profile told them, else the samples."""
    return record.device_seconds or record.samples


def ratio_of(record: Record, baseline: Record) -> Interval | None:
    """The time of a record relative to another of the same session; None where no round holds both."""
    if record.device_seconds and baseline.device_seconds:
        return unpaired_ratio(record.device_seconds, baseline.device_seconds)
    return paired_ratio(record.samples, baseline.samples)


def matmul_peak(record: Record) -> float | None:
    """FLOP/s of this machine's measured matmul in the dtype of the case."""
    rates = record.environment.get("machine", {}).get("matmul_flops", {})
    return _rate(rates.get(str(record.problem.get("dtype"))))


def _rate(rate: float | None) -> float | None:
    return rate if rate is not None and rate > 0 else None


def temp_ratio(record: Record, standard: Record | None) -> float | None:
    """Compiled temporary memory relative to the standard backend's; None unless both are known."""
    if standard is None or record is standard or not (shows_memory(record) and shows_memory(standard)):
        return None
    return _over(record.memory.get("compiled_temp"), standard.memory.get("compiled_temp"))


def program_bytes(record: Record) -> int | None:
    """Bytes that the program takes while it runs: arguments, outputs and temporaries; None unless all are known."""
    sizes = [record.memory.get(f"compiled_{part}") for part in ("argument", "output", "temp")]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _over(above: float | None, below: float | None) -> float | None:
    if above is None or not below:
        return None
    quotient = above / below
    return quotient if math.isfinite(quotient) else None


def scheduled_bundles(schedules: Sequence[Schedule]) -> int | None:
    """Bundles of a step times steps of the grid, of all kernels together; None without schedules, or without a grid."""
    products = [None if each.grid_steps is None else each.step_bundles * each.grid_steps for each in schedules]
    return None if not products or None in products else sum(filter(None, products))
