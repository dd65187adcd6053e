"""The grid of ``attnsuite run`` and ``attnsuite judge``: every row on every case of a suite.

The flags are checked here. Its identity is cases, backends, text, versions, source and device.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from attnsuite.backends import names
from attnsuite.models import TextFile

from .. import files, typed
from ..cell import Case, Cell
from ..errors import CellFailure, InputError, as_input, jax_does_not_start
from ..flag_values import names_of
from ..kinds import extensions, kind_of, make_case, with_flags
from ..measure.accelerator import used_by_others
from ..measure.memory import machine_bytes
from ..measure.speed import Sampling
from ..peers import PEERS
from ..record import Environment, Machine, Record
from ..store import Manifest, TextIdentity, read_manifest, require_run
from ..suites import SUITES, ModelSuiteFlags, Shard, Suite, find_suite, model_rows, model_suite, parse_shard, select
from ..typed import Scalar
from ..user_function import digests, files_of, is_reference, known_row
from . import work
from .call import decode
from .executors import in_turns, one_after_another, refused
from .grid import Grid
from .process import Worker
from .references import References
from .running import Limits, RunContext, Watcher

MACHINE = "machine.json"
_PROBE_SECONDS = 300.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunGrid(Grid):
    """What to run, checked. ``text`` is a file for perplexity, or None for the text that ships.

    ``file`` is the path of the suite's file as the command line has it; None for a named suite. ``profile`` is a
    directory for profiles of the timed cells. ``sample_seconds`` is how long each cell is sampled; None for ten samples
    or a second. ``shard`` is the part of the requested cases that ``cases`` holds; None for all of them. ``flags`` are
    those of extensions. With ``busy`` a GPU that others use is taken.
    """

    all_cores: bool = False
    flags: Mapping[str, Scalar] = dataclasses.field(default_factory=dict)
    checkpoint: ModelSuiteFlags | None = None
    file: str | None = None
    shard: Shard | None = None
    profile: Path | None = None
    sample_seconds: float | None = None
    busy: bool = False

    def look(self) -> tuple[Environment, list[Cell]]:
        """What this machine is, and the cells of the run on it. Raises InputError."""
        others = used_by_others() if self.is_timed and not self.busy else None
        environment, cells = probe(self)
        check_idle(environment.get("target", ""), others)
        return environment, cells

    @property
    def is_timed(self) -> bool:
        """Whether a case has times that other work on the machine would lengthen."""
        return any(kind_of(case.kind).needs_ceilings for case in self.cases)

    def lasting(self, seconds: float | None) -> RunGrid:
        """With cells sampled for so long: None for ten samples or a second, of a resumed run as it began.

        Raises InputError for other seconds than the resumed run has, and for more than a cell may take.
        """
        if self.resume and seconds not in (None, self.sample_seconds):
            raise InputError(_other("--sample-seconds", self.out))
        seconds = self.sample_seconds if seconds is None else seconds
        if seconds is not None and not 0 < seconds <= self.limits.seconds:
            raise InputError(
                f"--sample-seconds {seconds:g} must be above 0 and at most the --cell-timeout of "
                f"{self.limits.seconds:g}."
            )
        return dataclasses.replace(self, sample_seconds=seconds)

    def options(self) -> dict[str, Scalar]:
        """The flags of extensions."""
        return dict(self.flags)

    def manifest(self, environment: Environment, cells: int) -> Manifest:
        """The identity of this run; that of a resumed run must be equal."""
        return dataclasses.replace(
            Grid.manifest(self, environment, cells),
            verb="run",
            all_cores=self.all_cores,
            checkpoint=None if self.checkpoint is None else self.checkpoint.as_json(),
            text=None if self.text is None else _text_identity(self.text),
            file=self.file,
            shard=None if self.shard is None else str(self.shard),
            cells=cells,
            sample_seconds=self.sample_seconds,
        )

    def measured(self, environment: Environment, watcher: Watcher, directory: Path | None) -> Environment:
        """With the machine's ceilings, if anything is timed. The cells that are computed now are of one session."""
        if self.is_timed:
            environment = {**environment, "machine": _machine(directory, watcher)}
        return {**environment, "session": uuid.uuid4().hex[:12]}

    def context(self, environment: Environment, watcher: Watcher, references: References) -> RunContext:
        """What all cells of the run share on this machine."""
        shared = Grid.context(self, environment, watcher, references)
        sampling = Sampling() if self.sample_seconds is None else Sampling.lasting(self.sample_seconds)
        return dataclasses.replace(shared, sampling=sampling, profile=self.profile)

    def compute(self, cells: Sequence[Cell], context: RunContext) -> Iterator[Record]:
        """The records of these cells, case by case: the refused ones first, then those that are measured together."""
        for _, members in itertools.groupby(cells, key=_group):
            yield from group_records(list(members), context)


