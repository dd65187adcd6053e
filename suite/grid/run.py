"""A whole run: check the request, lock the directory, probe the machine, measure the cells that have no record.

The process that does this never initialises JAX. The run's identity (cases, backends, text, versions, source, device)
is written to its directory before the first cell. A run can be resumed only where all of it still holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnsuite.backends import names

from .. import typed
from ..cell import Case, Cell
from ..errors import CellFailure, InputError, jax_does_not_start
from ..kinds import kind_of, make_case, problem_of
from ..kinds.kascade.methods import METHODS, SWEPT
from ..kinds.kascade.words import KascadeWords, applied
from ..measure.memory import machine_bytes
from ..measure.speed import Sampling
from ..model_suite import ModelSuiteWords, model_suite
from ..model_suite import rows as model_suite_rows
from ..names import names_of
from ..own import digests, is_reference, own_or_known
from ..peers import PEERS
from ..record import Environment, Machine, Record
from ..store import GridManifest, RunManifest, RunStore, TextIdentity, read_manifest
from ..suites import SUITES, Shard, Suite, find_suite, parse_shard, select
from .executors import Limits, RunContext, Watcher, is_measured, refused, run_case
from .keeping import GridWatcher, keep, opened
from .process import Worker
from .references import References, text_words

if TYPE_CHECKING:
    from attnsuite.models import TextFile

MACHINE = "machine.json"
_PROBE_SECONDS = 300.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What to run, checked. ``text`` is a file for perplexity, or None for the text that ships.

    ``file`` is the path of the suite's file as it was given; None for a named suite. ``profile`` is a directory for
    profiles of the timed cells. ``sample_seconds`` is how long each cell is sampled; None for ten samples or a second.
    ``shard`` is the part of the asked cases that ``cases`` holds; None for all of them.
    """

    suite: str
    cases: tuple[Case, ...]
    backends: tuple[str, ...]
    text: TextFile | None
    out: Path
    resume: bool
    limits: Limits
    all_cores: bool = False
    words: KascadeWords = dataclasses.field(default_factory=KascadeWords)
    checkpoint: ModelSuiteWords | None = None
    file: str | None = None
    shard: Shard | None = None
    profile: Path | None = None
    sample_seconds: float | None = None


def new_request(
    suite: str | ModelSuiteWords,
    backends: str | None,
    cases: str | None,
    text: TextFile | None,
    out: Path,
    limits: Limits,
    words: KascadeWords = KascadeWords(),  # noqa: B008 (frozen)
    shard: Shard | None = None,
) -> RunRequest:
    """The request of these flags. Raises InputError with one sentence for a name that does not exist."""
    asked = None if backends is None else names_of(backends, "--backends")
    if isinstance(suite, ModelSuiteWords):
        asked = model_suite_rows(names() if asked is None else _known(asked))
        found = model_suite(suite, kascade="kascade" in asked)
    else:
        found = find_suite(suite)
    found = dataclasses.replace(found, cases=applied(words, found.cases))
    if asked is None and len(words.combinations()) > 1:
        asked = list(SWEPT)  # the other rows do not depend on what is swept
    return RunRequest(
        suite=found.name,
        cases=_chosen(found.cases, cases, shard),
        backends=_rows(found) if asked is None else _known(asked, found.cases),
        all_cores=found.all_cores,
        words=words,
        checkpoint=suite if isinstance(suite, ModelSuiteWords) else None,
        file=suite if isinstance(suite, str) and suite not in SUITES else None,
        shard=shard,
        text=None if text is None else checked_text(text),
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
) -> RunRequest:
    """The request of the run in ``out``. Raises InputError where the given flags ask for something else."""
    manifest = read_manifest(out)
    if isinstance(manifest, GridManifest):
        command = f"attnsuite {manifest.verb}"
        raise InputError(f"{out} holds what {command} wrote; go on with {command} --resume --out {out}.")
    if not isinstance(manifest, RunManifest):
        raise InputError(f"{out} holds what was compiled, which is not resumed: ask for the same in another --out.")
    if yours := [name for name in manifest.backends if is_reference(name)]:
        raise InputError(
            f"the run in {out} timed code of yours ({', '.join(yours)}), which may have changed since; start a new run."
        )
    try:
        kept = RunRequest(
            suite=manifest.suite,
            cases=tuple(make_case(problem) for problem in manifest.cases),
            backends=manifest.backends,
            all_cores=manifest.all_cores,
            words=typed.convert(manifest.kascade, KascadeWords),
            checkpoint=None if manifest.checkpoint is None else typed.convert(manifest.checkpoint, ModelSuiteWords),
            file=manifest.file,
            shard=None if manifest.shard is None else parse_shard(manifest.shard),
            text=text or _text_of(manifest.text),
            out=out,
            resume=True,
            limits=limits,
        )
    except ValueError as error:
        said = str(error).rstrip(".")
        raise InputError(f"the run in {out} was written by another version ({said}); start a new one.") from error
    pool = kept.cases if suite is None else applied(kept.words, find_suite(suite).cases)
    # The cases that were begun are a shard already. Of a suite that is named again, the shard is taken again.
    again = None if suite is None else kept.shard
    asked = {
        "shard": kept.shard if shard is None else shard,
        "suite": kept.suite if suite is None else find_suite(suite).name,
        "cases": _chosen(pool, cases, again),
        "backends": kept.backends if backends is None else _known(names_of(backends, "--backends"), kept.cases),
    }
    for name, value in asked.items():
        if value != getattr(kept, name):
            raise InputError(
                f"the run in {out} has other {name} than asked for; resume it with --resume --out {out} alone, "
                "or choose another --out."
            )
    if kept.text is not None:
        checked_text(kept.text)
    return kept


