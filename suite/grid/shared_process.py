"""Processes that several cells use: in turn, joined to each other, or one after the other; asked as a Worker."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

from ..errors import CellFailure, InputError
from . import work
from .process import Worker

_JOIN_SECONDS, _FORGET_SECONDS = 600.0, 60.0


class Turn:
    """The part of one cell in a process that the cells of a case share. Asked as a Worker.

    The process ends when it dies, hangs or holds too much memory, whichever cell it was; then every cell of it fails.
    """

    def __init__(self, process: Worker, key: str) -> None:
        self._process, self._key, self._closed = process, key, False
        self.folder = process.folder

    @property
    def slept(self) -> float:
        """As :attr:`Worker.slept`."""
        return self._process.slept

    def ask(self, seconds: float, function: Callable[..., Any], *arguments: Any) -> Any:
        """As :meth:`Worker.ask`."""
        if self._process.closed:
            raise CellFailure("crashed", "the process that it shares with the other cells of its case has ended.")
        return self._process.ask(seconds, function, *arguments)

    def close(self) -> None:
        """Have the process forget the cell; a second call does nothing."""
        if not self._closed and not self._process.closed:
            with contextlib.suppress(CellFailure):
                self.ask(_FORGET_SECONDS, work.forget, self._key)
        self._closed = True


class Joined:
    """Processes of some CPU devices each; several are joined by ``jax.distributed`` over loopback. Asked as a Worker.

    ``memory_limit`` is that of each process. Raises CellFailure if they cannot be joined.
    """

    def __init__(self, memory_limit: int, processes: int, devices: int) -> None:
        forced = f"--xla_force_host_platform_device_count={devices}"
        variables = {
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {forced}".strip(),
            "JAX_PLATFORMS": "cpu",
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
            "NPROC": str(max(16, 2 * devices)),  # threads: a device that waits for another keeps one
        }
        with contextlib.ExitStack() as stack:
            start = functools.partial(Worker, memory_limit, environment=variables)
            self._workers = [stack.enter_context(start()) for _ in range(processes)]
            if processes > 1:
                coordinator = f"127.0.0.1:{_free_port()}"
                calls = [(coordinator, processes, number) for number in range(processes)]
                self._ask(_JOIN_SECONDS, work.join, calls)
            stack.pop_all()

    def ask(self, seconds: float, function: Callable[..., Any], *arguments: Any) -> Any:
        """Ask all processes at the same time, because they wait for each other; returns the answer of the first.

        On a failure all processes are ended, and the error of the first that failed is raised as by :meth:`Worker.ask`.
        """
        return self._ask(seconds, function, [arguments] * len(self._workers))

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.close()

    def _ask(self, seconds: float, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> Any:
        with ThreadPoolExecutor(len(calls)) as pool:
            futures = [
                pool.submit(w.ask, seconds, function, *call) for w, call in zip(self._workers, calls, strict=True)
            ]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for answered in done:
                    answered.result()
            except BaseException:
                for worker in self._workers:
                    worker.kill()
                raise
        return futures[0].result()


class Restarting:
    """A process for one cell after the other: ``start`` makes it at the first request, and anew after a failure."""

    def __init__(self, start: Callable[[], Worker | Joined]) -> None:
        self._start = start
        self._process: Worker | Joined | None = None
        self.stopped = False

    def ask(self, seconds: float, function: Callable[..., Any], *arguments: Any) -> Any:
        """As :meth:`Worker.ask`."""
        process = self._process = self._process or self._start()
        if self.stopped:  # while it started
            self.close()
            raise CellFailure("crashed", "it was stopped.")
        try:
            return process.ask(seconds, function, *arguments)
        except (CellFailure, InputError):
            self.close()
            raise

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def stop(self) -> None:
        """End the process for good. Another thread that waits for its answer gets a CellFailure."""
        self.stopped = True
        self.close()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
