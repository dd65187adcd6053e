"""``attnsuite sharded``: whether attention that is dealt to many devices is the same attention.

Every backend that can be sharded, on meshes of data, heads and context, forward and backward, on eight devices that the
host pretends to have, and on two real processes that ``jax.distributed`` joins over loopback. A row is judged as
everywhere else: against the float64 oracle, within the noise floor of the standard backend on one device. What a
backend refuses is a row too, with its reasons. Correctness only: devices that share a CPU say nothing of speed.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from attnsuite.backends import AttentionSpec
from attnsuite.backends.devices import cpu_name

from . import files
from .errors import InputError
from .measure import environment

FACTS, PAGE = "sharded.json", "report.md"
DEVICES = 8
_SECONDS = 600.0  # for all rows of one start


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """An attention problem over 2 sequences, 4 heads and 2 KV heads of dim 32.

    ``segments`` are ids and their counts in turn (negative: padding), the same in every sequence but the last, which
    is one segment. ``balanced_for``: tokens in the order that is balanced for so many devices.
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
    "causal": Problem(_CAUSAL),
    "causal bfloat16": Problem(_CAUSAL, dtype="bfloat16"),
    "ragged": Problem({}, key_lengths=(320, 150)),
    "packed": Problem(_CAUSAL, segments=(-1, 20, 0, 110, 1, 150, -1, 40)),
    "packed, window, soft cap": Problem(
        {"is_causal": True, "local_window_size": (90, 0), "logits_soft_cap": 5.0},
        segments=(-1, 20, 0, 110, 1, 150, -1, 40),
    ),
    "balanced": Problem(_CAUSAL, balanced_for=4),
    "one KV head": Problem(_CAUSAL, kv_heads=1),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One backend on one mesh: ``shape`` is how many devices share data, heads and context, in the mesh's order."""

    backend: str
    shape: Mapping[str, int]
    problem: str
    exchange: Literal["gather", "ring"] = "gather"
    mode: Literal["native", "interpret"] = "native"


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
_DEVICES_PER_PROCESS = 2


