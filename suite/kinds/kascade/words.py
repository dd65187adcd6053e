"""The flags of the command line about Kascade."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ...cell import Case
from ...errors import InputError
from ...names import parts_of
from .. import kind_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KascadeWords:
    """Fields of Kascade's cases that replace those of the suite; None leaves a field as it is."""

    tile_size: int | None = None
    top_k: float | None = None
    threshold: float | None = None
    max_reuse_dist: int | None = None
    schedule: str | None = None
    anchors: str | None = None
    granularity: str | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The fields that were given."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in fields.items() if value is not None}

    def flags(self) -> str:
        """The flags that were given, for a sentence."""
        return ", ".join("--" + name.replace("_", "-") for name in self.given)


def applied(words: KascadeWords, cases: Sequence[Case]) -> tuple[Case, ...]:
    """The cases with these fields, renamed and without repetitions. Raises InputError."""
    if not words.given:
        return tuple(cases)
    told = [kind_of(case.kind).told(case, words.given) for case in cases]
    if not any(told):
        raise InputError(f"{words.flags()}: no case of this suite is about Kascade; use --suite kascade.")
    return tuple(dict.fromkeys(new or case for new, case in zip(told, cases, strict=True)))


def timed_words(words: Mapping[str, Any], *, anchors: bool = True) -> dict[str, Any]:
    """The fields that a timed case takes: tile size, share of keys, number of anchors (of a list its length).

    Which layers select does not change the time.
    """
    fields = {name: words[name] for name in ("tile_size", "top_k") if name in words}
    if anchors and "anchors" in words:
        layers = parts_of(words["anchors"])
        is_list = words.get("schedule") == "manual" or len(layers) != 1
        fields["anchors"] = len(layers) if is_list or not layers[0].isdecimal() else int(layers[0])
    return fields
