"""What goes wrong, as values: a sentence for the user, or the end of one cell.

:class:`InputError` is what the command line prints on stderr before it exits with code 2. A
:class:`CellFailure` becomes the status and the error of one record; the run goes on.
"""

from __future__ import annotations

from .record import Status


class InputError(ValueError):
    """Something the user gave cannot be used; the message is one sentence that says what would be."""


class CellFailure(RuntimeError):  # noqa: N818 (it is a result, not a fault of this program)
    """A cell ended without a result. ``status`` is ``oom``, ``timeout`` or ``crashed``."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status: Status = status
        self.message = message
