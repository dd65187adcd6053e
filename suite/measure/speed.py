"""Time: lowering and compiling apart from running, and samples that wait for every output.

A sample is the mean seconds per call, over enough calls to last :data:`SAMPLE_SECONDS`; on an accelerator
``in_flight.py`` takes it. ``statistics.py`` evaluates samples. The clock, the function that waits and that which draws
are taken when this module is imported, which is before a function of the user is: what that function replaces later
measures nothing.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..statistics import FEWEST

SAMPLE_SECONDS = 0.02  # a shorter call is repeated until a sample lasts about this long
LONG_CALL = 0.2  # seconds: what a call finds in the caches is less than a hundredth of so long a time
_MAX_CALLS = 1000
_LOOK, _LONGEST_REST = 0.005, 1.0  # seconds
clock, used, wait, urandom = time.perf_counter, time.process_time, jax.block_until_ready, os.urandom
_FEWEST_SLOW = 2  # samples of a slow cell: they tell at least whether a call takes the same time again


@dataclasses.dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled program, and the seconds of lowering and compiling."""

    call: Any  # the executable: callable, and it knows its sizes
    lower_seconds: float | None = None  # None for another framework's function, which is not compiled
    compile_seconds: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """When a cell has enough samples: ``minimum`` of them, or at least ``floor`` that last ``seconds`` together.

    Of a cell so slow that fewer samples last ``patience`` seconds, two are enough; they have no interval.
    """

    minimum: int = 10
    seconds: float = 1.0
    floor: int = FEWEST
    patience: float = 60.0

    @classmethod
    def lasting(cls, seconds: float) -> Sampling:
        """Until the samples of a cell last ``seconds`` together, however many they are."""
        return cls(minimum=sys.maxsize, seconds=seconds, patience=max(cls().patience, seconds))

    def enough(self, samples: Sequence[float], calls: int = 1) -> bool:
        """Whether these samples (seconds per call, of ``calls`` calls each) are enough."""
        count, lasted = len(samples), sum(samples) * calls
        return (
            count >= self.minimum
            or (count >= self.floor and lasted >= self.seconds)
            or (count >= _FEWEST_SLOW and lasted >= self.patience)
        )


def compile_program(
    function: Callable[..., Any], arguments: tuple[Any, ...], donated: tuple[int, ...] = ()
) -> Compiled:
    """Lower and compile ``function`` for ``arguments``, timing the two apart."""
    start = clock()
    lowered = jax.jit(function, donate_argnums=donated).lower(*arguments)
    middle = clock()
    executable = lowered.compile()
    return Compiled(executable, middle - start, clock() - middle)


def calls_per_sample(seconds: float) -> int:
    """Calls that a sample needs to last about SAMPLE_SECONDS, when one call takes ``seconds``."""
    return max(1, min(_MAX_CALLS, math.ceil(SAMPLE_SECONDS / max(seconds, 1e-9))))


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """Mean seconds per call, and of one of the calls its number and its outputs."""

    seconds: float
    call: int
    outputs: Any


def sample(call: Callable[..., Any], arguments: Callable[[int], tuple[Any, ...]], calls: int) -> Sample:
    """Time ``calls`` calls, each waited for with all its outputs. ``arguments`` gives those of a call by its number.

    One more comes first and is not counted, because other cells have used the caches since; if it is a long call, it is
    the sample itself. The process is at rest before the calls that count, and before the next cell's sample
    (:func:`come_to_rest`). Which call's outputs are returned is chosen at random after it, and its number drawn just
    before it: a function that reads the frames of this one could otherwise compute nothing in the other calls, or all
    answers in the one that is not counted.
    """
    number = drawn()
    seconds, outputs = _timed(call, arguments(number))
    come_to_rest()
    if seconds >= LONG_CALL:
        return Sample(seconds, number, outputs)
    chosen, seconds = number, 0.0
    for done in range(1, calls + 1):
        number = drawn()
        passed, found = _timed(call, arguments(number))
        seconds += passed
        if drawn() % done == 0:
            chosen, outputs = number, found
    come_to_rest()
    return Sample(seconds / calls, chosen, outputs)


def drawn() -> int:
    """A number that nobody knew before, below 2**32."""
    return int.from_bytes(urandom(4), "little")


def _timed(call: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[float, Any]:
    wait(arguments)
    start = clock()
    outputs = wait(call(*arguments))
    return clock() - start, outputs


def come_to_rest() -> None:
    """Return when this process uses less than a tenth of a processor, or after a second.

    After XLA says that the outputs are ready it gives hundreds of megabytes back to the system, and its threads wait by
    spinning: tens of milliseconds on the processors that the next cell's process would be timed on.
    """
    begin = clock()
    while clock() - begin < _LONGEST_REST:
        looked, before = clock(), used()
        time.sleep(_LOOK)
        if used() - before < 0.1 * (clock() - looked):
            return
