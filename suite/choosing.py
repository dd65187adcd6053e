"""Policies from records: the fastest exact backend of each measured problem, and the options that were tuned.

``backends/choices.py`` has the form of the file and the rules by which it is followed. Backends are compared only where
their cells shared rounds. The problems are calls of attention, and models whose layers are all of one attention type.

Of the options that ``attnsuite tune`` tried, measured candidates win by their time. For a device that is not here,
those that compile and fit come first. Among them come first those with the fewest spilled bytes, then the least
expected time (``compile/expected.py``; of few kernels and devices), then the fewest steps of the kernels' grids, then
the fewest bytes loaded, then the largest blocks; the defaults win a tie.

:func:`score` compares a policy with the records of other problems, and runs nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attnsuite.backends import AttentionSpec, Policy, load_policy
from attnsuite.backends.choices import Choice, Source, decide, merged, problem_of, to_json
from attnsuite.backends.resolve import PRIORITY

from . import files
from .compile.expected import CHIPS, expected_seconds
from .errors import InputError, as_input
from .kinds import kind_of, make_case
from .kinds.op_case import spec_of
from .kinds.tuning_case import TUNING, Trial
from .peers import PEERS
from .record import Record
from .reportable import STANDARD, program_bytes, ratio_of, shows_speed, times_of
from .statistics import Interval, median, paired_ratio
from .store import RECORDS, parse_records, records_path
from .user_function import is_reference

# Packages of a run's environment that no backend computes with.
_UNRELATED = frozenset({"python", "flax", "numpy", "scipy", "optax", "orbax-checkpoint", "torch", "transformers"})
_DEVICE, _CORES = "the device", "the number of cores"
POLICY = "policy.json"  # the name of the file
EXPECTED = ("splash", "tokamax_splash")  # backends whose kernels the expected times are of
FIRST_ROUNDS, LAST_ROUNDS = 3, 9  # samples of every candidate, and of the best few after a first look


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """One problem of a run, and the records of its exact backends that shared rounds, by backend."""

    case: str
    spec: AttentionSpec
    cells: Mapping[str, Record]

    @property
    def winner(self) -> str:
        """The backend with the smallest median."""
        return min(self.cells, key=self.seconds)

    def seconds(self, backend: str) -> float:
        """The median time of a backend."""
        return median(times_of(self.cells[backend])).value


def sources_of(directories: Sequence[Path]) -> tuple[Source, ...]:
    """The choices of these runs: of ``attnsuite run`` backends, of ``attnsuite tune`` options.

    Of the same problem a later run replaces an earlier one, and a call replaces a model. Raises InputError for a run
    that cannot be read or has nothing to choose from, and for one with unlike devices or versions.
    """
    return merged(source for directory in directories for source in _sources(directory))


def _sources(directory: Path) -> Iterator[Source]:
    if found := measured(directory):
        yield source_of(str(directory), [r for each in found for r in each.cells.values()], map(_choice, found))
    elif tuned := [
        record for record in _records(directory) if record.kind in TUNING.titles and record.facts is not None
    ]:
        yield source_of(str(directory), tuned, map(tuned_choice, tuned))
    else:
        raise InputError(
            f"{directory} has no speed of an exact backend on an attention call or a model, and no tuned "
            "options; choose from a directory that attnsuite run or attnsuite tune wrote."
        )


def source_of(name: str, records: Sequence[Record], choices: Iterable[Choice], **details: Any) -> Source:
    """The source of choices from these records. Raises InputError where devices or versions of the records differ."""
    origin, facts = _common(name, records), records[0].environment
    return Source(
        name=name,
        **origin,
        suite=records[0].suite,
        date=max(record.started for record in records)[:10],
        digest=facts.get("source"),
        git_revision=facts.get("git_revision"),
        details=details,
        choices=tuple(choices),
    )


def write_policy(path: Path, sources: Iterable[Source]) -> tuple[Source, ...]:
    """Write :func:`extended`, and return it. Raises InputError for a file that cannot be written too."""
    together = extended(path, sources)
    files.write_text(path, to_json(together))
    return together


def extended(path: Path, sources: Iterable[Source]) -> tuple[Source, ...]:
    """These choices, and those that the file has and that no newer one replaces.

    Raises InputError for a file that is no policy.
    """
    with as_input(f"{path} would be extended, but ", " Or name another file."):
        before = load_policy(path).sources if path.exists() else ()
    return merged((*before, *sources))


def _records(directory: Path) -> Sequence[Record]:
    """Raises InputError where a record is cut off: a choice would be made without its backend."""
    records, _, warning = parse_records(records_path(directory))
    if warning:
        raise InputError(f"{directory} has no whole run: the last line of {RECORDS} is damaged. End it with --resume.")
    return records


def measured(directory: Path) -> list[Measured]:
    """The problems of a run with a timed exact backend: models first, then calls of attention. Raises InputError."""
    sessions: dict[tuple[str, str | None], dict[str, Record]] = {}
    records = [record for record in _records(directory) if _counts(record)]
    if records:
        _common(str(directory), records)  # of all, before sessions are left out
    for record in records:
        key = (record.case, record.environment.get("session"))
        sessions.setdefault(key, {})[record.requested] = record
    found: dict[str, Measured] = {}
    for (case, _), cells in sessions.items():
        record = next(iter(cells.values()))
        spec = kind_of(record.kind).spec(make_case(record.problem))
        if spec is not None and (case not in found or len(cells) >= len(found[case].cells)):
            found[case] = Measured(case, spec, cells)
    return sorted(found.values(), key=lambda each: kind_of(next(iter(each.cells.values())).kind).is_call)


@dataclasses.dataclass(frozen=True, slots=True)
class Scored:
    """A problem of a held-out run: what ``auto`` takes with the policy and without, in seconds by backend."""

    case: str
    chosen: str
    listed: str
    seconds: Mapping[str, float]
    sentence: str


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """Sums over the problems of a held-out run, in seconds. ``fixed``: by backend that is asked for every time."""

    rows: tuple[Scored, ...]
    with_policy: float
    without: float
    fixed: Mapping[str, float]
    best_each: float

    @property
    def best_fixed(self) -> str:
        """The backend with the smallest sum."""
        return min(self.fixed, key=lambda name: self.fixed[name])

    @property
    def over_fixed(self) -> float:
        """Time of ``auto`` with the policy relative to that of the best fixed backend."""
        return self.with_policy / self.fixed[self.best_fixed]


def score(policy: Policy, directory: Path) -> Score:
    """``auto`` with ``policy`` over the problems of a run, by its records.

    Where a fixed backend has no time in a problem, what ``auto`` takes without a policy stands in, as in a fallback.
    Raises InputError for a run of another device or of other versions.
    """
    held_out = measured(directory)
    if not held_out:
        raise InputError(f"{directory} has no speed of an exact backend; there is nothing to hold the policy against.")
    here = _common(str(directory), [record for each in held_out for record in each.cells.values()])
    origins = [{name: getattr(each.source, name) for name in here} for each in policy.backends]
    if origins and here not in origins:
        what = next(name for name in here if here[name] != origins[-1][name])
        raise InputError(
            f"{directory} was measured with another {what} ({here[what]}) than the policy "
            f"({origins[-1][what]}); hold out problems of the same machine and environment."
        )
    alike = Policy(policy.name, tuple(m for m, origin in zip(policy.backends, origins, strict=True) if origin == here))
    platform = here["device"].partition(":")[0]
    rows = tuple(_score(alike, platform, each) for each in held_out)
    names = dict.fromkeys(name for row in rows for name in row.seconds)
    return Score(
        rows=rows,
        with_policy=sum(row.seconds[row.chosen] for row in rows),
        without=sum(row.seconds[row.listed] for row in rows),
        fixed={name: sum(row.seconds.get(name, row.seconds[row.listed]) for row in rows) for name in names},
        best_each=sum(min(row.seconds.values()) for row in rows),
    )


def _score(policy: Policy, platform: str, each: Measured) -> Scored:
    listed = next((name for name in PRIORITY.get(platform, ()) if name in each.cells), each.winner)
    decision = decide(policy, each.spec)
    chosen = listed if decision.backend is None or decision.backend not in each.cells else decision.backend
    return Scored(each.case, chosen, listed, {name: each.seconds(name) for name in each.cells}, decision.sentence)


def _counts(record: Record) -> bool:
    """Whether a record is the time of an exact backend on this device, as ``auto`` would run it."""
    return (
        record.exact is True
        and record.mode == "native"
        and record.requested == record.resolved
        and record.requested not in PEERS
        and not is_reference(record.requested)
        and record.devices == 1
        and shows_speed(record)
    )


def _choice(each: Measured) -> Choice:
    best, standard = each.cells[each.winner], each.cells.get(STANDARD)
    ratio = figures(None if standard is None or best is standard else ratio_of(best, standard))
    problem, memory = problem_of(each.spec), program_bytes(best)
    return Choice(case=each.case, problem=problem, backend=each.winner, memory=memory, **ratio)


def _common(name: str, records: Sequence[Record]) -> dict[str, Any]:
    """The device, a CPU's cores and the versions of all records. Raises InputError where they differ."""
    origin, *others = map(_origin, records)
    for other in others:
        for what in dict.fromkeys((*origin, *other)):
            here, there = (facts.get(what, "absent") for facts in (other, origin))
            if here != there:
                raise InputError(
                    f"{name} was measured with {what} {here} and with {there}; choose from runs that each have one "
                    "device and one set of versions."
                )
    return {"device": origin.pop(_DEVICE), "cores": origin.pop(_CORES), "versions": origin}


