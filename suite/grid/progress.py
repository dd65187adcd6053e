"""Progress on a terminal: a bar with the running cell and the time left, and a line per cell or refused backend."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from ..record import Record
from ..summary import record_line, refusal

_INDENT = 12  # columns of a status, under which a long line goes on


class ProgressDisplay:
    """A :class:`~.grid.GridWatcher`: a bar on a terminal, else a line per finished cell. A context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.completed:.0f} done, {task.fields[left]} left", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=12, table_column=Column(no_wrap=True)),
            TimeElapsedColumn(table_column=Column(no_wrap=True)),
            TextColumn("about", table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            TextColumn("left:", table_column=Column(no_wrap=True)),
            TextColumn(
                "{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
            ),
            expand=True,
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=None, left="?")
        self._total = 0
        self._done = 0
        self._refused: set[tuple[str, str, str | None]] = set()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, total: int, finished: int) -> None:
        """Set the length of the bar."""
        self._total, self._done = total, finished
        self._progress.update(self._task, total=total, completed=finished, left=total - finished)
        if finished:
            self._console.print(f"resuming: {finished} of {total} cells are done")

    def fewer(self, cells: int) -> None:
        """The run has ``cells`` cells fewer than :meth:`begin` said."""
        self._total -= cells
        self._progress.update(self._task, total=self._total, left=self._total - self._done)

    def doing(self, case: str, backend: str, what: str) -> None:
        """Show the running cell."""
        self._progress.update(self._task, description=" / ".join(part for part in (case, backend, what) if part))

    def warn(self, sentence: str) -> None:
        """Show a warning above the bar."""
        self._print(Text(f"warning: {sentence}", "yellow"))

    def done(self, record: Record) -> None:
        """Print the cell's line, and move the bar: not by an unsupported cell, whose reason is printed once."""
        if record.status != "unsupported":
            self._done += 1
            self._progress.update(self._task, completed=self._done, left=self._total - self._done)
        else:
            reported = (record.requested, record.target, refusal(record))
            if reported in self._refused:
                return
            self._refused.add(reported)
        self._print(record_line(record))

    def _print(self, line: Text) -> None:
        """One line; on a terminal broken between words, because a terminal breaks them anywhere."""
        if self._console.is_terminal:
            line = Text("\n" + " " * _INDENT).join(line.wrap(self._console, self._console.width - _INDENT))
        self._console.print(line, highlight=False, soft_wrap=True)
