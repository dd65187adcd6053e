"""Tables of the fastest options: the one that ships, and those that ``attnsuite tune`` writes.

A table is JSON with one entry per tuned problem: the winning options, how they won (measured, or for an absent device
ranked by the compiler's facts, imported from a table of others), and everything else that was tried. An entry is looked
up by device, dtype, grouping, head dimension and length. Between two lengths the shorter one's entry holds; between two
head dimensions the wider one's, whose blocks also fit a narrower head. An imported entry names its source, and what
else of the problem has to be equal (``only``).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from .devices import Target
from .spec import AttentionSpec

SCHEMA = 1
SHIPPED = "tuned.json"
_SHORT_DTYPES = ("bfloat16", "float16")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """The best options of ``backend`` for problems of one kind. ``gradient``: of forward and backward together.

    ``only``: names of the spec's fields, or of facts that the backend knows, with the value that each must have.
    """

    backend: str
    platform: str
    kind: str
    dtype: str
    grouped: bool
    head_dim: int
    gradient: bool
    length: int
    options: dict[str, Any]
    only: dict[str, Any] = {}
    source: str = ""


class _Table(msgspec.Struct):
    """What is read of a table; it may have further keys."""

    schema: int
    entries: tuple[Entry, ...]


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


def over_table(
    given: Mapping[str, Any], backend: str, target: Target, spec: AttentionSpec,
    facts: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], tuple[str, ...]]:  # fmt: skip
    """The options over those of the file that ``tuned`` names, and a sentence for each source that others measured.

    The file's entries for ``spec`` on ``target`` are taken: forward, and backward if the spec needs gradients. Raises
    ValueError if the file holds no table, or no entry for such a problem on this device.
    """
    options = dict(given)
    if (path := options.pop("tuned", None)) is None:
        return options, ()
    entries, passes = load(path), (False, True) if spec.needs_grad else (False,)
    of_passes = (_entry_for(entries, backend, target, spec, facts or {}, gradient=gradient) for gradient in passes)
    if not (found := tuple(entry for entry in of_passes if entry is not None)):
        raise ValueError(
            f"tuned options {str(path)!r} have nothing for {backend} on {target} in {spec.dtype} with "
            f"head_dim={_width(spec)}; add it with attnsuite tune, or leave the option out for the defaults."
        )
    sources = dict.fromkeys(entry.source for entry in found if entry.source)
    notes = tuple(f"Block sizes follow figures that others measured: {source}." for source in sources)
    of_table = {name: value for entry in found for name, value in entry.options.items()}
    return of_table | options, notes


def options_for(
    entries: tuple[Entry, ...], backend: str, target: Target, spec: AttentionSpec, *, gradient: bool
) -> Mapping[str, Any]:
    """The table's options for ``spec``; empty if there is no entry.

    A CPU without entries of its own takes those of another CPU, or of a narrower head. Other devices do not: blocks for
    a narrow head may need more memory than a core has for a wide one. float16 without an entry of its own takes that of
    bfloat16, whose blocks have the same size.
    """
    entry = _entry_for(entries, backend, target, spec, {}, gradient=gradient)
    return {} if entry is None else entry.options


def _entry_for(
    entries: tuple[Entry, ...], backend: str, target: Target, spec: AttentionSpec, facts: Mapping[str, Any], *,
    gradient: bool,
) -> Entry | None:  # fmt: skip
    length = min(spec.query_length, spec.key_value_length)
    grouped = spec.group_size > 1
    width = _width(spec)
    matching = [e for e in entries if (e.backend, e.platform, e.grouped, e.gradient) ==
                (backend, target.platform, grouped, gradient) and _agrees(e, spec, facts)]  # fmt: skip
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
            return shorter[-1] if shorter else of_dtype[0]
    return None


def _agrees(entry: Entry, spec: AttentionSpec, facts: Mapping[str, Any]) -> bool:
    """Whether all that ``entry.only`` names has the value that it must have."""
    return all(
        (facts[name] if name in facts else getattr(spec, name, ...)) == value for name, value in entry.only.items()
    )


def _width(spec: AttentionSpec) -> int:
    return max(spec.head_dim, spec.value_head_dim or 0)


@functools.lru_cache(maxsize=8)
def _parse(text: str, name: str) -> tuple[Entry, ...]:
    try:
        table = msgspec.json.decode(text, type=_Table)
        if table.schema != SCHEMA:
            raise ValueError(f"it has schema {table.schema!r}, and this version reads {SCHEMA}")  # noqa: TRY301
    except ValueError as error:
        raise ValueError(f"tuned options {name!r} cannot be used: {error}; make them with attnsuite tune.") from error
    return table.entries
