"""Two errors: one for the user's input, one for a cell that failed.

The command line prints an :class:`InputError` on stderr and exits with code 2. A :class:`CellFailure` becomes the
status and the error of one record; the run goes on.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .record import Status


class InputError(ValueError):
    """The user's input cannot be used. The message is one sentence that says what would be accepted."""


class CellFailure(RuntimeError):  # noqa: N818 (it is a result, not a fault of this program)
    """A cell ended without a result. ``status`` is ``oom``, ``timeout`` or ``crashed``."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status: Status = status
        self.message = message


@contextlib.contextmanager
def as_input(before: str = "", after: str = "") -> Iterator[None]:
    """Inside, a ValueError becomes an InputError, whose message is that of the error between ``before`` and ``after``.

    >>> with as_input("--size: ", "."):
    ...     int("two", 3)
    Traceback (most recent call last):
    attnsuite.suite.errors.InputError: --size: invalid literal for int() with base 3: 'two'.
    """
    try:
        yield
    except ValueError as error:
        raise InputError(f"{before}{error}{after}") from error


def jax_does_not_start(failure: CellFailure) -> InputError:
    """The sentence for a process that could not start JAX, or ended where a backend was asked what it takes.

    JAX_PLATFORMS may have kept JAX from what is here.
    """
    platforms, sentence = os.environ.get("JAX_PLATFORMS"), failure.message.rstrip(" :.")
    if platforms in (None, "", "cpu"):
        return InputError(f"JAX, or a backend, does not start on this machine: {sentence}.")
    reason = "no such device is here, or its plugin is not installed" if sentence == "AssertionError" else sentence
    return InputError(
        f"JAX does not start on this machine with JAX_PLATFORMS={platforms}: {reason}; unset it, or set "
        "JAX_PLATFORMS=cpu."
    )
