"""Tables of the fastest options: the one that ships, and those that ``attnsuite tune`` writes.

A table is JSON with one entry per tuned problem: the winning options, how they won (measured, or for an absent device
ranked by the compiler's facts), and everything else that was tried. An entry is looked up by device, dtype, grouping,
head dimension and length. Between two lengths the shorter one's entry holds; between two head dimensions the wider
one's, whose blocks also fit a narrower head.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from .contract import AttentionSpec
from .devices import Target

SCHEMA = 1
SHIPPED = "tuned.json"
_SHORT_DTYPES = ("bfloat16", "float16")


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """The best options of ``backend`` for problems of one kind. ``gradient``: of forward and backward together."""

    backend: str
    platform: str
    kind: str
    dtype: str
    grouped: bool
    head_dim: int
    gradient: bool
    length: int
    options: tuple[tuple[str, int], ...]


@functools.cache
def shipped() -> tuple[Entry, ...]:
    """The table in this package, made by the command that it names."""
    return _parse((resources.files("attnsuite.backends") / SHIPPED).read_text(encoding="utf-8"), SHIPPED)


def load(path: str | Path) -> tuple[Entry, ...]:
    """The table in a file. Raises ValueError, with a sentence, for a file that holds no table."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"tuned options {str(path)!r} cannot be read ({error.strerror}); give a file that "
                         "attnsuite tune wrote.") from error  # fmt: skip
    return _parse(text, str(path))


def from_file(path: str | Path, backend: str, target: Target, spec: AttentionSpec) -> dict[str, int]:
    """The options in the file's table for ``spec`` on ``target``: forward, and backward if the spec needs gradients.

    Raises ValueError if the file holds no table, or no entry for such a problem on this device.
    """
    entries, found = load(path), {}
    for gradient in (False, True) if spec.needs_grad else (False,):
        found |= options_for(entries, backend, target, spec, gradient=gradient)
    if not found:
        raise ValueError(
            f"tuned options {str(path)!r} have nothing for {backend} on {target} in {spec.dtype} with "
            f"head_dim={_width(spec)}; add it with attnsuite tune, or leave the option out for the defaults."
        )
    return found


def options_for(
    entries: tuple[Entry, ...], backend: str, target: Target, spec: AttentionSpec, *, gradient: bool
) -> Mapping[str, int]:
    """The table's options for ``spec``; empty if there is no entry.

    A CPU without entries of its own takes those of another CPU, or of a narrower head. Other devices do not: blocks for
    a narrow head may need more memory than a core has for a wide one. float16 without an entry of its own takes that of
    bfloat16, whose blocks have the same size.
    """
    length = min(spec.query_length, spec.key_value_length)
    grouped = spec.group_size > 1
    width = _width(spec)
    matching = [e for e in entries if (e.backend, e.platform, e.grouped, e.gradient) ==
                (backend, target.platform, grouped, gradient)]  # fmt: skip
    own = [entry for entry in matching if entry.kind == target.kind]
    matching = own if own or target.platform != "cpu" else matching
    wide = [entry for entry in matching if entry.head_dim >= width]
    if wide or target.platform != "cpu":
        matching = [entry for entry in wide if entry.head_dim == min(e.head_dim for e in wide)]
    alike = _SHORT_DTYPES if spec.dtype in _SHORT_DTYPES else (spec.dtype,)
    for dtype in (spec.dtype, *alike):
        of_dtype = sorted((e for e in matching if e.dtype == dtype), key=lambda e: e.length)
        if of_dtype:
            shorter = [entry for entry in of_dtype if entry.length <= length]
            return dict((shorter[-1] if shorter else of_dtype[0]).options)
    return {}


def _width(spec: AttentionSpec) -> int:
    return max(spec.head_dim, spec.value_head_dim or 0)


@functools.lru_cache(maxsize=8)
def _parse(text: str, name: str) -> tuple[Entry, ...]:
    try:
        data = json.loads(text)
        if (found := data["schema"]) != SCHEMA:
            raise ValueError(f"it has schema {found!r}, and this version reads {SCHEMA}")  # noqa: TRY301
        fields = [field.name for field in dataclasses.fields(Entry)]
        return tuple(
            Entry(**{**{f: entry[f] for f in fields}, "options": tuple(sorted(entry["options"].items()))})
            for entry in data["entries"]
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"tuned options {name!r} cannot be used: {error}; make them with attnsuite tune.") from error
