"""A worker process as its parent handles it: send a request, wait within limits, kill.

Time is limited per request. Memory is limited by watching the process's resident size. A process over a limit is killed
and becomes ``timeout`` or ``oom``. A process that dies becomes ``crashed``, with the signal's name. Time for which the
watching process was stopped (Ctrl-Z, a suspended job) counts toward no limit, because the worker may have been stopped
with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psutil

from .. import typed
from ..errors import CellFailure, InputError
from . import call, folders
from .confine import END_OF_WRITABLE

_POLL_SECONDS = 0.05
_STOPPED_SECONDS = 1.0  # a poll that takes longer than this: this process was stopped
# GPUs and TPUs multiply float32 in fewer bits unless told otherwise; a float32 cell is judged as float32.
_ENVIRONMENT = {
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    # With the user's compilation cache on, the compile time would be the time of reading a file.
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "PYTHONUNBUFFERED": "1",
}
_LIKELY_OUT_OF_MEMORY = 0.5  # killed from outside while above this share of its limit: the kernel was short of memory


class Worker:
    """One worker process with a memory limit in bytes. Use as a context manager, or call :meth:`close`.

    ``environment`` is added to this process's own variables. ``folder`` is its own, and goes with it. ``code`` are the
    files of the user's functions that it will load: it is then confined to that folder and those in ``writable``
    (``confine.py``), and on Linux stopped while nothing is asked, so that it slows no other cell. ``slept`` counts the
    seconds for which this process was stopped while it waited for answers.
    """

    def __init__(
        self,
        memory_limit: int,
        environment: Mapping[str, str] | None = None,
        code: Sequence[str] = (),
        writable: Sequence[Path] = (),
    ) -> None:
        self._limit = memory_limit
        self._folder = folders.make()
        self.folder = Path(self._folder.name)
        variables = _ENVIRONMENT | {"PYTHONPATH": _import_path()} | dict(environment or {})
        self._stops = bool(code) and sys.platform == "linux"
        confined = [*map(str, (self.folder, *writable)), END_OF_WRITABLE, *code] if code else []
        if code:
            variables |= dict.fromkeys(("TMPDIR", "XDG_CACHE_HOME", "TRITON_CACHE_DIR"), str(self.folder))
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        self._process = subprocess.Popen(  # noqa: S603 (this package's own module)
            [sys.executable, "-P", "-m", "attnsuite.suite.grid.worker", *confined],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=os.environ | variables,
            start_new_session=True,  # Ctrl-C is the runner's business
        )
        self._stdin: Any = self._process.stdin
        self._stdout: Any = self._process.stdout
        self._buffer = b""
        self._resident = 0
        self._closed = False
        self.slept = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, seconds: float, function: Callable[..., Any], *arguments: Any) -> Any:
        """Have the process call ``function`` of a module, and wait for its result, as JSON, for at most ``seconds``.

        If the process does not answer, it is killed and CellFailure (oom, timeout, crashed) is raised. Raises
        InputError if the process answers that the user's input cannot be used.
        """
        token = secrets.token_hex(8)
        request = {"token": token, **call.described(function, arguments)}
        with contextlib.suppress(BrokenPipeError):  # its end shows when the answer is read
            self._stdin.write(json.dumps(request).encode() + b"\n")
            self._stdin.flush()
        if self._stops:
            self._signal(signal.SIGCONT)
        try:
            reply = self._read_line(seconds)
        finally:
            if self._stops and not self._closed:
                self._signal(signal.SIGSTOP)
        try:
            answer = typed.parse_json(reply)
        except ValueError as error:
            self.close()
            raise CellFailure(
                "crashed", f"the cell answered with something that is not JSON: {reply[:80]!r}"
            ) from error
        if not isinstance(answer, dict) or answer.get("token") != token:
            self.close()
            raise CellFailure("crashed", "something wrote an answer in the name of the cell's process.")
        if "ok" in answer:
            return answer["ok"]
        if answer["failed"] == "input":
            raise InputError(answer["message"])
        raise CellFailure(answer["failed"], answer["message"])

    def close(self) -> None:
        """End the process, whatever it is doing; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self.kill()
        self._process.wait()
        for pipe in (self._stdin, self._stdout, self._stderr):
            with contextlib.suppress(OSError):
                pipe.close()
        self._folder.cleanup()

    def kill(self) -> None:
        """End the process only. Another thread that waits for its answer gets a CellFailure."""
        self._signal(signal.SIGKILL)

    def _signal(self, which: signal.Signals) -> None:
        """Send a signal to the process and to all that it started, also to those that have left its group."""
        reached: set[int] = set()
        while started := {self._process.pid, *_started_by(self._process.pid)} - reached:  # one may start more meanwhile
            reached |= started
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, which)
            for pid in started:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, which)

    @property
    def closed(self) -> bool:
        """Whether it was ended."""
        return self._closed

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def _read_line(self, seconds: float) -> bytes:
        awake, before = 0.0, time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                ready = selector.select(_POLL_SECONDS)
                passed = time.monotonic() - before
                before += passed
                if passed > _STOPPED_SECONDS:
                    self.slept += passed
                else:
                    awake += passed
                # What the worker forked may hold the pipe open after the worker's end.
                part = os.read(self._stdout.fileno(), 1 << 16) if ready else b""
                if not part and (ready or self._process.poll() is not None):
                    raise self._death()
                self._buffer += part
                self._check_limits(awake, seconds)
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _check_limits(self, awake: float, seconds: float) -> None:
        self._resident = sum(map(_resident_bytes, (self._process.pid, *_started_by(self._process.pid))))
        if self._resident > self._limit:
            self.close()
            used, limit = self._resident / 2**30, self._limit / 2**30
            raise CellFailure("oom", f"the cell held {used:.2f} GiB, and the limit is {limit:.2f} GiB (--cell-memory).")
        if awake > seconds and b"\n" not in self._buffer:
            self.close()
            raise CellFailure("timeout", f"no answer within {seconds:g} s (--cell-timeout).")

    def _death(self) -> CellFailure:
        """The failure for a process that ended by itself."""
        code = self._process.wait()
        self._stderr.seek(0)
        lines = [line for line in self._stderr.read().decode(errors="replace").splitlines() if line.strip()]
        last = f"; it last wrote: {lines[-1].strip()[:300]}" if lines else ""
        self.close()
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            if name == "SIGKILL" and self._resident > _LIKELY_OUT_OF_MEMORY * self._limit:
                return CellFailure("oom", f"killed by SIGKILL while it held {self._resident / 2**30:.2f} GiB{last}")
            return CellFailure("crashed", f"died by {name}{last}")
        return CellFailure("crashed", f"exited with code {code} before it answered{last}")


def _started_by(pid: int) -> list[int]:
    """The processes that ``pid`` started, and those that they started. Read from Linux's tables, or by psutil."""
    found, tasks = [], Path(f"/proc/{pid}/task")
    try:
        if not Path("/proc/self/task").is_dir():
            return [child.pid for child in psutil.Process(pid).children(recursive=True)]
        for task in tasks.iterdir():
            for child in map(int, (task / "children").read_text(encoding="ascii").split()):
                found += [child, *_started_by(child)]
    except (OSError, psutil.Error):  # it has ended meanwhile
        pass
    return found


def _resident_bytes(pid: int) -> int:
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0


def _import_path() -> str:
    """The import path of the present process, with which the worker finds the same packages from any directory."""
    return os.pathsep.join(str(Path(entry).resolve()) for entry in sys.path)
