"""The command ``attnsuite`` in the process of the test."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self
from unittest import mock

import pytest

from attnsuite.backends import registry
from attnsuite.suite import diagnosis
from attnsuite.suite.cell import Cell
from attnsuite.suite.command_line import main
from attnsuite.suite.grid import executors, references, run_grid
from attnsuite.suite.grid.running import Limits, RunContext
from attnsuite.suite.kinds import problem_of
from attnsuite.suite.record import Record

# A suite file with two cases that take no time.
TINY = """
[[case]]
kind = "op_forward"
sequence = 64
heads = 2
kv_heads = 1
name = "first"

[[case]]
kind = "op_forward_backward"
sequence = 64
heads = 2
kv_heads = 2
name = "second"
"""
# A record with nothing in it.
EMPTY = Record(
    key="c/standard/cpu/native",
    suite="s",
    case="c",
    kind="op_forward",
    problem={"sequence": 64},
    requested="standard",
    resolved="standard",
    mode="native",
    exact=True,
    target="cpu",
    status="ok",
    started="2026-11-20T00:00:00+00:00",
)


def code_of(*words: object) -> object:
    """The exit code of the command with these words."""
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value.code


def cell_of(case: Any, row: str = "standard", target: str = "cpu", **changes: Any) -> Cell:
    """A cell of the case that runs natively, and as itself."""
    return Cell(
        **{"case": case, "row": row, "target": target, "resolved": row, "mode": "native", "exact": True} | changes
    )


def record_of(case: Any, row: str = "standard", **fields: Any) -> Record:
    """A record of a row that ran as itself in the case, with nothing else in it but these fields."""
    known: dict[str, Any] = {"key": f"{case.name}/{row}/cpu/native", "case": case.name, "kind": case.kind}
    known |= {"problem": problem_of(case), "requested": row, "resolved": row}
    return dataclasses.replace(EMPTY, **known | fields)


def context_of(**changes: Any) -> RunContext:
    """What the cells of a run share, on a machine of which nothing is known."""
    known: dict[str, Any] = {"suite": "s", "limits": Limits(60.0, 2**33), "environment": {}, "text": None}
    return RunContext(**known | {"watcher": mock.Mock(), "references": None} | changes)


def installed(folder: Path, entries: str, **modules: str) -> Path:
    """``folder`` as a directory with an installed package that has these modules and entry points."""
    info = folder / "made_up-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: made-up\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entries)
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def known_machine(out: Path) -> Path:
    """A new run directory where the machine's peaks are known already; measuring them takes ten seconds."""
    out.mkdir()
    machine = {"matmul_flops": {"float32": 1e11, "bfloat16": 1e11}, "copy_bytes_per_second": 1e10}
    (out / "machine.json").write_text(json.dumps(machine))
    return out


class WorkerHere:
    """As :class:`attnsuite.suite.grid.process.Worker`, without a process: answers are as JSON has them."""

    slept = 0.0

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass

    def ask(self, _: float, function: Callable[..., Any], *arguments: Any) -> Any:
        return json.loads(json.dumps(function(*arguments), default=dataclasses.asdict))


def bring_workers_here(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """Let the workers of a run be this process. They keep their files in ``place``."""

    class Here(WorkerHere):
        closed = False
        folder = place

    for module in (diagnosis, executors, references, run_grid):
        monkeypatch.setattr(module, "Worker", Here)
    monkeypatch.setattr(executors, "_share", lambda _: True)
    # A function of a file is registered, and its folder is on the path.
    monkeypatch.setattr(registry, "DEFAULT", registry.Registry())
    monkeypatch.setattr(sys, "path", [*sys.path])