def new_request(
    suite: str | ModelSuiteFlags,
    backends: str | None,
    cases: str | None,
    text: TextFile | None,
    out: Path,
    limits: Limits,
    flags: Mapping[str, Scalar] | None = None,
    shard: Shard | None = None,
) -> RunGrid:
    """The request of these flags. Raises InputError with one sentence for a name that does not exist."""
    flags = flags or {}
    requested = None if backends is None else names_of(backends, "--backends")
    if not isinstance(suite, ModelSuiteFlags):
        found = find_suite(suite)
    elif suite.suite:
        found = model_suite(suite)
    else:
        requested = list(model_rows(names() if requested is None else requested))
        found = model_suite(suite, requested)
    found = dataclasses.replace(found, cases=with_flags(flags, found.cases))
    if requested is None and flags:  # the other rows do not depend on what is swept
        requested = [row for extension in extensions().values() for row in extension.swept_rows(flags)] or None
    return RunGrid(
        suite=found.name,
        cases=_chosen(found.cases, cases, shard),
        backends=_rows(found) if requested is None else _known(requested, found.cases),
        all_cores=found.all_cores,
        flags=flags,
        checkpoint=suite if isinstance(suite, ModelSuiteFlags) else None,
        file=suite if isinstance(suite, str) and suite not in SUITES else None,
        shard=shard,
        text=None if text is None else checked_text(text).resolved(),
        out=out,
        resume=False,
        limits=limits,
    )


def resumed_request(
    suite: str | None,
    backends: str | None,
    cases: str | None,
    text: TextFile | None,
    out: Path,
    limits: Limits,
    shard: Shard | None = None,
) -> RunGrid:
    """The request of the run in ``out``. Raises InputError where the flags ask for something else."""
    require_run(out)
    manifest = read_manifest(out)
    if manifest.verb == "compile":
        raise InputError(f"{out} holds what was compiled, which is not resumed: ask for the same in another --out.")
    if manifest.verb == "tune":
        raise InputError(f"{out} holds what attnsuite tune wrote; go on with the same words and --resume.")
    if manifest.verb != "run":
        raise InputError(f"the run in {out} was written by another version (verb {manifest.verb}); start a new one.")
    if yours := [name for name in manifest.backends if is_reference(name)]:
        raise InputError(
            f"the run in {out} timed code of yours ({', '.join(yours)}), which may have changed since; start a new run."
        )
    was = None if manifest.text is None else TextFile(manifest.text.path, manifest.text.field)
    try:
        stored = RunGrid(
            suite=manifest.suite,
            cases=tuple(make_case(problem) for problem in manifest.cases),
            backends=manifest.backends,
            all_cores=manifest.all_cores,
            flags=manifest.options,
            checkpoint=None if manifest.checkpoint is None else typed.convert(manifest.checkpoint, ModelSuiteFlags),
            file=manifest.file,
            shard=None if manifest.shard is None else parse_shard(manifest.shard),
            sample_seconds=manifest.sample_seconds,
            text=text.resolved() if text else was,
            out=out,
            resume=True,
            limits=limits,
        )
    except ValueError as error:
        reason = str(error).rstrip(".")
        raise InputError(f"the run in {out} was written by another version ({reason}); start a new one.") from error
    pool = stored.cases if suite is None else with_flags(stored.flags, find_suite(suite).cases)
    # The cases that were begun are a shard already. Of a suite that is named again, the shard is taken again.
    again = None if suite is None else stored.shard
    requested = {
        "shard": stored.shard if shard is None else shard,
        "suite": stored.suite if suite is None else find_suite(suite).name,
        "cases": _chosen(pool, cases, again),
        "backends": stored.backends if backends is None else _known(names_of(backends, "--backends"), stored.cases),
    }
    for name, value in requested.items():
        if value != getattr(stored, name):
            raise InputError(_other(name, out))
    if stored.text is not None:
        checked_text(stored.text)
    return stored


def _other(name: str, out: Path) -> str:
    return (
        f"the run in {out} has other {name} than asked for; resume it with --resume --out {out} alone, "
        "or choose another --out."
    )


def check_idle(target: str, others: str | None) -> None:
    """Raise InputError where the GPU of ``target`` computes for others (:func:`used_by_others`)."""
    if others and target.startswith("cuda"):
        raise InputError(
            f"the GPU is used by {others} (nvidia-smi lists them); a run needs an idle one, or its times are too long. "
            "Wait until they have ended, choose another GPU with CUDA_VISIBLE_DEVICES, or measure all the same with "
            "--busy."
        )


