"""``attnsuite sharded``: checks that attention divided among many devices gives the same results.

It runs every backend that can be sharded, on meshes of data, heads and context, forward and backward, on eight devices
that JAX makes of the host's CPU, and on two real processes that ``jax.distributed`` joins over loopback. A row is
judged like any cell: against the float64 oracle, within the noise floor of the standard backend on one device. A
refusal is a record too, with its reasons. Only correctness is measured: devices that share a CPU say nothing about
speed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from attnsuite.backends import AttentionSpec, Target, UnknownBackendError, registry
from attnsuite.backends.devices import cpu_name

from .errors import CellFailure, InputError
from .grid.executors import now
from .grid.keeping import GridWatcher, identity, keep
from .grid.process import Worker, ask_together
from .measure import environment
from .measure.memory import machine_bytes
from .record import Environment, Record, TensorError

SUITE = KIND = "sharded"
DEVICES = 8
_SECONDS = 600.0  # for one row
_MEMORY_SHARE = 0.7  # of the machine, for all processes of a row


@dataclasses.dataclass(frozen=True, slots=True)
class ShardedProblem:
    """An attention problem over 2 sequences, 4 heads and 2 KV heads of dim 32.

    ``segments`` alternates ids and counts (a negative id is padding). They hold for every sequence but the last, which
    is one segment. With ``balanced_for`` the tokens are in the order that balances that many devices.
    """

    options: Mapping[str, Any]
    dtype: str = "float32"
    length: int = 320
    segments: tuple[int, ...] | None = None
    key_lengths: tuple[int, ...] | None = None
    balanced_for: int | None = None
    kv_heads: int = 2

    def spec(self) -> AttentionSpec:
        """The problem as backends see it."""
        return AttentionSpec(
            batch=2,
            query_length=self.length,
            key_value_length=self.length,
            num_heads=4,
            num_kv_heads=self.kv_heads,
            head_dim=32,
            dtype=self.dtype,
            has_segment_ids=self.segments is not None,
            has_seq_lengths=self.key_lengths is not None,
            has_positions=self.balanced_for is not None,
            **self.options,
        )


_CAUSAL = {"is_causal": True}
PROBLEMS = {
    "causal": ShardedProblem(_CAUSAL),
    "causal bfloat16": ShardedProblem(_CAUSAL, dtype="bfloat16"),
    "ragged": ShardedProblem({}, key_lengths=(320, 150)),
    "packed": ShardedProblem(_CAUSAL, segments=(-1, 20, 0, 110, 1, 150, -1, 40)),
    "packed, window, soft cap": ShardedProblem(
        {"is_causal": True, "local_window_size": (90, 0), "logits_soft_cap": 5.0},
        segments=(-1, 20, 0, 110, 1, 150, -1, 40),
    ),
    "balanced": ShardedProblem(_CAUSAL, balanced_for=4),
    "one KV head": ShardedProblem(_CAUSAL, kv_heads=1),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One backend on one mesh; ``shape`` counts the devices along data, heads and context, in the mesh's order."""

    backend: str
    shape: Mapping[str, int]
    problem: str
    exchange: Literal["gather", "ring"] = "gather"
    mode: Literal["native", "interpret"] = "native"

    @property
    def case(self) -> str:
        """The problem and the mesh as one name; with the backend and the number of devices it is unique to the row."""
        exchange = f", {self.exchange}" if "context" in self.shape else ""
        return f"{self.problem}, {self.mesh}{exchange}"

    @property
    def mesh(self) -> str:
        """The axes in the mesh's order."""
        return " x ".join(f"{name} {size}" for name, size in self.shape.items())


_ALL = {"data": 2, "heads": 2, "context": 2}
_LONG = {"heads": 2, "context": 4}
ROWS = (
    Row("standard", _ALL, "causal"),
    Row("standard", _LONG, "packed, window, soft cap"),
    Row("chunked", _ALL, "causal"),
    Row("chunked", _ALL, "causal bfloat16"),
    Row("chunked", _ALL, "packed, window, soft cap"),
    Row("chunked", _ALL, "causal", "ring"),
    Row("chunked", _LONG, "causal bfloat16", "ring"),
    Row("chunked", _LONG, "packed, window, soft cap", "ring"),
    Row("chunked", _LONG, "balanced", "ring"),
    Row("chunked", {"data": 2, "context": 4}, "ragged", "ring"),
    Row("splash", _ALL, "packed", "ring", "interpret"),
    Row("splash", _ALL, "ragged", "gather", "interpret"),
    # Refused, with the reason.
    Row("splash", _ALL, "causal", "gather", "interpret"),
    Row("splash", _ALL, "balanced", "ring", "interpret"),
    Row("standard", _ALL, "causal", "ring"),
    Row("chunked", _ALL, "one KV head"),
    Row("kascade", {"data": 4, "heads": 2}, "causal"),
)
# Two processes of two devices: the first axis of a mesh spans them.
ROWS_OF_PROCESSES = (
    Row("standard", {"context": 2, "heads": 2}, "packed, window, soft cap"),
    Row("chunked", {"context": 2, "heads": 2}, "causal", "ring"),
    Row("chunked", {"context": 4}, "packed, window, soft cap", "ring"),
    Row("chunked", {"data": 2, "heads": 2}, "causal"),
)
_STARTS = ((ROWS, 1, DEVICES), (ROWS_OF_PROCESSES, 2, 2))  # rows, processes, and devices of each process


