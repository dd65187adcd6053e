"""The cells of one case, side by side: each in its own process, taking turns sample by sample.

One process computes at a time, so nobody measures another's noise; turns alternate, so that a machine that
slows down slows all of them, and ratios hold. A cell that fails, hangs or dies becomes a record and leaves the
others running.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from .. import peers
from ..cases import Case, OpCase, RetrievalCase, SelectionCase, StackCase, TextCase, problem_of
from ..errors import CellFailure, InputError
from ..measure.judge import judged_case
from ..measure.memory import machine_bytes
from ..measure.speed import Sampling
from ..record import Environment, Record, RecordError, Status, TensorError
from .probe import CellPlan
from .process import Worker

_REFERENCE_SECONDS = 600.0  # at least; the oracle is slow, and its limit is not the cells'
_REFERENCE_SHARE = 0.9  # of the machine's memory


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What one cell may use: seconds for preparing, and again for all its samples; bytes of memory."""

    seconds: float
    memory: int


class Watcher(Protocol):
    """Who is told what goes on."""

    def doing(self, case: str, backend: str, what: str) -> None:
        """Work on a cell begins."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What all cells of a run share."""

    suite: str
    limits: Limits
    environment: Environment
    target: str
    text: str | None
    watcher: Watcher
    sampling: Sampling = dataclasses.field(default_factory=Sampling)


class References:
    """What cells are judged by: one process for the whole run, its results kept in a temporary directory."""

    def __init__(self, seconds: float, text: str | None = None) -> None:
        self._text = text
        self._seconds = max(seconds, _REFERENCE_SECONDS)
        self._directory = tempfile.TemporaryDirectory(prefix="attnsuite-")
        self.folder = Path(self._directory.name)
        self._worker: Worker | None = None
        self._paths: dict[tuple[Any, ...], Path] = {}

    def path(self, case: Case, mode: str | None = "native") -> Path | None:
        """The .npz of ``case`` run in ``mode``, computed on first use; None for a case that brings its own comparison.

        A forward pass is judged by the file of the same problem with gradients, where there is one. Raises
        CellFailure where the reference cannot be computed.
        """
        if isinstance(case, TextCase | RetrievalCase | StackCase):
            return None
        if isinstance(case, SelectionCase):
            # Prefill and decoding, and the gate, are held to the same logits; the schedule is made of the same file.
            case = dataclasses.replace(case, phase="prefill", schedule="greedy", anchors="")
        if isinstance(case, OpCase):
            case = judged_case(case, mode)[0]  # cases that differ only in a length beyond the oracle share one
        problem = {name: value for name, value in problem_of(case).items() if name not in ("kind", "name")}
        kinds = ("op_forward", "op_forward_backward") if case.kind == "op_forward" else (case.kind,)
        for kind in kinds:
            if (known := self._paths.get((kind, *problem.items()))) is not None:
                return known
        path = self.folder / f"{len(self._paths)}.npz"
        if self._worker is None:
            self._worker = Worker(int(_REFERENCE_SHARE * machine_bytes()))
        try:
            self._worker.ask(
                {"do": "reference", "case": problem_of(case), "path": str(path), "text": self._text}, self._seconds
            )
        except CellFailure as failure:
            self._worker.close()
            self._worker = None
            raise CellFailure(failure.status, f"there is no reference to judge by: {failure.message}") from failure
        self._paths[case.kind, *problem.items()] = path
        return path

    def close(self) -> None:
        """End the process and remove the files."""
        if self._worker is not None:
            self._worker.close()
        self._directory.cleanup()


@dataclasses.dataclass(slots=True)
class _Cell:
    """A cell on its way through a case."""

    plan: CellPlan
    started: str
    worker: Worker
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    samples: list[float] = dataclasses.field(default_factory=list)
    wall: float = 0.0
    sampling_seconds: float = 0.0


def cell_key(plan: CellPlan, target: str) -> str:
    """``case/backend/target/mode``, ``backend@n`` on n devices; where nothing runs, the mode that was asked for."""
    devices = "" if plan.devices == 1 else f"@{plan.devices}"
    return f"{plan.case}/{plan.requested}{devices}/{target}/{plan.mode or 'native'}"


