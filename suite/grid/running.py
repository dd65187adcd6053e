"""One cell, from the start of its process to its record: prepared, judged, sampled, and its timed calls judged too.

What a cell is judged by, and its verdict, never enter its process. Its inputs follow from seeds that it is told when
its program is compiled. Its clock is held to the clock of the present process, and its times to what the machine can
do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import re
import secrets
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from attnsuite.models import TextFile

from .. import peers, typed
from ..cell import Cell, Outcome
from ..errors import CellFailure, InputError
from ..kinds import checked, kind_of, problem_of
from ..measure import plausible, tensor_errors
from ..measure import profile as measured_profile
from ..measure.speed import Sampling
from ..plain_function import explained
from ..record import Environment, Measured, Record, RecordError
from ..statistics import FEWEST
from ..typed import Real, Scalar, Size
from ..user_function import is_reference
from . import work
from .references import References
from .shared_process import Turn

_RECHECKED = 5  # samples of a user's function of which a call is judged


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What one cell may use: seconds to get ready, as many again for all its samples, and bytes of memory."""

    seconds: float
    memory: int


class Watcher(Protocol):
    """Receives progress of the work on cells."""

    def doing(self, case: str, backend: str, what: str) -> None:
        """Work on a cell begins."""
        ...

    def warn(self, sentence: str) -> None:
        """A warning that does not stop the grid."""
        ...

    def fewer(self, cells: int) -> None:
        """The grid has ``cells`` cells fewer than it was begun with."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class RunContext:
    """What all cells of a run share. ``references`` judge their outputs."""

    suite: str
    limits: Limits
    environment: Environment
    text: TextFile | None
    watcher: Watcher
    references: References
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    profile: Path | None = None  # directory for a profile of each timed cell


def now() -> str:
    """The time to the second, ISO 8601, UTC."""
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


def record_of(cell: Cell, outcome: Outcome, *, environment: Environment, **rest: Any) -> Record:
    """The record of a cell: its request, its outcome, and ``rest`` (suite, started, samples, ...). Raises RecordError.

    Where the cell's own process refused it (the outcome has reasons), nothing was resolved.
    """
    how = {
        "process_high_water_method": outcome.memory_method,
        "calls_per_sample": outcome.calls,
        "pinned_threads": outcome.pinned_threads,
        "sampling": outcome.sampling,
        "accelerator": outcome.accelerator,
    }
    measured = {field.name: getattr(outcome, field.name) for field in dataclasses.fields(Measured)}
    if outcome.error and is_reference(cell.row) and work.UNCONFINED not in outcome.notes:
        measured["error"] = explained(outcome.error)
    record = Record(
        key=cell.key,
        case=cell.case.name,
        kind=cell.kind,
        problem=problem_of(cell.case),
        requested=cell.row,
        resolved=None if outcome.reasons else cell.resolved,
        mode=None if outcome.status == "unsupported" else cell.mode,
        devices=cell.devices,
        exact=cell.exact,
        target=cell.target,
        reasons=(*cell.reasons, *outcome.reasons),
        status=outcome.status,
        environment=environment | {name: value for name, value in how.items() if value is not None},  # pyright: ignore[reportArgumentType]
        **measured,
        **rest,
    )
    return checked(record)


def answered(answer: Any, type_: Any) -> Any:
    """The answer of a cell's process as a ``type_``. Raises CellFailure where it cannot be recorded."""
    try:
        return typed.convert(answer, type_)
    except ValueError as wrong:
        raise CellFailure("crashed", f"its figures cannot be recorded: {wrong}.") from wrong


