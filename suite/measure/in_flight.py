"""Time on an accelerator: many calls in flight, and the slope of two lengths.

A call returns before the device has computed, and waiting for one call can cost more than its kernels. So calls are
started without waiting, each waits on the device for the one before, and only the last is waited for. What is paid once
cancels in the difference of two lengths. Where the host starts calls slower than the device computes them, the slope is
the host's time; ``profile.py`` has the device's.

Every call reads inputs of its own, and none of them is in a GPU's L2 cache when the clock starts. Inputs are used again
only where they would take too much memory; together they are then far larger than the cache.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from attnsuite.backends import Target
from attnsuite.backends.devices import NVIDIA_GPUS

from ..errors import CellFailure
from . import profile, speed

METHOD = "calls in flight, the slope of two lengths"
PROFILED = 10  # calls of a profile, and as many again on inputs that are in the cache
_SHARE = 4  # a quarter of the device's memory is for inputs, and as much for outputs of calls in flight
_ATTEMPTS = 5  # of a pair of lengths, while other work makes the longer one the faster
_EVICTING = 2  # times the cache is written before the clock starts

Arguments = Callable[[int], tuple[Any, ...]]  # those of a call by its number, on the device


class Chain:
    """A compiled program whose calls wait for each other on the device, called without its token.

    The token is a number that each call hands on to the next. It is there when all of the call is. As it is
    donated it costs no operation: the programs compiled for a v5e and an H100 have the same ones with it and without.
    """

    def __init__(self, executable: Any) -> None:
        self._executable, self._token = executable, jnp.zeros((), jnp.int32)
        self.as_text, self.memory_analysis = executable.as_text, executable.memory_analysis

    def __call__(self, *arguments: Any) -> Any:
        """The outputs, which are on their way."""
        self._token, outputs = self._executable(self._token, *arguments)
        return outputs

    def wait(self) -> None:
        """Return when every call is done."""
        speed.wait(self._token)


def linked(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with a token before its arguments and before its outputs."""

    @functools.wraps(function)
    def with_token(token: Any, *arguments: Any) -> Any:
        return jax.lax.optimization_barrier((token, function(*arguments)))

    return with_token


def compile_chain(function: Callable[..., Any], arguments: tuple[Any, ...]) -> speed.Compiled:
    """As :func:`speed.compile_program`; what it compiled is a :class:`Chain`."""
    compiled = speed.compile_program(linked(function), (jnp.zeros((), jnp.int32), *arguments), donated=(0,))
    return dataclasses.replace(compiled, call=Chain(compiled.call))


@dataclasses.dataclass(frozen=True, slots=True)
class Flight:
    """How a chain is timed: ``calls`` more in the longer length, on so many ``sets`` of inputs.

    ``cache`` is the size of a GPU's L2 cache in bytes, 0 where there is none to be told apart.
    """

    chain: Chain
    calls: int
    sets: int
    cache: int = 0

    @staticmethod
    def of(chain: Chain, calls: int, input_bytes: int, target: Target) -> Flight:
        """For a program that takes ``input_bytes`` of new inputs, and ``calls`` to last long enough."""
        share = (target.memory_bytes or 0) // _SHARE
        calls = max(1, min(calls, share // max(1, chain.memory_analysis().output_size_in_bytes)))
        sets = max(1, min(_short(calls) + calls, share // max(1, input_bytes)))
        return Flight(chain, calls, sets, _cache(target))

    def sample(self, arguments: Arguments, choice: int) -> speed.Sample:
        """As :func:`speed.sample`. Raises CellFailure where more calls took no more time in any attempt."""
        made = speed.wait([arguments(number) for number in range(self.sets)])
        seconds, outputs = self._run(made[:1], 1, 0)
        if seconds >= speed.LONG_CALL:
            return speed.Sample(seconds, 0, outputs)
        chosen, short = choice % self.sets, _short(self.calls)
        for _ in range(_ATTEMPTS):
            less, _ = self._run(made, short, chosen)
            more, outputs = self._run(made, short + self.calls, chosen)
            if more > less:
                return speed.Sample((more - less) / self.calls, chosen, outputs)
        what = f"{self.calls} more calls took no more time in {_ATTEMPTS} attempts"
        raise CellFailure("crashed", f"{what}; other work disturbs the clock.")

    def on_device(self, arguments: Arguments) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Seconds that the device computed, of some calls; and of some whose inputs are in the cache, if it has one.

        Raises CellFailure where the profile does not say.
        """
        made = speed.wait([arguments(number) for number in range(min(self.sets, PROFILED))])
        seconds, _ = self._run(made[:1], 1, 0)
        calls = max(2, min(PROFILED, int(1 / seconds)))
        again = calls + 1 if self.cache else 0  # the first of these finds other inputs in the cache
        self._evict()

        def run() -> None:
            for number in (*range(calls), *[0] * again):
                self.chain(*made[number % len(made)])
            self.chain.wait()

        found = profile.call_times(run, calls + again)
        return found[:calls], found[calls + 1 :]

    def _run(self, made: Sequence[tuple[Any, ...]], length: int, chosen: int) -> tuple[float, Any]:
        """Seconds of ``length`` calls, and the outputs of the last on the chosen inputs."""
        self._evict()
        saved, start = None, speed.clock()
        for number in range(length):
            outputs = self.chain(*made[number % len(made)])
            if number % len(made) == chosen:
                saved = outputs
        self.chain.wait()
        return speed.clock() - start, saved

    def _evict(self) -> None:
        if self.cache:
            speed.wait(jnp.zeros(_EVICTING * self.cache, jnp.int8))


def _short(calls: int) -> int:
    return max(1, calls // 3)


def _cache(target: Target) -> int:
    if target.platform != "cuda":
        return 0
    known = NVIDIA_GPUS.get(target.kind)
    return max(gpu.l2_cache for gpu in NVIDIA_GPUS.values()) if known is None else known.l2_cache
