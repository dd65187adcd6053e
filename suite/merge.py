"""``attnsuite report RUNS... --out DIR``: puts runs of different cases together as one.

A case is whole in one run: all its cells were measured on one machine, so no ratio of the page crosses machines. The
merged run has the records and the manifest that one run of all cases would have. Figures that compare cases (growth
with the sequence length) need equal machines, so runs of different machines are refused.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import InputError
from .record import MACHINE_KIND, Record
from .store import MANIFEST, RECORDS, Manifest, RunStore, parse_records, read_manifest, records_path
from .suites import Shard, parse_shard

_MAY_DIFFER = ("cases", "shard", "cells", "file", "text")  # in what runs that belong together may differ


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One of the runs to merge."""

    directory: Path
    manifest: Manifest
    records: tuple[Record, ...]

    @property
    def shard(self) -> Shard | None:
        """The part of the cases that this run is of."""
        return None if self.manifest.shard is None else parse_shard(self.manifest.shard)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its cases."""
        return tuple(str(case["name"]) for case in self.manifest.cases)


def merge(directories: Sequence[Path], out: Path) -> None:
    """Write to ``out`` the run that ``directories`` hold in parts. Raises InputError where they are no such parts."""
    if len(directories) < 2:
        raise InputError("--out puts two runs or more together; one run has its report in its own directory.")
    if (out / RECORDS).exists():
        raise InputError(f"{out} already has records; choose another --out.")
    parts = [_read(directory) for directory in directories]
    for part in parts[1:]:
        _check_alike(parts[0], part)
    for one, other in itertools.combinations(parts, 2):
        both = [name for name in one.names if name in other.names]
        if both:
            raise InputError(f"case {both[0]} is in {one.directory} and in {other.directory}; give one of the two.")
    parts = _in_order(parts)
    # The shards took the cases in turn; runs of other cases follow each other.
    each = [[(part, case) for case in part.manifest.cases] for part in parts]
    in_turn = itertools.zip_longest(*each) if parts[0].shard else each
    order = [item for row in in_turn for item in row if item is not None]
    records = [record for part, case in order for record in part.records if record.case == case["name"]]
    whole = dataclasses.replace(
        parts[0].manifest, cases=tuple(case for _, case in order), shard=None, cells=len(records)
    )
    with RunStore(out, resume=False) as store:
        store.append(records)
        store.settle(whole)


def _read(directory: Path) -> Part:
    """A run with a record of every cell. Raises InputError."""
    path = records_path(directory)
    manifest = read_manifest(directory)
    if manifest.verb != "run":
        raise InputError(f"{directory} was not written by attnsuite run, whose runs alone can be merged.")
    records, _, _ = parse_records(path)
    if manifest.cells is None:
        raise InputError(f"{directory} does not say how many cells it has (an older version wrote it); run it again.")
    if len(records) != manifest.cells:
        sentence = f"{len(records)} of its {manifest.cells} cells have a record"
        raise InputError(
            f"{directory} is not finished ({sentence}); run attnsuite run --resume --out {directory} first."
        )
    part = Part(directory, manifest, records)
    if not all("name" in case for case in manifest.cases):
        raise InputError(f"{directory} has a case without a name in {MANIFEST}, which attnsuite run never writes.")
    if strange := {record.case for record in records} - set(part.names):
        raise InputError(f"{directory} has records of {', '.join(sorted(strange))}, which {MANIFEST} does not name.")
    return part


def _check_alike(one: Part, other: Part) -> None:
    """Raises InputError with everything in which two runs differ and must not."""
    first, second = _facts(one), _facts(other)
    differing = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    if differing:
        what = "; ".join(f"{name.replace('_', ' ')}: {first.get(name)} and {second.get(name)}" for name in differing)
        raise InputError(f"{one.directory} and {other.directory} do not belong together ({what}).")


def _facts(part: Part) -> dict[str, Any]:
    """What all parts of one run share. A dict of versions or flags gives a fact for each of its names."""
    manifest = dataclasses.asdict(part.manifest)
    facts = {name: value for name, value in manifest.items() if name not in _MAY_DIFFER}
    nested = {f"{name} {key}": value for name in ("versions", "flags") for key, value in facts.pop(name).items()}
    names = (*MACHINE_KIND, "source_files")
    machine = {name: sorted({str(record.environment.get(name)) for record in part.records}) for name in names}
    text = part.manifest.text  # whose path may differ from machine to machine
    return facts | nested | {"text": text and (text.sha256, text.field)} | machine


def _in_order(parts: Sequence[Part]) -> list[Part]:
    """The shards by number, or the runs as they were given. Raises InputError where shards are missing."""
    numbers = {part.shard for part in parts}
    if numbers == {None}:
        return list(parts)
    counts = {shard and shard.count for shard in numbers}
    if len(counts) > 1:
        sentence = ", ".join(f"{part.directory} is {part.shard or 'no shard'}" for part in parts)
        raise InputError(f"the runs are shards of different counts ({sentence}); give all shards of one count.")
    (count,) = counts
    missing = [f"{number}/{count}" for number in range(1, (count or 0) + 1) if Shard(number, count or 0) not in numbers]
    if missing:
        raise InputError(f"shard {', '.join(missing)} is missing; give the runs of all {count} shards.")
    return sorted(parts, key=lambda part: part.shard.number if part.shard else 0)
