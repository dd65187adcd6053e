"""A node of a fleet: looks at its machine, and computes whole cases there. Ray runs this class as an actor (fleet.py).

A case is computed as on one machine, by the executor that its kind asks for: its cells are worker processes on this
node.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..cell import Cell
from ..record import Environment, Record
from . import folders
from .grid import Grid
from .references import References

_TELL_SECONDS = 0.5  # between two messages about what is being done


@dataclasses.dataclass(frozen=True, slots=True)
class Doing:
    """Progress of a case, in the words of a watcher."""

    case: str
    backend: str
    what: str


@dataclasses.dataclass(frozen=True, slots=True)
class Warned:
    """A warning, in one sentence."""

    sentence: str


Message = Doing | Warned | tuple[Record, ...]


class Teller:
    """A watcher that puts messages into a queue. Progress is sent twice a second: a message is work on this machine."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[Message | BaseException] = queue.SimpleQueue()
        self._last_sent = 0.0

    def doing(self, case: str, backend: str, what: str) -> None:
        """Send what is being done, unless something was sent just now."""
        if time.monotonic() - self._last_sent > _TELL_SECONDS:
            self._last_sent = time.monotonic()
            self.messages.put(Doing(case, backend, what))

    def warn(self, sentence: str) -> None:
        """Tell a warning."""
        self.messages.put(Warned(sentence))

    def fewer(self, cells: int) -> None:
        """Nothing is searched on a node."""


def messages(records: Callable[[Teller], Iterable[Record]]) -> Iterator[Message]:
    """What is being done while a thread makes the records, and at the end all records."""
    teller = Teller()

    def work() -> None:
        try:
            teller.messages.put(tuple(records(teller)))
        except BaseException as error:  # noqa: BLE001 (raised again where the messages are read)
            teller.messages.put(error)

    threading.Thread(target=work, daemon=True).start()
    while not isinstance(message := teller.messages.get(), tuple):
        if isinstance(message, BaseException):
            raise message
        yield message
    yield message


class Node:
    """Computes the cells of one grid on this machine, those of a case together. ``name`` stands in its records."""

    def __init__(self, name: str) -> None:
        # Ray sets this variable from the number of processors; a run on this machine alone would not have it.
        os.environ.pop("OMP_NUM_THREADS", None)
        self._name = name
        self._grid: Grid | None = None
        self._environment: Environment = {}
        self._references: References | None = None
        self._temporary = folders.make()
        tempfile.tempdir = self._temporary.name  # of what the grid makes; close removes it

    def look(self, grid: Grid) -> tuple[Environment, list[Cell]]:
        """What this machine is, and the cells of the grid on it. Raises InputError."""
        self._grid = grid
        environment, cells = grid.look()
        self._environment = {**environment, "node": self._name}
        return environment, cells

    def compute(self, cells: Sequence[Cell]) -> Iterator[Message]:
        """What is being done, and at the end the records of these cells, which are all of one case. After ``look``."""
        yield from messages(lambda teller: self._records(cells, teller))

    def close(self) -> None:
        """Remove the temporary files. The process is ended next, whatever it is doing."""
        with contextlib.suppress(OSError):
            if self._references is not None:
                self._references.close()
            self._temporary.cleanup()

    def _records(self, cells: Sequence[Cell], teller: Teller) -> Iterator[Record]:
        grid = self._grid
        if grid is None:
            raise RuntimeError("compute comes after look.")
        if self._references is None:
            self._environment = grid.measured(self._environment, teller, None)
            self._references = References(grid.limits.seconds, grid.text)
        yield from grid.compute(cells, grid.context(self._environment, teller, self._references))