@dataclasses.dataclass(slots=True)
class Running:
    """A cell between its start and its record. ``worker`` (a Worker or Restarting) is None in the present process.

    ``sampling_seconds`` are those that this process waited for samples, ``spent`` those that the cell's own clock
    counted meanwhile. ``names_outputs`` says that it can be asked for those of a timed call.
    """

    cell: Cell
    worker: Any = None
    started: str = dataclasses.field(default_factory=now)
    outcome: Outcome = dataclasses.field(default_factory=Outcome)
    samples: list[float] = dataclasses.field(default_factory=list)
    wall: float = 0.0
    sampling_seconds: float = 0.0
    spent: float = 0.0
    names_outputs: bool = False

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Adds the time in this context to the cell's."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.wall += time.perf_counter() - begin

    def ask(self, seconds: float, function: Callable[..., Any], *arguments: Any) -> Any:
        """The worker's answer."""
        with self.timed():
            return self.worker.ask(seconds, function, *arguments)

    def note_few_samples(self) -> None:
        """Add a note where the samples are too few for an interval."""
        if len(self.samples) < FEWEST:
            note = f"sampled {len(self.samples)} times, since a sample takes {max(self.samples):.0f} s: no interval."
            self.outcome = dataclasses.replace(self.outcome, notes=(*self.outcome.notes, note))

    def failed(self, context: RunContext, failure: CellFailure | InputError) -> Record:
        """The record of a cell that failed. Its earlier samples are dropped; the other cells and cases go on."""
        status = failure.status if isinstance(failure, CellFailure) else "crashed"
        self.outcome, self.samples = Outcome(status=status, error=str(failure)), []
        return self.record(context)

    def record(self, context: RunContext) -> Record:
        """The record of a cell that has its outcome."""
        try:
            return record_of(
                self.cell,
                self.outcome,
                suite=context.suite,
                environment=context.environment,
                started=self.started,
                wall_seconds=self.wall,
                samples=tuple(self.samples),
            )
        except RecordError as wrong:
            return self.failed(context, CellFailure("crashed", f"its figures cannot be recorded: {wrong}."))


def prepare(each: Running, reference: Path | CellFailure | InputError | None, context: RunContext) -> Record | None:
    """Make a cell ready for sampling. Returns its record where it ends here: it failed, is wrong, or is not timed."""
    if isinstance(reference, Exception):
        return each.failed(context, reference)
    context.watcher.doing(each.cell.case.name, each.cell.row, "compiling and judging")
    kind = kind_of(each.cell.kind)
    local_reference = None if kind.judges_in_subprocess else reference
    call = (
        work.prepare,
        each.cell,
        local_reference,
        context.limits.memory,
        context.text,
        isinstance(each.worker, Turn),
    )
    seconds = context.limits.seconds * kind.patience(each.cell.case)
    try:
        found = answered(each.ask(seconds, *call), _Ready)
        each.outcome, each.names_outputs = found.outcome, found.named
        if reference is not None and kind.judges_in_subprocess:
            _judge(each, reference, context)
    except (CellFailure, InputError) as failure:
        return each.failed(context, failure)
    # A rival is timed although its numbers are outside the bound: no goal is met by leaving it out.
    timed = each.outcome.status == "ok" or (each.outcome.status == "wrong" and each.cell.row in peers.PEERS)
    return None if timed and each.outcome.calls is not None else each.record(context)


def sample(each: Running, context: RunContext) -> bool:
    """Take one sample; returns whether the cell has enough. Raises CellFailure.

    Outputs of timed calls are judged: of the last sample where that costs little or the row is a function of the user,
    and of such a function also of the first samples.
    """
    before, slept, seed = each.wall, each.worker.slept, secrets.randbits(32)
    answer = each.ask(context.limits.seconds, work.sample, each.cell.key, seed)
    found = answered(answer, _Sample)
    if each.worker.slept > slept:  # the time for which the run was stopped may be in the sample
        return False
    each.samples.append(found.seconds)
    each.sampling_seconds += each.wall - before
    each.spent += found.spent
    enough = context.sampling.enough(each.samples, each.outcome.calls or 1)
    enough = enough or each.sampling_seconds > context.limits.seconds
    if each.cell.row in peers.PEERS:  # trusted, timed even where it is wrong, and not always on new inputs
        return enough
    is_user_function = is_reference(each.cell.row)
    rechecks_last = enough and (is_user_function or kind_of(each.cell.kind).rechecks_all)
    if each.names_outputs and (rechecks_last or (is_user_function and len(each.samples) <= _RECHECKED)):
        _recheck(each, seed, context)
    if enough:
        _check_plausible(each, context)
    return enough