def run(out: Path, watcher: GridWatcher, *, resume: bool) -> tuple[Record, ...]:
    """The records of all rows, written to ``out``. Raises InputError if ``out`` has records and ``resume`` is False."""
    found: Environment = {
        "versions": environment.versions(),
        "source": environment.source_digest(),
        "git_revision": environment.git_revision(),
        "cpu": cpu_name(),
        "flags": environment.flags(),
    }
    target = str(Target("cpu", cpu_name()))
    keys = [key_of(row, processes * devices, target) for rows, processes, devices in _STARTS for row in rows]

    def records(finished: frozenset[str]) -> Iterator[Record]:
        for rows, processes, devices in _STARTS:
            missing = [row for row in rows if key_of(row, processes * devices, target) not in finished]
            for record in compute(missing, devices=devices, processes=processes, watcher=watcher):
                yield dataclasses.replace(record, environment=found)

    return keep(out, identity("sharded", {}, target, found), keys, records, watcher, resume=resume)


def key_of(row: Row, devices: int, target: str) -> str:
    """The key of a row's record."""
    return f"{row.case}/{row.backend}@{devices}/{target}/{row.mode}"


def compute(
    rows: Sequence[Row],
    *,
    devices: int,
    processes: int = 1,
    alone: bool = True,
    seconds: float = _SECONDS,
    watcher: GridWatcher | None = None,
) -> Iterator[Record]:
    """The record of each row, from ``processes`` processes of ``devices`` devices each.

    With ``alone`` the record also has the errors of the same backend on one device, for the reader; the judge does not
    use them. A process that dies ends its row; new processes compute the next one.
    """
    workers: list[Worker] = []
    target = str(Target("cpu", cpu_name()))
    try:
        for row in rows:
            if watcher is not None:
                watcher.doing(row.case, row.backend, f"{processes} x {devices} devices")
            started, begin = now(), time.perf_counter()
            try:
                if not workers:
                    workers = _joined(processes, devices)
                question = {"do": "row", "row": dataclasses.asdict(row), "alone": alone}
                answer = ask_together(workers, [question] * processes, seconds)
            except (CellFailure, InputError) as failure:
                workers = _ended(workers)
                status = failure.status if isinstance(failure, CellFailure) else "crashed"
                answer = {"status": status, "error": str(failure)}
            record = record_of(row, processes, processes * devices, target, answer, started)
            yield dataclasses.replace(record, wall_seconds=time.perf_counter() - begin)
    finally:
        _ended(workers)


def _ended(workers: Sequence[Worker]) -> list[Worker]:
    """End the workers; returns an empty list."""
    for worker in workers:
        worker.close()
    return []


def _joined(processes: int, devices: int) -> list[Worker]:
    """New worker processes; several are joined by ``jax.distributed`` over loopback. Raises CellFailure."""
    forced = f"--xla_force_host_platform_device_count={devices}"
    variables = {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {forced}".strip(),
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "NPROC": str(max(16, 2 * devices)),  # threads: a device that waits for another keeps one
    }
    limit = int(_MEMORY_SHARE * machine_bytes()) // processes
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(Worker(limit, "attnsuite.suite.sharded_worker", variables)) for _ in range(processes)
        ]
        if processes > 1:
            join = {"do": "join", "coordinator": f"127.0.0.1:{_free_port()}", "processes": processes}
            ask_together(workers, [join | {"process": n} for n in range(processes)], _SECONDS)
        stack.pop_all()
    return workers


def record_of(row: Row, processes: int, devices: int, target: str, answer: Mapping[str, Any], started: str) -> Record:
    """The record of a row from the ``answer`` of ``sharded_worker``; ``devices`` counts those of all processes."""
    status = answer["status"]
    accuracy = {name: TensorError(**error) for name, error in answer.get("accuracy", {}).items()}
    return Record(
        key=key_of(row, devices, target),
        suite=SUITE,
        case=row.case,
        kind=KIND,
        problem={
            "kind": KIND,
            "name": row.case,
            "problem": row.problem,
            "mesh": row.mesh,
            "exchange": row.exchange if "context" in row.shape else None,
            "processes": processes,
        },
        requested=row.backend,
        resolved=None if status == "unsupported" else row.backend,
        mode=None if status == "unsupported" else row.mode,
        devices=devices,
        exact=_is_exact(row.backend),
        target=target,
        reasons=tuple(answer.get("reasons", ())),
        status=status,
        error=answer.get("error"),
        accuracy=accuracy,
        facts=answer["facts"] if accuracy else None,
        started=started,
    )


def _is_exact(backend: str) -> bool | None:
    with contextlib.suppress(UnknownBackendError):
        return registry.get(backend).exact
    return None


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
