"""What the command line says about Kascade, applied to the cases of a suite."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..cases import Case, ModelCase, SelectionCase, StackCase
from ..errors import InputError


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
        """Those that were said."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in fields.items() if value is not None}

    def flags(self) -> str:
        """The flags that were said, for a sentence."""
        return ", ".join("--" + name.replace("_", "-") for name in self.given)


def applied(words: KascadeWords, cases: Sequence[Case]) -> tuple[Case, ...]:
    """The cases with what was said in them, each named anew and each once. Raises InputError.

    The speed cases take the tile size, the share of keys and the number of anchors; their time does not depend on
    which layers select.
    """
    if not words.given:
        return tuple(cases)
    taken = [case for case in cases if isinstance(case, SelectionCase | StackCase) or _is_timed(case)]
    if not taken:
        raise InputError(f"{words.flags()}: no case of this suite is about Kascade; use --suite kascade.")
    changed = [_changed(words.given, case) for case in cases]
    return tuple(dict.fromkeys(changed))


def _is_timed(case: Case) -> bool:
    """Whether it is a pass of a model with Kascade's row told how to run."""
    return isinstance(case, ModelCase) and case.top_k is not None


def _changed(given: dict[str, Any], case: Case) -> Case:
    if isinstance(case, SelectionCase):
        if "schedule" in given and "anchors" not in given:
            given = {"anchors": "", **given}
        return dataclasses.replace(case, name="", **given)
    if isinstance(case, StackCase) or _is_timed(case):
        fields = {name: given[name] for name in ("tile_size", "top_k") if name in given}
        if getattr(case, "layers", 2) > 1 and "anchors" in given:
            layers = [word for word in given["anchors"].split(",") if word.strip()]
            is_list = given.get("schedule") == "manual" or len(layers) != 1
            fields["anchors"] = len(layers) if is_list or not layers[0].isdecimal() else int(layers[0])
        return dataclasses.replace(case, name="", **fields)
    return case
