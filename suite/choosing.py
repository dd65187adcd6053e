"""Policies from records: the fastest exact backend of each measured problem, for ``auto`` to follow.

``backends/policy.py`` has the form of the file and the rule by which ``auto`` follows it. Cells are compared only where
they shared rounds. The problems are calls of attention, and models whose layers are all of one attention type.
:func:`score` compares a policy with the records of other problems, and runs nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from attnsuite.backends import AttentionSpec, Policy
from attnsuite.backends.policy import PolicyCase, PolicyFile, PolicyRun, decide, problem_of
from attnsuite.backends.resolve import PRIORITY

from .errors import InputError
from .kinds import kind_of, make_case
from .peers import PEERS
from .record import Record
from .reportable import STANDARD, program_bytes, ratio_of, shows_speed, times_of
from .statistics import median
from .store import parse_records, records_path
from .user_function import is_reference

# Packages of a run's environment that no backend computes with.
_UNRELATED = frozenset({"python", "flax", "numpy", "scipy", "optax", "orbax-checkpoint", "torch", "transformers",
                        "tokamax"})  # fmt: skip
_DEVICE, _CORES = "the device", "the number of cores"


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


def policy_file(directories: Sequence[Path]) -> PolicyFile:
    """The policy of these runs. Of the same problem a later run replaces an earlier one, and a call replaces a model.

    Raises InputError for a run that cannot be read or has no speed of an exact backend, and for runs of unlike devices
    or versions.
    """
    cases: dict[AttentionSpec, PolicyCase] = {}
    runs, origins = [], []
    for directory in directories:
        found = measured(directory)
        if not found:
            raise InputError(f"{directory} has no speed of an exact backend on an attention call or a model; choose "
                             "from a directory that attnsuite run wrote.")  # fmt: skip
        cases |= {each.spec: _case(each, directory) for each in found}
        first = next(iter(found[0].cells.values()))
        runs.append(_run(first, directory))
        origins += [(directory, record) for each in found for record in each.cells.values()]
    device, cores, versions = _common(origins)
    return PolicyFile(device=device, cores=cores, versions=versions, runs=tuple(runs), cases=tuple(cases.values()))


def to_json(content: PolicyFile) -> str:
    """The text of a policy's file."""
    return msgspec.json.format(msgspec.json.encode(content), indent=1).decode() + "\n"


def measured(directory: Path) -> list[Measured]:
    """The problems of a run with a timed exact backend: models first, then calls of attention. Raises InputError."""
    sessions: dict[tuple[str, str | None], dict[str, Record]] = {}
    for record in parse_records(records_path(directory))[0]:
        if _counts(record):
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
    common = _common([(directory, record) for each in held_out for record in each.cells.values()])
    made = policy.content
    for what, there, here in zip(("device", "cores", "versions"), (made.device, made.cores, made.versions), common,
                                 strict=True):  # fmt: skip
        if there != here:
            raise InputError(f"{directory} was measured with another {what} ({here}) than the policy ({there}); "
                             "hold out problems of the same machine and environment.")  # fmt: skip
    rows = tuple(_score(policy, each) for each in held_out)
    names = dict.fromkeys(name for row in rows for name in row.seconds)
    return Score(
        rows=rows,
        with_policy=sum(row.seconds[row.chosen] for row in rows),
        without=sum(row.seconds[row.listed] for row in rows),
        fixed={name: sum(row.seconds.get(name, row.seconds[row.listed]) for row in rows) for name in names},
        best_each=sum(min(row.seconds.values()) for row in rows),
    )


def _score(policy: Policy, each: Measured) -> Scored:
    platform = policy.content.device.partition(":")[0]
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


def _case(each: Measured, directory: Path) -> PolicyCase:
    best, standard = each.cells[each.winner], each.cells.get(STANDARD)
    ratio = None if standard is None or best is standard else ratio_of(best, standard)
    return PolicyCase(
        case=each.case,
        run=str(directory),
        problem=problem_of(each.spec),
        backend=each.winner,
        ratio=None if ratio is None else ratio.value,
        interval=None if ratio is None or ratio.low is None or ratio.high is None else (ratio.low, ratio.high),
        memory=program_bytes(best),
    )


def _run(record: Record, directory: Path) -> PolicyRun:
    facts = record.environment
    return PolicyRun(
        directory=str(directory),
        suite=record.suite,
        date=record.started[:10],
        source=facts.get("source"),
        git_revision=facts.get("git_revision"),
    )


def _common(origins: Sequence[tuple[Path, Record]]) -> tuple[str, int | None, dict[str, str]]:
    """The device, a CPU's cores and the versions of all records. Raises InputError where they differ."""
    found = [(directory, _origin(record)) for directory, record in origins]
    first, origin = found[0]
    for directory, other in found:
        for what in dict.fromkeys((*origin, *other)):
            here, there = (facts.get(what, "absent") for facts in (other, origin))
            if here != there:
                raise InputError(
                    f"{directory} was measured with {what} {here}, {first} with {there}; a policy is for one device "
                    "and one set of versions: choose from runs that have the same."
                )
    return origin.pop(_DEVICE), origin.pop(_CORES), origin


def _origin(record: Record) -> dict[str, Any]:
    """The device, a CPU's cores, and the version of each package, by the name that a sentence gives them."""
    facts = record.environment
    versions = {name: version for name, version in facts.get("versions", {}).items() if name not in _UNRELATED}
    return {_DEVICE: record.target, _CORES: facts.get("cores") if record.target.startswith("cpu") else None, **versions}
