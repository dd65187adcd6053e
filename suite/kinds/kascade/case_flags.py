"""The flags of ``attnsuite run`` about Kascade, as fields of cases."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from attnsuite.backends.kascade import GREEDY_RULES, load_calibration
from attnsuite.backends.kascade.settings import share_of_tiles

from ... import typed
from ...cell import Case
from ...errors import InputError, as_input
from ...flag_values import is_whole, names_of, parts_of, spelled
from .selection_case import SelectionCase
from .stack_case import StackCase


class CaseFlags(TypedDict, total=False):
    """Fields of Kascade's cases that replace those of the suite.

    ``threshold`` and ``max_reuse_dist`` may be several numbers separated by commas: a sweep, every case once for each
    combination.
    """

    tile_size: int
    top_k: float
    threshold: str | float
    max_reuse_dist: str | int
    schedule: str
    anchors: str
    granularity: str
    calibration: str
    kernel: str


def combinations(flags: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The fields of each combination; a single one unless the flags are a sweep. Raises InputError."""
    swept = {
        name: _numbers(flags[name], name, number)
        for name, number in (("threshold", float), ("max_reuse_dist", int))
        if name in flags
    }
    made = [{**flags, **dict(zip(swept, each, strict=True))} for each in itertools.product(*swept.values())]
    if len(made) > 1 and flags.get("schedule") not in GREEDY_RULES:
        raise InputError(
            f"several values of {spelled(swept, ' and ')} are a sweep of a greedy rule; add --schedule "
            f"{' or --schedule '.join(GREEDY_RULES)}."
        )
    return made


def _numbers(value: Any, name: str, number: Callable[[str], Any]) -> tuple[Any, ...]:
    flag = spelled([name])
    try:
        return tuple(dict.fromkeys(map(number, names_of(str(value), flag))))
    except ValueError as error:
        kind = "numbers" if number is float else "whole numbers"
        raise InputError(f"{flag} {value!r} must be {kind} separated by commas.") from error


def applied(flags: Mapping[str, Any], cases: Sequence[Case]) -> tuple[Case, ...]:
    """The cases with these fields, renamed and without repetitions. Raises InputError.

    The settings of a calibration hold where no flag says otherwise.
    """
    if not flags:
        return tuple(cases)
    with as_input("flags of Kascade: ", "."):  # of a manifest; the command line has checked its own
        typed.convert(flags, CaseFlags)
    if (top_k := flags.get("top_k", 1)) > 1:
        hint = share_of_tiles(top_k, flags.get("tile_size", 128))
        raise InputError(f"--top-k {top_k:g} must be a share, above 0 and at most 1.{hint}")
    calibrated = _calibrated(flags["calibration"]) if "calibration" in flags else {}
    found = [calibrated | fields for fields in combinations(flags)]
    changed = [[_changed(case, fields) for fields in found] for case in cases]
    if not any(new for row in changed for new in row):
        raise InputError(f"{spelled(flags)}: no case of this suite is about Kascade; use --suite kascade.")
    limits = [name for name in ("threshold", "max_reuse_dist") if name in flags]
    if limits and not any(getattr(new, "schedule", None) in GREEDY_RULES for row in changed for new in row):
        raise InputError(
            f"{spelled(limits, ' and ')} is about a greedy rule, and no case has one; add --schedule "
            f"{' or --schedule '.join(GREEDY_RULES)}."
        )
    made = [
        case if new is None else new if len(set(row)) == 1 else _named(new, fields)
        for case, row in zip(cases, changed, strict=True)
        for new, fields in zip(row, found, strict=True)
    ]
    return tuple(dict.fromkeys(made))


def _changed(case: Any, fields: Mapping[str, Any]) -> Case | None:
    """The case with these fields; None where it has none of them."""
    if isinstance(case, SelectionCase):
        # Anchors of the suite's schedule do not fit another schedule.
        anchors = {"anchors": ""} if "schedule" in fields else {}
        return dataclasses.replace(case, name="", **{**anchors, **fields})
    if isinstance(case, StackCase):
        return dataclasses.replace(case, name="", **_timed(fields, anchors=case.layers > 1))
    gives_options = getattr(case, "top_k", None) is not None
    return dataclasses.replace(case, name="", **_timed(fields)) if gives_options else None


def _named(case: Any, fields: Mapping[str, Any]) -> Case:
    """A case of a sweep with its values in its name."""
    swept = {"th": fields.get("threshold"), "d": fields.get("max_reuse_dist")}
    name = "-".join([case.name, *(f"{short}{value:g}" for short, value in swept.items() if value is not None)])
    return dataclasses.replace(case, name=name)


def _calibrated(path: str) -> dict[str, Any]:
    with as_input("--calibration "):
        settings = dict(load_calibration(path).settings)
    query_tile = settings.pop("query_tile")
    if query_tile != settings["tile_size"]:
        raise InputError(
            f"--calibration {path} was made with query_tile={query_tile} and tile_size={settings['tile_size']}; a run "
            "measures query tiles as long as key tiles: calibrate with attnsuite calibrate."
        )
    return settings


def _timed(flags: Mapping[str, Any], *, anchors: bool = True) -> dict[str, Any]:
    """The fields that a timed case takes: tile size, share of keys, kernel, number of anchors (of a list its length).

    Which layers select does not change the time.
    """
    fields = {name: flags[name] for name in ("tile_size", "top_k", "kernel") if name in flags}
    if anchors and "anchors" in flags:
        layers = parts_of(flags["anchors"])
        is_list = flags.get("schedule") == "manual" or len(layers) != 1
        fields["anchors"] = len(layers) if is_list or not is_whole(layers[0]) else int(layers[0])
    return fields