def run_case(case: Case, plans: Sequence[CellPlan], references: References, context: RunContext) -> Iterator[Record]:
    """Measure the cells of ``case`` and yield their records: failures at once, samples when all are taken."""
    if isinstance(case, SelectionCase):
        yield from _one_after_another(case, plans, references, context)
        return
    cells: list[_Cell] = []
    with contextlib.ExitStack() as stack:
        for plan in plans:
            worker = stack.enter_context(
                Worker(context.limits.memory, environment=_environment(plan, references.folder))
            )
            cells.append(_Cell(plan, _now(), worker))
        context.watcher.doing(case.name, "reference", "computing what the cells are judged by")
        judged_by: dict[str | None, Path | CellFailure | None] = {}
        for mode in dict.fromkeys(plan.mode for plan in plans):
            try:
                judged_by[mode] = references.path(case, mode)
            except (CellFailure, InputError) as failure:
                judged_by[mode] = _as_failure(failure)
        ready: list[_Cell] = []
        for cell in cells:
            reference = judged_by[cell.plan.mode]
            if isinstance(reference, CellFailure):
                record = _failed(case, cell, context, reference)
            else:
                record = _prepare(case, cell, reference, context)
            if record is None:
                ready.append(cell)
            else:
                cell.worker.close()
                yield record
        if isinstance(case, TextCase | RetrievalCase):
            yield from (_record(case, cell, context, "ok") for cell in ready)
            return
        yield from _sample_in_turns(case, ready, context)


def _one_after_another(
    case: SelectionCase, plans: Sequence[CellPlan], references: References, context: RunContext
) -> Iterator[Record]:
    """Cells in which nothing is timed or weighed share one process, until one of them takes it down."""
    worker = Worker(context.limits.memory)
    try:
        context.watcher.doing(case.name, "reference", "dense logits and calibration")
        reference, failure = None, None
        try:
            reference = references.path(case)
        except (CellFailure, InputError) as found:
            failure = _as_failure(found)
        for plan in plans:
            cell = _Cell(plan, _now(), worker)
            if failure is not None:
                yield _failed(case, cell, context, failure)
                continue
            ended = _prepare(case, cell, reference, context)
            if ended is not None and ended.status != "wrong":
                worker.close()
                worker = Worker(context.limits.memory)
            yield ended or _record(case, cell, context, "ok")
    finally:
        worker.close()


def _environment(plan: CellPlan, folder: Path) -> Mapping[str, str]:
    """What a cell's process starts with: JAX takes its number of CPU devices, a library its preload, only then."""
    devices = {} if plan.devices == 1 else {"JAX_NUM_CPU_DEVICES": str(plan.devices)}
    peer = peers.worker_environment(plan.requested, folder) if plan.requested in peers.PEERS else {}
    return {**devices, **peer}


def unsupported(case: Case, plan: CellPlan, context: RunContext) -> Record:
    """The record of a cell that is not measured: refused, and what would run instead is another cell, or nothing."""
    instead = f"{plan.resolved} would run, and is a cell of its own" if plan.resolved else "nothing else can run"
    return _base(case, plan, context, "unsupported", _now(), error=f"refused; {instead}.")


def _prepare(case: Case, cell: _Cell, reference: Path | None, context: RunContext) -> Record | None:
    """Make a cell ready to be sampled; its record if it ended here."""
    context.watcher.doing(case.name, cell.plan.requested, "compiling and judging")
    request = {
        "do": "prepare",
        "case": problem_of(case),
        "mode": cell.plan.mode,
        "requested": cell.plan.requested,
        "resolved": cell.plan.resolved,
        "exact": cell.plan.exact,
        "devices": cell.plan.devices,
        "reference": None if reference is None else str(reference),
        "memory_limit": context.limits.memory,
        "text": context.text,
    }
    begin = time.perf_counter()
    try:
        cell.facts = cell.worker.ask(request, context.limits.seconds)
    except (CellFailure, InputError) as failure:
        cell.wall += time.perf_counter() - begin
        return _failed(case, cell, context, _as_failure(failure))
    cell.wall += time.perf_counter() - begin
    if cell.facts["wrong"] is not None:
        return _record(case, cell, context, "wrong", cell.facts["wrong"])
    if cell.plan.mode == "interpret":  # judged, and never timed
        return _record(case, cell, context, "ok")
    return None