def _origin(record: Record) -> dict[str, Any]:
    """The device, a CPU's cores, and the version of each package, by the name that a sentence gives them."""
    facts = record.environment
    versions = {name: version for name, version in facts.get("versions", {}).items() if name not in _UNRELATED}
    return {_DEVICE: record.target, _CORES: facts.get("cores") if record.target.startswith("cpu") else None, **versions}


def expected(record: Record, trial: Trial) -> float | None:
    """The expected seconds of a candidate on a device that is not here; None where nothing is expected."""
    if record.mode != "compile" or record.requested not in EXPECTED:
        return None
    return expected_seconds(
        record.target.partition(":")[2], spec_of(TUNING.call(record.problem)), trial.options, trial.work
    )


def expected_gain(record: Record, best: Trial) -> tuple[float, float] | None:
    """The expected time over that of the defaults, and the median relative error of expected times on that device."""
    mine, default = (expected(record, trial) for trial in (best, record.facts.tried[0]))
    if mine is None or default is None:
        return None
    return mine / default, CHIPS[record.target.partition(":")[2]].error


def _plausibility(record: Record, trial: Trial) -> tuple[float, ...]:
    """Spilled bytes of all kernels together (most are the same in every trial), time, work, then the blocks' size.

    A ranking for a device that is not here is no measurement: its choice has the mode ``compile``, and no ratio.
    """
    sizes = [value for name, value in trial.options.items() if name.endswith("block_size") and isinstance(value, int)]
    spilled = sum(kernel.spilled_bytes or 0 for kernel in trial.kernels)
    steps, loaded = (trial.work.steps, trial.work.loaded_bytes) if trial.work else (0, 0)
    return spilled, expected(record, trial) or 0.0, steps, loaded, -math.prod(sizes)


