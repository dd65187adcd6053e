"""Compile the program of a cell, check its sizes, run it once for its memory, and make it ready to be sampled."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from attnsuite.backends import AttentionSpec, Target

from ..cell import Means, Outcome
from ..errors import CellFailure
from . import in_flight, lint, memory, speed
from .program import Draw, Program, renewer

_HELD = 2**29  # bytes that compiling and importing may leave in a process
_GIVEN_BACK = 2**25  # bytes: glibc gives an array of so many back to the system at once (mallopt(3), M_MMAP_THRESHOLD)


class Timed:
    """The compiled program of a cell, run on the arguments of a draw.

    ``call`` is the number of a call of the last sample, whose outputs are saved.
    """

    def __init__(self, compiled: speed.Compiled, program: Program, calls: int = 1) -> None:
        self._call, self._arrays, self._calls, self._arguments = compiled.call, program.arrays, calls, renewer(program)
        self.call, self._saved = 0, None
        self.flight = None
        new = [program.arguments[i].nbytes for i in program.renewed]
        self._rests = max(new, default=0) >= _GIVEN_BACK
        if isinstance(self._call, in_flight.Chain):
            self.flight = in_flight.Flight.of(self._call, calls, sum(new), Target.here())

    def outputs(self, draw: Draw) -> Any:
        """The outputs of one call, as JAX returns them."""
        return self._converted(speed.wait(self._call(*self._arguments(draw))))

    def sample(self, seed: int) -> float:
        """Mean seconds per call; the inputs of call ``n`` are those of ``Draw(seed, n)``, and ``n`` is any number."""
        self._saved = None
        if self.flight is None:
            found = speed.sample(self._call, self._at_rest(seed), self._calls)
        else:
            found = self.flight.sample(self._drawn(seed), speed.drawn())
        self.call, self._saved = found.call, found.outputs
        return found.seconds

    def on_device(self, seed: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """As :meth:`in_flight.Flight.on_device`, of calls that are timed in flight. Raises CellFailure."""
        if self.flight is None:
            raise CellFailure("crashed", "its calls are waited for one by one; their time is not the device's.")
        return self.flight.on_device(self._drawn(seed))

    def _drawn(self, seed: int) -> in_flight.Arguments:
        return lambda number: self._arguments(Draw(seed, number))

    def _at_rest(self, seed: int) -> in_flight.Arguments:
        """As :meth:`_drawn`; after large arrays were made, the process comes to rest.

        After XLA says that they are ready it gives back what making them took, and those of the call before. Beside
        that, two devices took 1.4 times as long for a decode step with a cache of 2 x 32 MiB (an Intel Xeon, 2 cores).
        """
        arguments = self._drawn(seed)

        def made(number: int) -> tuple[Any, ...]:
            found = speed.wait(arguments(number))
            speed.come_to_rest()
            return found

        return made if self._rests else arguments

    @property
    def saved_outputs(self) -> Any:
        """The outputs of call ``call`` of the last sample."""
        return self._converted(self._saved)

    def _converted(self, outputs: Any) -> Any:
        return outputs if self._arrays is None else self._arrays(outputs)


def outputs_of(program: Program, draw: Draw | None = None) -> Any:
    """The outputs of one run, as JAX returns them. It is compiled before anybody knows the inputs of ``draw``."""
    if draw is not None:
        return Timed(_compiled(program), program).outputs(draw)
    if program.arrays is not None:
        return program.arrays(program.function(*program.arguments))
    return jax.jit(program.function)(*program.arguments)


def _compiled(program: Program, *, in_line: bool = True) -> speed.Compiled:
    """The compiled program; as it stands where it brings its own compilation. Calls ``in_line`` are waited for."""
    if program.arrays is not None:
        return speed.Compiled(program.function)
    compile_program = speed.compile_program if in_line else in_flight.compile_chain
    return compile_program(program.function, program.arguments)


def execute(
    program: Program, means: Means, devices: int = 1, spec: AttentionSpec | None = None
) -> tuple[Any, Timed, Outcome]:
    """The outputs, the program ready to be sampled, and what was measured on the way.

    The program runs once for its memory, and once more if it took less than a second; ``repeats`` says whether the
    second run gave the same bits. The text of a program that computes only attention ``spec`` is read. Raises
    CellFailure where the program needs more memory than its limit.
    """
    target = Target.here()
    compiled = _compiled(program, in_line=target.platform == "cpu" or devices > 1)
    sizes = memory.compiled_sizes(compiled.call, devices) if program.arrays is None else {}
    needed = sum(size for size in sizes.values() if size)
    limit = means.memory_limit
    available = limit if target.platform == "cpu" or target.memory_bytes is None else target.memory_bytes
    if needed > available:
        raise CellFailure("oom", f"the compiled program needs {_gib(needed)}, and the limit is {_gib(available)}.")
    speed.wait(program.arguments)
    held = memory.held_since(means.resident, program.arguments)
    start = speed.clock()
    outputs, used, method = memory.measure(compiled.call, program.arguments)
    seconds = speed.clock() - start
    repeats = None
    if seconds < 1.0:  # the first call also pays for thread pools and page faults
        start = speed.clock()
        again = speed.wait(compiled.call(*program.arguments))
        seconds = speed.clock() - start
        repeats = None if program.arrays is not None else _same_bits(outputs, again)
    calls = speed.calls_per_sample(seconds)
    timed = Timed(compiled, program, calls)
    if program.arrays is not None:
        outputs = program.arrays(outputs)
    notes = ()
    if held > _HELD:
        used = used | {"process_high_water": held + (used["process_high_water"] or 0)}
        notes = (f"{_gib(held)} of its memory were taken before the call, when its code was loaded and compiled.",)
    outcome = Outcome(
        notes=notes,
        lower_seconds=compiled.lower_seconds,
        compile_seconds=compiled.compile_seconds,
        memory=sizes | used,
        memory_method=method,
        calls=calls if timed.flight is None else timed.flight.calls,
        sampling=None if timed.flight is None else in_flight.METHOD,
        program=None if spec is None or program.arrays is not None else lint.read(compiled.call.as_text(), spec),
        repeats=repeats,
    )
    return outputs, timed, outcome


def _same_bits(first: Any, second: Any) -> bool:
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