def execute(request: RunRequest, watcher: GridWatcher) -> None:
    """Measure every cell that has no record yet. Raises InputError before anything is measured."""
    with opened(request.out, watcher, resume=request.resume) as store:
        watcher.doing("", "", "looking at the machine")
        environment, cells = probe(request)

        def compute(missing: Sequence[Cell]) -> Iterator[Record]:
            context = context_of(request, {**environment, "machine": _machine(store, watcher)}, watcher)
            with contextlib.closing(References(request.limits.seconds, context.text)) as references:
                for case in request.cases:
                    members = [cell for cell in missing if cell.case == case.name]
                    yield from case_records(case, members, references, context)

        keep(store, identity(request, environment, len(cells)), cells, compute, watcher)


def context_of(request: RunRequest, environment: Environment, watcher: Watcher) -> RunContext:
    """What the cells of a run share on one machine: they are of one session."""
    return RunContext(
        suite=request.suite,
        limits=request.limits,
        environment={**environment, "session": uuid.uuid4().hex[:12]},
        text=None if request.text is None else request.text.resolved(),
        watcher=watcher,
        sampling=Sampling() if request.sample_seconds is None else Sampling.lasting(request.sample_seconds),
        profile=request.profile,
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


def case_records(case: Case, cells: Sequence[Cell], references: References, context: RunContext) -> Iterable[Record]:
    """The records of a case's cells: the refused ones first, then those that are measured together."""
    running = [cell for cell in cells if is_measured(cell)]
    yield from (refused(cell, context) for cell in cells if cell not in running)
    if running:
        yield from run_case(case, running, references, context)


def probe(request: RunRequest) -> tuple[Environment, list[Cell]]:
    """What this machine is, and the cells of the run on it. Raises InputError."""
    question = {
        "do": "probe",
        "cases": [problem_of(case) for case in request.cases],
        "backends": list(request.backends),
        "all_cores": request.all_cores,
        "text": text_words(None if request.text is None else request.text.resolved()),
    }
    with Worker(machine_bytes()) as worker:
        try:
            answer = worker.ask(question, _PROBE_SECONDS)
        except CellFailure as failure:
            if failure.status == "timeout":
                raise InputError(
                    f"JAX, or a backend that was asked what it takes, gave no answer within {_PROBE_SECONDS:g} s; name "
                    "the backends that answer with --backends."
                ) from failure
            raise jax_does_not_start(failure) from failure
    if own := digests(request.backends):
        answer["environment"]["own"] = own
    try:
        return typed.convert(answer["environment"], Environment), typed.convert(answer["cells"], list[Cell])
    except ValueError as error:
        raise InputError(f"what this machine says of itself cannot be recorded: {error}.") from error


def _chosen(pool: tuple[Case, ...], patterns: str | None, shard: Shard | None) -> tuple[Case, ...]:
    """The cases whose names match the patterns, and of these the shard."""
    matching = pool if patterns is None else select(pool, names_of(patterns, "--cases"))
    return matching if shard is None else shard.select(matching)


def identity(request: RunRequest, environment: Mapping[str, Any], cells: int) -> RunManifest:
    """The identity of this run; that of a resumed run must be equal."""
    return RunManifest(
        suite=request.suite,
        cases=tuple(problem_of(case) for case in request.cases),
        backends=request.backends,
        all_cores=request.all_cores,
        kascade=request.words.given,
        checkpoint=None if request.checkpoint is None else request.checkpoint.as_json(),
        text=None if request.text is None else _text_identity(request.text),
        file=request.file,
        shard=None if request.shard is None else str(request.shard),
        cells=cells,
        **{name: environment[name] for name in ("versions", "source", "git_revision", "target", "flags")},
    )


def _machine(store: RunStore, watcher: Watcher) -> Machine:
    """The machine's measured ceilings: measured once per run and kept in its directory."""
    path = store.directory / MACHINE
    if path.is_file():
        try:
            return typed.convert(typed.read_json(path), Machine)
        except ValueError as error:
            raise InputError(f"{path}: {error}; remove it, and the machine is measured again.") from error
    watcher.doing("", "", "measuring matmul peak and copy bandwidth")
    found = measured_machine()
    store.write_json(MACHINE, dict(found))
    return found


def measured_machine() -> Machine:
    """The ceilings of this machine, measured now. Raises InputError."""
    with Worker(machine_bytes()) as worker:
        try:
            return worker.ask({"do": "machine"}, _PROBE_SECONDS)
        except CellFailure as failure:
            raise InputError(f"this machine's peak cannot be measured: {failure.message}") from failure


def _text_of(kept: TextIdentity | None) -> TextFile | None:
    if kept is None:
        return None
    from attnsuite.models import TextFile  # noqa: PLC0415 (flax)

    return TextFile(kept.path, kept.field)


def _text_identity(text: TextFile) -> TextIdentity:
    path = text.resolved().path
    return TextIdentity(path=path, sha256=hashlib.sha256(Path(path).read_bytes()).hexdigest(), field=text.field)


def _rows(suite: Suite) -> tuple[str, ...]:
    """The rows measured by default: backends, the suite's peers, and the rows that only a case's kind knows."""
    own = [kind_of(case.kind).rows(case) for case in suite.cases]
    backends = [name for name in names() if name not in suite.left_out]
    rows = [*backends, *suite.peers] if not all(own) else []
    return tuple(dict.fromkeys([*rows, *(row for each in own for row in each)]))


def _known(wanted: Sequence[str], cases: Sequence[Case] = ()) -> tuple[str, ...]:
    own = {row for case in cases for row in kind_of(case.kind).rows(case)}
    return tuple(
        dict.fromkeys(name if name in METHODS or name in own else own_or_known(name, PEERS) for name in wanted)
    )