def winner(record: Record) -> tuple[Trial | None, Interval | None]:
    """The chosen options of a record of ``tune``, and their time relative to the defaults if they are faster.

    Measured: the fastest candidate whose interval lies below the defaults', else the defaults. Compiled: the most
    plausible of those that compile and fit, the first of equals; None where none does.
    """
    tried: tuple[Trial, ...] = record.facts.tried
    if record.mode == "compile":
        compiled = (trial for trial in tried if trial.error is None)
        return min(compiled, key=functools.partial(_plausibility, record), default=None), None
    default, *others = tried
    contenders = [trial for trial in others if _is_timed(trial) and _is_timed(default)]
    for attempt in sorted(contenders, key=lambda trial: median(trial.samples).value):
        ratio = paired_ratio(attempt.samples, default.samples)
        if ratio is not None and ratio.high is not None and ratio.high < 1.0:
            return attempt, ratio
    return default, None


def figures(ratio: Interval | None) -> dict[str, Any]:
    """A ratio as the fields of a choice."""
    if ratio is None:
        return {}
    interval = None if ratio.low is None or ratio.high is None else (ratio.low, ratio.high)
    return {"ratio": ratio.value, "interval": interval}


def _is_timed(trial: Trial) -> bool:
    """Whether all rounds were sampled, which means that the candidate passed the first look."""
    samples = trial.samples
    return trial.error is None and len(samples) == FIRST_ROUNDS + LAST_ROUNDS and min(samples) > 0


def tuned_choice(record: Record) -> Choice:
    """The choice of a record that has facts. What else was tried is in the record."""
    best, ratio = winner(record)
    details: dict[str, Any] = {"mode": record.mode, "tried": len(record.facts.tried)}
    if best is not None and (gain := expected_gain(record, best)) is not None:
        details["expected_time_over_default"] = [round(x, 3) for x in gain]
    options: dict[str, Any] = dict(best.options) if best else {}
    problem = problem_of(spec_of(TUNING.call(record.problem)))
    return Choice(
        case=record.case, problem=problem, backend=record.requested, options=options, details=details, **figures(ratio)
    )