def run(out: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Compute every row and write the facts and the page to ``out``; the facts. Raises InputError where it has some."""
    if (out / FACTS).exists():
        raise InputError(f"{out} already has {FACTS}; choose another --out.")
    files.check_directory(out)
    parts = []
    for title, rows, processes, devices in (
        (f"one process, {DEVICES} devices", ROWS, 1, DEVICES),
        (f"two processes, {_DEVICES_PER_PROCESS} devices each", ROWS_OF_PROCESSES, 2, _DEVICES_PER_PROCESS),
    ):
        say(title)
        parts.append({"title": title, "rows": list(compute(rows, devices=devices, processes=processes))})
    facts = {
        "parts": parts,
        "versions": environment.versions(),
        "git_revision": environment.git_revision(),
        "cpu": cpu_name(),
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
    }
    files.write_text(out / FACTS, json.dumps(facts, indent=1) + "\n")
    files.write_text(out / PAGE, page(facts))
    return facts


def compute(
    rows: Sequence[Row], *, devices: int, processes: int = 1, alone: bool = True, seconds: float = _SECONDS
) -> Iterator[dict[str, Any]]:
    """Each row with its answer, from ``processes`` processes of ``devices`` devices each.

    ``alone``: with the errors of the same backend on one device beside those on all, for the reader; the judge needs
    them not.
    Raises InputError where a process ends without an answer, with the last it said.
    """
    request = {
        "rows": [dataclasses.asdict(row) for row in rows],
        "processes": processes,
        "alone": alone,
        "coordinator": f"127.0.0.1:{_free_port()}",
    }
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"out{n}" for n in range(processes)]
        errors = [Path(folder) / f"err{n}" for n in range(processes)]
        started: list[subprocess.Popen[bytes]] = []
        try:
            started.extend(_start(request | {"process": n}, devices, outputs[n], errors[n]) for n in range(processes))
            _wait(started, time.monotonic() + seconds)
        finally:
            for process in started:
                process.kill()
                process.wait()
        answers = [json.loads(line) for line in outputs[0].read_text(encoding="utf-8").splitlines()]
        if len(answers) != len(rows):
            said = " ".join(" ".join(path.read_text(encoding="utf-8").split())[-600:] for path in errors)
            raise InputError(f"{len(rows) - len(answers)} of {len(rows)} rows have no answer: {said}")
    for row, answer in zip(rows, answers, strict=True):
        yield dataclasses.asdict(row) | answer


def page(facts: Mapping[str, Any]) -> str:
    """The table as Markdown."""
    versions = ", ".join(
        f"{name} {facts['versions'][name]}" for name in ("jax", "numpy") if facts["versions"].get(name)
    )
    lines = [
        "# Sharded equality",
        "",
        "Attention dealt to many devices, held to the float64 oracle: largest error relative to the largest value, of",
        "output, dq, dk and dv; in brackets that of the same backend on one device. `ok`: each within what the judge",
        "allows (twice the error of `standard` on one device plus a floor, docs/design.md). Devices of a host share",
        "its cores, so there is no time here. `splash` runs in Pallas' interpreter.",
        "",
        f"{facts['date']}, {facts['cpu']}, {versions}, revision {facts['git_revision']}; `attnsuite sharded`.",
    ]
    for part in facts["parts"]:
        lines += [
            "",
            f"## {part['title']}",
            "",
            "| backend | mesh | keys by | problem | status | output | dq | dk | dv |",
        ]
        lines += ["|---|---|---|---|---|---|---|---|---|"]
        lines += [_line(row) for row in part["rows"] if row["status"] != "refused"]
        refused = [row for row in part["rows"] if row["status"] == "refused"]
        if refused:
            lines += ["", "Refused before anything is traced:", ""]
            lines += [
                f"- `{row['backend']}`, {_mesh(row)}, {_keys_by(row)}, {row['problem']}: {' '.join(row['reasons'])}"
                for row in refused
            ]
    return "\n".join(lines) + "\n"


def _line(row: Mapping[str, Any]) -> str:
    if "errors" not in row:
        cells = [" ".join(row["reasons"]), "", "", ""]
    else:
        cells = [_error(row, name) for name in ("output", "dq", "dk", "dv")]
    return (
        "| "
        + " | ".join([f"`{row['backend']}`", _mesh(row), _keys_by(row), row["problem"], row["status"], *cells])
        + " |"
    )


def _error(row: Mapping[str, Any], name: str) -> str:
    if name not in row["errors"]:
        return ""
    here, alone = (
        ("not finite" if x is None else f"{x:.1e}") for x in (row["errors"][name], row["errors_of_one_device"][name])
    )
    return f"{here} ({alone})"


def _mesh(row: Mapping[str, Any]) -> str:
    return " x ".join(f"{name} {size}" for name, size in row["shape"].items())


def _keys_by(row: Mapping[str, Any]) -> str:
    return row["exchange"] if "context" in row["shape"] else ""


def _start(request: Mapping[str, Any], devices: int, out: Path, err: Path) -> subprocess.Popen[bytes]:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    variables = {
        "XLA_FLAGS": flags.strip(),
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "NPROC": str(max(16, 2 * devices)),  # threads: a device that waits for another keeps one
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    with out.open("wb") as stdout, err.open("wb") as stderr:
        return subprocess.Popen(  # noqa: S603 (one of this package's own modules)
            [sys.executable, "-P", "-m", "attnsuite.suite.sharded_worker", json.dumps(request)],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=os.environ | variables,
        )


def _wait(started: Sequence[subprocess.Popen[bytes]], end: float) -> None:
    """Until all have ended, or one has failed, for which the others would wait."""
    while any(process.poll() is None for process in started):
        if time.monotonic() > end or any(process.poll() not in (None, 0) for process in started):
            return
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