def checked_text(text: TextFile) -> TextFile:
    """The text, if its file can be read. Raises InputError."""
    try:
        data = text.read()
        data.decode("utf-8")
    except OSError as error:
        raise InputError(f"text file {text.path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"text file {text.path} is not UTF-8 text (byte {error.start}); convert it, or give another."
        ) from error
    except ValueError as error:
        raise InputError(str(error)) from error
    if not data.strip():
        raise InputError(f"text file {text.path} is empty; give one with some kilobytes of text.")
    return text


def group_records(cells: Sequence[Cell], context: RunContext) -> Iterator[Record]:
    """The records of the cells of one case, or of several cases whose cells share a process."""
    running = [cell for cell in cells if cell.is_measured]
    yield from (refused(cell, context.suite, context.environment) for cell in cells if cell not in running)
    if running and kind_of(running[0].kind).shares_process:
        yield from one_after_another(running, context)
    elif running:
        yield from in_turns(running, context)


def _group(cell: Cell) -> tuple[str, str]:
    """Cells that are equal in this are computed together."""
    return cell.kind, "" if kind_of(cell.kind).cases_share_process else cell.case.name


def probe(request: RunGrid) -> tuple[Environment, list[Cell]]:
    """What this machine is, and the cells of the run on it. Raises InputError."""
    with Worker(machine_bytes(), code=files_of(request.backends)) as worker:
        try:
            answer = worker.ask(
                _PROBE_SECONDS, work.find_cells, request.backends, request.cases, request.text, request.all_cores
            )
        except CellFailure as failure:
            if functions := ", ".join(filter(is_reference, request.backends)):
                raise InputError(
                    f"it was not found out what {functions} takes: {failure.message.rstrip(' :.')}; call it by itself, "
                    "declare what it takes with backends.from_function, or leave it out."
                ) from failure
            if failure.status == "timeout":
                raise InputError(
                    f"JAX, or a backend that was asked what it takes, gave no answer within {_PROBE_SECONDS:g} s; name "
                    "the backends that answer with --backends."
                ) from failure
            raise jax_does_not_start(failure) from failure
    if source_files := digests(request.backends):
        answer["environment"]["source_files"] = source_files
    with as_input("what this machine says of itself cannot be recorded: ", "."):
        return typed.convert(answer["environment"], Environment), typed.convert(answer["cells"], list[Cell], decode)


def _chosen(pool: tuple[Case, ...], patterns: str | None, shard: Shard | None) -> tuple[Case, ...]:
    """The cases whose names match the patterns, and of these the shard."""
    matching = pool if patterns is None else select(pool, names_of(patterns, "--cases"))
    return matching if shard is None else shard.select(matching)


def _machine(directory: Path | None, watcher: Watcher) -> Machine:
    """The machine's measured ceilings: measured once per run and written to its directory, if it has one here."""
    path = None if directory is None else directory / MACHINE
    if path is not None and path.is_file():
        with as_input(f"{path}: ", "; remove it, and the machine is measured again."):
            return typed.convert(typed.read_json(path), Machine)
    watcher.doing("", "", "measuring matmul peak and copy bandwidth")
    found = measured_machine()
    if path is not None:
        files.write_json(path, dict(found))
    return found


def measured_machine() -> Machine:
    """The ceilings of this machine, measured now. Raises InputError."""
    with Worker(machine_bytes()) as worker:
        try:
            return worker.ask(_PROBE_SECONDS, work.measure_machine)
        except CellFailure as failure:
            raise InputError(f"this machine's peak cannot be measured: {failure.message}") from failure


def _text_identity(text: TextFile) -> TextIdentity:
    return TextIdentity(
        path=text.path, sha256=hashlib.sha256(Path(text.path).read_bytes()).hexdigest(), field=text.field
    )


def _rows(suite: Suite) -> tuple[str, ...]:
    """The rows measured by default: backends, the suite's peers, and the rows that only a case's kind knows."""
    extra = [kind_of(case.kind).rows(case) for case in suite.cases]
    rows = [*suite.default_backends(), *suite.peers] if not all(extra) else []
    return tuple(dict.fromkeys([*rows, *(row for each in extra for row in each)]))


def _known(wanted: Sequence[str], cases: Sequence[Case]) -> tuple[str, ...]:
    extra = {row for case in cases for row in kind_of(case.kind).rows(case)}
    return tuple(dict.fromkeys(name if name in extra else known_row(name, PEERS) for name in wanted))
