"""The environment of a run: the device, versions, flags, revision, dates and the machine's measured limits."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import Any

from attnsuite.suite.record import Record

from .formatting import TIMES, plural, shorten
from .table import Column, Table, table

_LISTED_VALUES = 3
_PACKAGES = ("jax", "jaxlib", "python", "numpy", "scipy", "kvax", "triton", "libtpu")
_STEADY = ("versions", "source", "git_revision", "flags", "platform", "cpu", "cores", "device_kind", "device_count")
_COLUMNS = (Column("what", "what", lambda row: row[0]), Column("value", "value", lambda row: row[1]))


def by_device(records: Sequence[Record]) -> dict[str, tuple[Record, ...]]:
    """The records of each device that they were made on, devices in the order of their names."""
    names = sorted({device_of(record) for record in records})
    return {name: tuple(record for record in records if device_of(record) == name) for name in names}


def device_of(record: Record) -> str:
    """The device's name, for a CPU with its cores; the target if the environment names no device."""
    facts = record.environment
    kind = facts.get("device_kind", "").strip()
    if kind and kind.lower() != "cpu":
        count = facts.get("device_count", 1)
        return f"{count} {TIMES} {kind}" if count > 1 else kind
    cpu = " ".join(facts.get("cpu", "").split())
    if not cpu:
        return kind or record.target
    return f"{cpu}, {plural(facts['cores'], 'core')}" if "cores" in facts else cpu


def versions_of(records: Sequence[Record]) -> dict[str, str]:
    """Package -> version, the best known packages first. Several versions in one run are all named."""
    found: dict[str, list[str]] = {}
    for record in records:
        for name, version in record.environment.get("versions", {}).items():
            if version not in found.setdefault(name, []):
                found[name].append(version)
    known = {name: found[name] for name in _PACKAGES if name in found}
    return {name: " and ".join(found[name]) for name in [*known, *sorted(set(found) - set(known))] if found[name]}


def date_of(records: Sequence[Record]) -> str:
    """The day, or the first and the last day, on which the cells were started."""
    days = sorted({record.started[:10] for record in records})
    return days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"


def ended(records: Sequence[Record]) -> str | None:
    """When the last cell ended, from its start and its duration; None if a time is not readable."""
    ends = []
    for record in records:
        try:
            start = dt.datetime.fromisoformat(record.started)
            ends.append((start + dt.timedelta(seconds=record.wall_seconds or 0.0)).isoformat(timespec="seconds"))
        except (ValueError, OverflowError):
            continue
    return max(ends, default=None)


def environment_table(records: Sequence[Record]) -> Table:
    """Every recorded fact. One that differs between cells shows its range, or each of up to three values."""
    rows = [
        ("first cell started", min(record.started for record in records)),
        ("last cell ended", ended(records)),
        *((name.replace("_", " "), _several(name, values)) for name, values in _facts(records).items()),
    ]
    return table("environment", "", _COLUMNS, rows)


def differing(records: Sequence[Record]) -> tuple[str, ...]:
    """Facts that should be the same in all cells of a page, but are not."""
    several = [name for name, values in _facts(records).items() if len(values) > 1]
    return tuple(name.replace("_", " ") for name in several if name.split(" ")[0] in _STEADY)


def _facts(records: Sequence[Record]) -> dict[str, list[object]]:
    """The distinct values of each fact."""
    facts: dict[str, list[object]] = {}
    for record in records:
        for name, value in _flat(record.environment):
            if value not in facts.setdefault(name, []):
                facts[name].append(value)
    return facts


def _flat(facts: Mapping[Any, Any], prefix: str = "") -> list[tuple[str, object]]:
    flat: list[tuple[str, object]] = []
    for key, value in facts.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat += _flat(value, f"{name} ")
        elif value is not None and value not in ("", []):
            flat.append((name, value))
    return flat


def _several(name: str, values: Sequence[object]) -> str:
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(values) > 1 and len(numbers) == len(values):
        return f"{_readable(name, min(numbers))} to {_readable(name, max(numbers))}"
    listed = "; ".join(shorten(_readable(name, value)) for value in values[:_LISTED_VALUES])
    return listed if len(values) <= _LISTED_VALUES else f"{listed}; and {len(values) - _LISTED_VALUES} other values"


def _readable(name: str, value: object) -> str:
    """Sizes and rates in a unit that fits, by the name of the fact; everything else as it is."""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if "flops" in name:
        return f"{value / 1e9:.4g} GFLOP/s"
    if name.endswith("bytes_per_second"):
        return f"{value / 1e9:.4g} GB/s"
    if name.endswith(("bytes", "memory")):
        return f"{value / 2**30:.3g} GiB"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
