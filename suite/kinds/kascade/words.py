"""The flags of the command line about Kascade."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attnsuite.backends.kascade import GREEDY_RULES, load_calibration
from attnsuite.backends.kascade.settings import share_of_tiles

from ...cell import Case
from ...errors import InputError
from ...names import is_whole, names_of, parts_of
from .. import kind_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KascadeWords:
    """Fields of Kascade's cases that replace those of the suite; None leaves a field as it is.

    ``threshold`` and ``max_reuse_dist`` may be several numbers separated by commas: a sweep, every case once for each
    combination.
    """

    tile_size: int | None = None
    top_k: float | None = None
    threshold: str | float | None = None
    max_reuse_dist: str | int | None = None
    schedule: str | None = None
    anchors: str | None = None
    granularity: str | None = None
    calibration: str | None = None
    kernel: str | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The fields that were given."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in fields.items() if value is not None}

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k > 1:
            hint = share_of_tiles(self.top_k, self.tile_size or 128)
            raise InputError(f"--top-k {self.top_k:g} must be a share, above 0 and at most 1.{hint}")

    def flags(self) -> str:
        """The flags that were given, for a sentence."""
        return ", ".join("--" + name.replace("_", "-") for name in self.given)

    def combinations(self) -> tuple[dict[str, Any], ...]:
        """The fields of each combination; a single one unless it is a sweep. Raises InputError."""
        swept = {
            name: _numbers(self.given[name], name, number)
            for name, number in (("threshold", float), ("max_reuse_dist", int))
            if name in self.given
        }
        made = tuple(
            {**self.given, **dict(zip(swept, each, strict=True))} for each in itertools.product(*swept.values())
        )
        if len(made) > 1 and self.schedule not in GREEDY_RULES:
            raise InputError(
                f"several values of {' and '.join('--' + name.replace('_', '-') for name in swept)} are a sweep of a "
                f"greedy rule; add --schedule {' or --schedule '.join(GREEDY_RULES)}."
            )
        return made


def _numbers(value: Any, name: str, number: Callable[[str], Any]) -> tuple[Any, ...]:
    flag = "--" + name.replace("_", "-")
    try:
        return tuple(dict.fromkeys(map(number, names_of(str(value), flag))))
    except ValueError as error:
        kind = "numbers" if number is float else "whole numbers"
        raise InputError(f"{flag} {value!r} must be {kind} separated by commas.") from error


def applied(words: KascadeWords, cases: Sequence[Case]) -> tuple[Case, ...]:
    """The cases with these fields, renamed and without repetitions. Raises InputError.

    The settings of a calibration hold where no flag says otherwise.
    """
    if not words.given:
        return tuple(cases)
    calibrated = _calibrated(words.calibration) if words.calibration is not None else {}
    combinations = [calibrated | fields for fields in words.combinations()]
    made: list[Case] = []
    concerned = False
    for case in cases:
        told = [kind_of(case.kind).told(case, fields) for fields in combinations]
        concerned = concerned or any(told)
        made += (
            [case]
            if not any(told)
            else [_named(new, fields, told) for new, fields in zip(told, combinations, strict=True)]
        )
    if not concerned:
        raise InputError(f"{words.flags()}: no case of this suite is about Kascade; use --suite kascade.")
    return tuple(dict.fromkeys(made))


def _named(case: Any, fields: Mapping[str, Any], told: Sequence[Any]) -> Case:
    """A case of a sweep with its values in its name, unless all combinations make the same case."""
    if len(set(told)) == 1:
        return case
    swept = {"th": fields.get("threshold"), "d": fields.get("max_reuse_dist")}
    name = "-".join([case.name, *(f"{short}{value:g}" for short, value in swept.items() if value is not None)])
    return dataclasses.replace(case, name=name)


def _calibrated(path: str) -> dict[str, Any]:
    try:
        settings = dict(load_calibration(path).settings)
    except ValueError as error:
        raise InputError(f"--calibration {error}") from error
    query_tile = settings.pop("query_tile")
    if query_tile != settings["tile_size"]:
        raise InputError(
            f"--calibration {path} was made with query_tile={query_tile} and tile_size={settings['tile_size']}; a run "
            "measures query tiles as long as key tiles: calibrate with attnsuite calibrate."
        )
    return settings


def timed_words(words: Mapping[str, Any], *, anchors: bool = True) -> dict[str, Any]:
    """The fields that a timed case takes: tile size, share of keys, kernel, number of anchors (of a list its length).

    Which layers select does not change the time.
    """
    fields = {name: words[name] for name in ("tile_size", "top_k", "kernel") if name in words}
    if anchors and "anchors" in words:
        layers = parts_of(words["anchors"])
        is_list = words.get("schedule") == "manual" or len(layers) != 1
        fields["anchors"] = len(layers) if is_list or not is_whole(layers[0]) else int(layers[0])
    return fields
