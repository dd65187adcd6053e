"""The entry point of the command: installs signal handlers first, then imports, which take seconds.

SIGTERM and SIGHUP end the command as Ctrl-C does: temporary files are removed, workers are killed, finished results are
kept. The exit code is 128 plus the number of the signal.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_AGAIN = 0.02  # seconds until an interrupt that nobody would hear is tried again
_PATIENCE = 10.0  # seconds for which it is tried so
# Files of frames under which nothing is interrupted: a module that is imported may catch everything; a temporary
# directory that is half made or half removed is left behind, and so is a process that is half started.
_UNINTERRUPTED = ("/tempfile.py", "/subprocess.py")


def main() -> None:
    """Entry point of ``attnsuite``; exits the process."""
    # A signal that is ignored (nohup ignores SIGHUP) stays ignored.
    caught = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    for number in caught:
        signal.signal(number, _leave)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed by whoever started this process
            stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    from . import command_line  # noqa: PLC0415 (this is what takes seconds)

    for number in caught:
        signal.signal(number, _interrupt)
    try:
        command_line.main()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        gc.freeze()  # or Python, as it ends, looks for garbage among all that was imported: half a second


def _leave(number: int, _: FrameType | None) -> None:
    """Exit during the imports: no work has begun that would have to be ended."""
    os._exit(128 + number)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _raise_where_heard(number, frame, time.monotonic() + _PATIENCE)


def _raise_where_heard(number: int, frame: FrameType | None, until: float) -> None:
    if _is_unheard(frame) and time.monotonic() < until:
        signal.signal(signal.SIGALRM, lambda _, later: _raise_where_heard(number, later, until))
        signal.setitimer(signal.ITIMER_REAL, _AGAIN)
        return
    signal.setitimer(signal.ITIMER_REAL, 0)  # an earlier signal's (``timeout`` sends Ctrl-C on) would kill the ending
    for other in _ENDING:
        if other is not signal.SIGINT:  # a second Ctrl-C ends the ending, too
            signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt(number)


def _is_unheard(frame: FrameType | None) -> bool:
    """Whether the exception would be dropped, or would come between what belongs together.

    Python prints and drops one in a callback of the garbage collector (JAX has one).
    """
    callbacks = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None:
        code = frame.f_code
        if code in callbacks or code.co_name == "__del__" or _is_uninterrupted(code.co_filename):
            return True
        frame = frame.f_back
    return False


def _is_uninterrupted(file: str) -> bool:
    return file.startswith("<frozen importlib") or file.endswith(_UNINTERRUPTED)