def _sample_in_turns(case: Case, cells: list[_Cell], context: RunContext) -> Iterator[Record]:
    """Round after round, one sample of every cell that has not enough yet."""
    done: list[_Cell] = []
    active = list(cells)
    number = 0
    while active:
        number += 1
        for cell in tuple(active):
            context.watcher.doing(case.name, cell.plan.requested, f"sample {number}")
            begin = time.perf_counter()
            try:
                cell.samples.append(cell.worker.ask({"do": "sample"}, context.limits.seconds))
            except CellFailure as failure:
                active.remove(cell)
                cell.wall += time.perf_counter() - begin
                yield _failed(case, cell, context, failure)
                continue
            spent = time.perf_counter() - begin
            cell.wall += spent
            cell.sampling_seconds += spent
            if (
                context.sampling.enough(cell.samples, cell.facts["calls"])
                or cell.sampling_seconds > context.limits.seconds
            ):
                active.remove(cell)
                done.append(cell)
                cell.worker.close()
    yield from (_record(case, cell, context, "ok") for cell in sorted(done, key=cells.index))


def _as_failure(error: CellFailure | InputError) -> CellFailure:
    """What cannot be used in one case ends its cells; the other cases go on."""
    return error if isinstance(error, CellFailure) else CellFailure("crashed", str(error))


def _failed(case: Case, cell: _Cell, context: RunContext, failure: CellFailure) -> Record:
    return _base(case, cell.plan, context, failure.status, cell.started, error=failure.message, wall_seconds=cell.wall)


def _record(case: Case, cell: _Cell, context: RunContext, status: Status, error: str | None = None) -> Record:
    facts = cell.facts
    names = ("lower_seconds", "compile_seconds", "flops", "bytes_moved", "tokens", "quality")
    names += ("steps", "kv_bytes_per_token")
    try:
        record = _base(
            case,
            cell.plan,
            context,
            status,
            cell.started,
            error=error,
            samples=tuple(cell.samples),
            memory=facts.get("memory", {}),
            accuracy={name: TensorError(**value) for name, value in facts["accuracy"].items()},
            series={name: tuple(values) for name, values in facts.get("series", {}).items()},
            notes=tuple(facts["notes"]),
            wall_seconds=cell.wall,
            **{name: facts[name] for name in names if name in facts},
        )
    except RecordError as wrong:
        return _failed(case, cell, context, CellFailure("crashed", f"its figures cannot be recorded: {wrong}."))
    environment = Environment(**context.environment)
    if "calls" in facts:
        environment |= {"process_high_water_method": facts["memory_method"], "calls_per_sample": facts["calls"]}
    return dataclasses.replace(record, environment=environment)


def _base(case: Case, plan: CellPlan, context: RunContext, status: Status, started: str, **rest: Any) -> Record:
    return Record(
        key=cell_key(plan, context.target),
        suite=context.suite,
        case=case.name,
        kind=case.kind,
        problem=problem_of(case),
        requested=plan.requested,
        resolved=plan.resolved,
        mode=None if status == "unsupported" else plan.mode,
        devices=plan.devices,
        exact=plan.exact,
        target=context.target,
        reasons=plan.reasons,
        status=status,
        environment=context.environment,
        started=started,
        **rest,
    )


def _now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


def measured(case: Case, plan: CellPlan, backends: Sequence[str]) -> bool:
    """Whether a cell is measured: it runs, and does not merely repeat another cell of the case as a fallback."""
    return plan.mode is not None and not (plan.mode == "fallback" and plan.resolved in backends)
