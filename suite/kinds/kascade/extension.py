"""What Kascade brings to the suite beside its row in every case: flags, suites, rows, and its options in a model.

An approximate backend cannot be judged by closeness to the oracle. Its cases measure what it loses, beside controls
that have to fail. :func:`attnsuite.suite.kinds.extensions` gives this module to the grid, the suites and the verbs. Its
flags are declared in ``attnsuite.suite.verbs``, which the command line reads without JAX; here they come as data.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from attnsuite.backends.kascade import GREEDY_RULES, load_calibration, manual
from attnsuite.backends.kascade.settings import share_of_tiles

from ... import typed
from ...cell import Case
from ...errors import InputError, as_input
from ...flag_values import is_whole, names_of, parts_of, spelled
from ..kind import Kernel
from .methods import SWEPT
from .schedule_flags import ScheduleFlags
from .selection_case import SelectionCase
from .stack_case import StackCase

if TYPE_CHECKING:
    from attnsuite.models import Checkpoint, ModelConfig, Transformer

SUITES = ("kascade", "kascade-finetune")  # among the files of suite/suites/
MODEL_SUITE = "kascade-guide"  # that of the guides, made for a checkpoint: run --suite NAME --model DIR
# Beside Kascade on a checkpoint's text: dense, the best possible selection, and controls that have to fail.
ROWS = ("dense", "oracle_query", "kascade", "sinks_window", "random_tiles")
TOP_K, TILE_SIZE = 0.125, 16  # in the suite of a checkpoint, and in a model case that gives no tile_size
# Their tiles have 16 keys too. That of Llama-3.2-1B keeps 12 and that of Llama-3.1-8B keeps 8, of the 32 of 512 tokens.
GUIDES: dict[str, dict[str, Any]] = {
    "1b": {"top_k": 0.375, "schedule": "greedy-benchmark", "threshold": 0.65},
    "8b": {"top_k": 0.25, "schedule": "greedy-dynamic", "threshold": 0.1},
    "paper": {"top_k": 0.25, "schedule": "dp"},
}
GUIDE_LENGTHS = (128, 512)  # at which the guide of the TPU kernel compares it with a reference


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


def swept_rows(flags: Mapping[str, Any]) -> tuple[str, ...]:
    """The rows to measure where the flags ask for several cases in place of one; () where they do not.

    Those are the rows that depend on what is swept, and what they are compared with.
    """
    return SWEPT if len(combinations(flags)) > 1 else ()


def model_sizes(config: ModelConfig) -> Mapping[str, Any]:
    """Fields of the timed cases of a checkpoint: a small share, in short tiles, selected by a quarter of the layers."""
    return {"top_k": TOP_K, "tile_size": TILE_SIZE, "anchors": max(2, config.num_layers // 4)}


def model_cases(config: ModelConfig, shared: Mapping[str, Any], suite: str) -> tuple[Case, ...]:
    """Its loss on text in both phases, for a model whose layers are all global; or the guides' figures.

    ``shared`` has the model, the length and the number of the sequences. Raises InputError for a model without the
    cases of the guides, if these are asked for by ``suite``.
    """
    others = sorted(set(config.layer_types) - {"global"})
    if suite == MODEL_SUITE:
        if others:
            raise InputError(
                f"--model {shared['model']!r} has layers of type {', '.join(others)}; "
                f"--suite {MODEL_SUITE} is for models whose layers all see the whole context before them."
            )
        return _guide_cases(config, shared)
    sizes = model_sizes(config)
    chosen: dict[str, Any] = {**shared, **sizes, "anchors": str(sizes["anchors"])}
    phases = ("prefill", "decode") if not others else ()
    return tuple(SelectionCase(kind="kascade_text", phase=phase, **chosen) for phase in phases)


def _guide_cases(config: ModelConfig, shared: Mapping[str, Any]) -> tuple[Case, ...]:
    """What the guides of Kascade on Llama report: loss by guide and phase, one layer of each role, whole stacks.

    The guides are read in docs/how-to/coming-from.md. Each has a schedule and a number of tiles; both are measured
    beside the paper's schedule, on the same text, with the controls of every Kascade case, in the shapes of the model.
    """
    anchors = max(2, config.num_layers // 4)
    text = [
        SelectionCase(
            kind="kascade_text", phase=phase, name=f"guide-{guide}-{phase}", tile_size=TILE_SIZE,
            anchors=str(anchors) if settings["schedule"] == "dp" else "", **settings, **shared,
        )
        for guide, settings in GUIDES.items()
        for phase in ("prefill", "decode")
    ]  # fmt: skip
    shape: dict[str, Any] = {
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "tile_size": TILE_SIZE,
        "top_k": GUIDES["1b"]["top_k"],
    }
    # The parts of one layer by each kernel that a CPU has; whole stacks have a row for each.
    timed: tuple[tuple[str, int, Kernel], ...] = (
        ("layer", 1, ""),
        ("layer-flash-cpu", 1, "flash_cpu"),
        ("stack", config.num_layers, ""),
    )
    stacks = [
        StackCase(kind="kascade_prefill", name=f"guide-{what}-{length}", sequence=length, layers=layers, by_token=False,
                  anchors=min(anchors, layers), kernel=kernel, **shape)
        for length in GUIDE_LENGTHS
        for what, layers, kernel in timed
    ]  # fmt: skip
    return (*text, *stacks)


def case_options(case: Any, config: ModelConfig) -> Mapping[str, Any]:
    """The backend's options in a case of a whole model: the case's sizes, with evenly spread anchors."""
    layers, tile = config.num_layers, case.tile_size or TILE_SIZE
    count = min(case.anchors or max(2, layers // 4), layers)
    schedule = manual(tuple(i * layers // count for i in range(count)), num_layers=layers, kv_heads=config.kv_heads)
    sizes = {"min_keys": 0, "tile_size": tile, "query_tile": tile, "granularity": "tile"}
    kernel = {"kernel": case.kernel} if case.kernel else {}
    return {"top_k": float(case.top_k), "schedule": schedule, **sizes, **kernel}


def model_options(
    options: Mapping[str, Any], flags: Mapping[str, Any], model: Checkpoint | Transformer
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The backend's options from ``options`` and ``flags``, and notes on where they come from.

    They have the schedule, and the settings of the calibration where ``options`` have no other. Raises InputError for
    flags that do not fit the model.
    """
    calibration, config = flags.get("calibration"), model.config
    schedule = ScheduleFlags(**{name: value for name, value in flags.items() if name != "calibration"})
    if calibration is None and "schedule" not in flags:
        raise InputError("--anchors, --threshold and --max-reuse-dist are about a schedule; add --schedule NAME.")
    schedule.check(config.num_layers, config.kv_heads)
    if calibration is None:
        made = schedule.uncalibrated(config.num_layers, config.kv_heads)
        notes = ("calibration: none; each KV head reuses the selection of its own number",)
        return {**options, "schedule": made}, notes
    from attnsuite.models.kascade.calibration import load  # noqa: PLC0415 (flax)

    measured = load(Path(calibration), model)
    changed = [
        f"{name}={options[name]} (calibrated with {value})"
        for name, value in measured.settings.items()
        if name in options and options[name] != value
    ]
    source = f"calibration: {calibration}" + (f"; measured here with {', '.join(changed)}" if changed else "")
    return {**measured.settings, **options, "schedule": schedule.made(measured)}, (source,)
