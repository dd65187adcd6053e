"""Two errors: one for the user's input, one for a cell that failed.

The command line prints an :class:`InputError` on stderr and exits with code 2. A :class:`CellFailure` becomes the
status and the error of one record; the run goes on.
"""

from __future__ import annotations

from .record import Status


class InputError(ValueError):
    """The user's input cannot be used. The message is one sentence that says what would be accepted."""


class CellFailure(RuntimeError):  # noqa: N818 (it is a result, not a fault of this program)
    """A cell ended without a result. ``status`` is ``oom``, ``timeout`` or ``crashed``."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status: Status = status
        self.message = message
