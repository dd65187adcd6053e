"""A cell of a grid: the request (:class:`Cell`), and what came of it (:class:`Outcome`).

Both are data and travel as JSON between the process that schedules and the processes that compute. A record
(``record.py``) is made of one of each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from attnsuite.models import TextFile

from .record import Measured, Mode, Status
from .typed import Count, Scalar


@runtime_checkable
class Case(Protocol):
    """One problem to measure, of one of the kinds in ``suite.kinds``: a frozen dataclass of JSON scalars."""

    @property
    def kind(self) -> str:
        """The kind of record that its cells make."""
        ...

    @property
    def name(self) -> str:
        """Its name, unique within a suite."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One row of one case: the request, and what runs for it. ``mode`` is None where nothing can run.

    ``row`` is a backend, a peer, or a way to attend that only the suite knows. ``devices`` is the number of JAX devices
    that share the problem.
    """

    case: Case
    row: str
    target: str
    resolved: str | None
    mode: Mode | None
    exact: bool | None
    reasons: tuple[str, ...] = ()
    devices: Count = 1

    @property
    def key(self) -> str:
        """``case/row/target/mode``, with ``row@n`` on n devices. Where nothing runs, ``mode`` is the requested mode."""
        devices = "" if self.devices == 1 else f"@{self.devices}"
        return f"{self.case.name}/{self.row}{devices}/{self.target}/{self.mode or 'native'}"

    @property
    def kind(self) -> str:
        """The kind of its record."""
        return self.case.kind

    @property
    def is_measured(self) -> bool:
        """Whether what was named runs. Nothing is measured under another name in its place."""
        return self.mode not in (None, "fallback")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Measured):
    """What came of a cell in its process.

    A status other than ``ok`` ends the cell: ``error`` says why in one line. ``reasons`` are of a cell that was refused
    in its process, where nothing ran. ``calls`` is the number of calls in a sample. ``memory_method`` says how the
    process's high-water mark was read. ``pinned_threads`` is the number of threads that have a processor of their own.
    ``sampling`` is how samples are taken, None where each call is waited for. ``accelerator`` is the state of a GPU
    after them.
    """

    status: Status = "ok"
    reasons: tuple[str, ...] = ()
    calls: Count | None = None
    memory_method: str | None = None
    pinned_threads: Count | None = None
    sampling: str | None = None
    accelerator: dict[str, Scalar] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A cell that ran once.

    ``timed`` is its program, ready to be sampled (``measure/execution.py: Timed``, or what has the same methods); None
    where nothing is timed. ``answers`` gives the outputs by name for the inputs of a seed, and ``named`` those of a
    timed call; None where the cell brings its own comparison.
    """

    outcome: Outcome
    timed: Any = None
    answers: Callable[[int], Mapping[str, Any]] | None = None
    named: Callable[[Any], Mapping[str, Any]] | None = None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Process:
    """Another process: ``ask(function, *arguments)`` gives a result there; it may write in ``folder()``."""

    ask: Callable[..., Any]
    folder: Callable[[], Path]
    close: Callable[[], None]
    is_confined: bool


Start = Callable[[int | None], Process]  # of so many threads; None: all


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """The inputs of a cell's process: its memory limit in bytes, the text to read, and the .npz that judges it.

    ``reference`` is None where another process judges. ``resident`` are the bytes of the process before the code of the
    row was loaded, where that is code of the user. ``start`` makes one more process.
    """

    reference: Path | None
    memory_limit: int
    text: TextFile | None = None
    resident: int | None = None
    start: Start | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The request of a grid beside its cases: the rows, the text, and whether a CPU's cores share cells."""

    rows: tuple[str, ...]
    cases: tuple[Any, ...]
    text: TextFile | None = None
    all_cores: bool = False