def on_device(each: Running, context: RunContext) -> None:
    """Ask for the device's own time, after the samples: a profiler slows the host. Its failure is a note."""
    if each.outcome.sampling is None:
        return
    try:
        answer = each.ask(context.limits.seconds, work.on_device, each.cell.key, secrets.randbits(32))
        seconds, cached, state = answered(answer, tuple[tuple[Real, ...], tuple[Real, ...], dict[str, Scalar]])
    except CellFailure as failure:
        note = f"the device's own time is not known: {failure}"
        each.outcome = dataclasses.replace(each.outcome, notes=(*each.outcome.notes, note))
        return
    each.outcome = dataclasses.replace(each.outcome, device_seconds=seconds, cached_seconds=cached, accelerator=state)
    _check_plausible(each, context)


def profile(each: Running, context: RunContext) -> None:
    """Profile one more call, after the samples: a profiler slows what it watches. Its failure is a warning."""
    if context.profile is None:
        return
    context.watcher.doing(each.cell.case.name, each.cell.row, "profiling")
    devices = "" if each.cell.devices == 1 else f"-{each.cell.devices}-devices"
    row = re.sub(r"[^A-Za-z0-9._-]+", "-", each.cell.row)  # of a file's function, its path
    name, raw = f"{each.cell.case.name}-{row}{devices}", each.worker.folder / uuid.uuid4().hex
    try:
        each.worker.ask(context.limits.seconds, work.profiled, each.cell.key, raw)
        warnings = measured_profile.keep(raw, context.profile, name)
    except (CellFailure, OSError) as failure:
        warnings = (f"{name} was not profiled: {failure}",)
    for sentence in warnings:
        context.watcher.warn(sentence)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    """The answer to a request to get ready: the outcome, and whether outputs of a timed call can be named."""

    outcome: Outcome
    named: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """The answer to a request for a sample: seconds per call, and seconds for all of it by the cell's own clock."""

    seconds: Real
    spent: Real


def _judge(each: Running, reference: Path, context: RunContext) -> None:
    """Ask for the cell's outputs for inputs that it learns now, and have them judged. Raises CellFailure."""
    with _outputs(each, context, work.answer, context.references.seed) as (path, _):
        is_held = bool(each.cell.exact) or is_reference(each.cell.row)
        exact = bool(each.cell.exact) or not is_held
        accuracy = context.references.judge(each.cell.case, each.cell.mode, reference, path, exact=exact)
    each.outcome = tensor_errors.judged(dataclasses.replace(each.outcome, accuracy=accuracy), exact=is_held)


def _recheck(each: Running, seed: int, context: RunContext) -> None:
    """Have a part of a timed call judged. Raises CellFailure where it is wrong."""
    if not (each.cell.exact and each.outcome.status == "ok"):
        return  # an approximation is judged beside controls, and only whole
    with _outputs(each, context, work.saved_outputs) as (path, call):
        errors = context.references.recheck(each.cell.case, path, seed, answered(call, Size))
    if errors is not None and (sentence := tensor_errors.describe_failure(errors)):
        raise CellFailure("wrong", f"a timed call gave {sentence}")


@contextlib.contextmanager
def _outputs(
    each: Running, context: RunContext, function: Callable[..., Any], *arguments: Any
) -> Iterator[tuple[Path, Any]]:
    """The file into which ``function`` of ``work.py`` writes outputs of the cell, and its answer."""
    path = each.worker.folder / uuid.uuid4().hex
    answer = each.ask(context.limits.seconds, function, each.cell.key, *arguments, path)
    yield path, answer
    path.unlink()


def _check_plausible(each: Running, context: RunContext) -> None:
    """Raises CellFailure for times that no machine or clock explains."""
    dtype, machine = str(getattr(each.cell.case, "dtype", None)), context.environment.get("machine")
    sentence = plausible.clock(each.spent, each.sampling_seconds, len(each.samples))
    if sentence is None and machine is not None and each.cell.exact:  # an approximation may leave work out
        sentence = plausible.floor(each.outcome.device_seconds or each.samples, each.outcome, dtype, machine)
    if sentence is not None:
        raise CellFailure("wrong", f"implausible: {sentence}")
