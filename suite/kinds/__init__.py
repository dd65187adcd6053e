"""The table of the kinds of case, one file per kind.

A :class:`~attnsuite.suite.kinds.kind.Kind` names its cases, their rows, their reference, how a cell is made ready, and
the titles of its tables. A new kind takes a file and a line in :data:`BUILT_IN`. Another package adds a kind through
the entry-point group ``attnsuite.kinds``: the entry's name is the kind of record, its object is a Kind. An entry is
loaded when its kind is looked up. An entry that does not load raises InputError there; the other kinds go on.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import msgspec

from .. import typed
from ..cell import Case
from ..errors import InputError
from ..record import Record, RecordError
from .kind import Kind, label_of
from .kind import problem_of as problem_of

ENTRY_POINT_GROUP = "attnsuite.kinds"

# In the order of a report's tables.
BUILT_IN = (
    "attention_call:ATTENTION",
    "caller:CALLER",
    "block:BLOCK",
    "model_kind:MODEL",
    "quality_case:TEXT",
    "quality_case:CACHE",
    "serving_kind:SERVING",
    "quality_case:RETRIEVAL",
    "kascade.selection_kind:SELECTION",
    "kascade.stack_case:STACK",
    "loss_curve_kind:LOSS_CURVE",
    "sharded_case:SHARDED",
    "tuning_case:TUNING",
    "conformance_case:CONFORMANCE",
)


# The modules with what backends bring beside their rows.
EXTENSIONS = {"kascade": "kascade.extension"}


@functools.cache
def extensions() -> Mapping[str, Any]:
    """The module of each extension, by the name of its backend."""
    return {backend: importlib.import_module(f".{module}", __name__) for backend, module in EXTENSIONS.items()}


def with_flags(flags: Mapping[str, Any], cases: Sequence[Case]) -> tuple[Case, ...]:
    """The cases with the fields that flags of extensions give. Raises InputError where no case has them."""
    for extension in extensions().values():
        cases = extension.applied(flags, cases)
    return tuple(cases)


def _load(reference: str) -> Any:
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(f".{module}", __name__), attribute)


@functools.cache
def built_in() -> Mapping[str, Kind]:
    """Each kind that ships here, under every name that its records have."""
    found: dict[str, Kind] = {}
    for kind in map(_load, BUILT_IN):
        found |= dict.fromkeys(kind.titles, kind)
    return found


@functools.cache
def _entry_points() -> Mapping[str, metadata.EntryPoint]:
    """Entries of other packages by name. An entry cannot replace a kind that ships here."""
    found = {entry.name: entry for entry in metadata.entry_points(group=ENTRY_POINT_GROUP)}
    return {name: found[name] for name in sorted(found) if name not in built_in()}


def names() -> tuple[str, ...]:
    """Every kind of record: those that ship here in the order of the tables, then the others by alphabet."""
    return (*built_in(), *_entry_points())


@functools.cache
def kind_of(name: str) -> Kind:
    """The kind of a record or case. Raises InputError for an unknown name, and for a package that does not load."""
    if name in built_in():
        return built_in()[name]
    if name not in _entry_points():
        raise InputError(f"kind = {typed.quoted(name)} is not a kind of case; use one of {', '.join(names())}.")
    entry = _entry_points()[name]
    origin = f"kind {name}: entry point {entry.value} of {entry.dist.name if entry.dist else 'an unnamed package'}"
    try:
        kind = entry.load()
    except (Exception, SystemExit) as error:  # whatever a foreign package raises becomes the reason
        raise InputError(f"{origin} failed to load: {type(error).__name__}: {error}") from error
    if not isinstance(kind, Kind):
        raise InputError(f"{origin} is not a kind; it needs to be an instance of attnsuite.suite.kinds.kind.Kind.")
    if name not in kind.titles:
        raise InputError(f"{origin} makes no records of that kind; its titles are for {', '.join(kind.titles)}.")
    if kind.judges_in_subprocess and kind.shares_process:
        raise InputError(f"{origin} sets both judges_in_subprocess and shares_process; set one of them.")
    return kind


def faults() -> tuple[str, ...]:
    """A sentence for each kind of another package that cannot be used."""
    found = []
    for name in _entry_points():
        try:
            kind_of(name)
        except InputError as error:
            found.append(str(error))
    return tuple(found)


def title_of(name: str) -> str:
    """The title of the tables of a kind of record. Raises InputError as :func:`kind_of`."""
    return kind_of(name).titles[name]


def phase_of(name: str) -> str:
    """What a kind of record is about, see :class:`Kind`; empty for most kinds. Raises InputError as :func:`kind_of`."""
    return kind_of(name).phases.get(name, "")


def checked(record: Record) -> Record:
    """The record, problem and facts as its kind has them. Raises RecordError for an unknown kind, and other facts."""
    try:
        kind = kind_of(record.kind)
        wanted = kind.facts or type(None)
        facts = typed.convert({"facts": msgspec.to_builtins(record.facts)}, dict[str, wanted | None])["facts"]
    except ValueError as error:
        raise RecordError(str(error).rstrip(".")) from error
    if facts is None and wanted is not type(None) and record.status in ("ok", "wrong"):
        raise RecordError(f"facts = nothing must be a table where {record.kind} has status {record.status}")
    problem = kind.as_now(record.problem)
    unchanged = facts is None and problem == record.problem
    return record if unchanged else dataclasses.replace(record, problem=problem, facts=facts)


def make_case(fields: Mapping[str, Any]) -> Case:
    """The case with these fields, ``kind`` among them. Raises InputError naming what is accepted.

    >>> make_case({"kind": "op_forward", "sequence": 512}).name
    'forward-s512-h8k8-d64-f32'
    """
    name = fields.get("kind")
    if not isinstance(name, str):
        raise InputError(f"kind = {typed.quoted(name)} is not a kind of case; use one of {', '.join(names())}.")
    kind = kind_of(name)
    try:
        return kind.read(fields)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{label_of(fields)}: {error}.") from error
