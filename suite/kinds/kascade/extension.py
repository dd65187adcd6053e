"""What Kascade brings to the suite: its flags, suites and rows, and its options in a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from attnsuite.backends.kascade import manual

from ...cell import Case
from ...errors import InputError
from ..extension import Extension
from . import guide_suite
from .case_flags import applied, combinations
from .methods import SWEPT
from .schedule_flags import ScheduleFlags
from .selection_case import SelectionCase

if TYPE_CHECKING:
    from attnsuite.models import Checkpoint, ModelConfig, Transformer

TOP_K, TILE_SIZE = 0.125, 16  # in the suite of a checkpoint, and in a model case that gives no tile_size


class _Kascade(Extension):
    backend: ClassVar = "kascade"
    suites: ClassVar = ("kascade", "kascade-finetune")
    model_suite: ClassVar = guide_suite.NAME
    # Beside Kascade on a text: dense, the best possible selection, and controls that have to fail.
    rows: ClassVar = ("dense", "oracle_query", "kascade", "sinks_window", "random_tiles")
    page: ClassVar = "attnsuite.reports.kascade.page"

    def apply(self, flags: Mapping[str, Any], cases: Sequence[Case]) -> tuple[Case, ...]:
        """See :func:`attnsuite.suite.kinds.kascade.case_flags.applied`."""
        return applied(flags, cases)

    def swept_rows(self, flags: Mapping[str, Any]) -> tuple[str, ...]:
        """Those that depend on what is swept, and what they are compared with."""
        return SWEPT if len(combinations(flags)) > 1 else ()

    def model_sizes(self, config: ModelConfig) -> Mapping[str, Any]:
        """A small share, in short tiles, selected by a quarter of the layers."""
        return {"top_k": TOP_K, "tile_size": TILE_SIZE, "anchors": max(2, config.num_layers // 4)}

    def model_cases(self, config: ModelConfig, shared: Mapping[str, Any], suite: str) -> tuple[Case, ...]:
        """Its loss on text in both phases, for a model whose layers are all global; or the guides' figures."""
        others = sorted(set(config.layer_types) - {"global"})
        if suite == guide_suite.NAME:
            if others:
                raise InputError(
                    f"--model {shared['model']!r} has layers of type {', '.join(others)}; "
                    f"--suite {guide_suite.NAME} is for models whose layers all see the whole context before them."
                )
            return guide_suite.guide_cases(config, shared)
        sizes = self.model_sizes(config)
        chosen: dict[str, Any] = {**shared, **sizes, "anchors": str(sizes["anchors"])}
        phases = ("prefill", "decode") if not others else ()
        return tuple(SelectionCase(kind="kascade_text", phase=phase, **chosen) for phase in phases)

    def case_options(self, case: Any, config: ModelConfig) -> Mapping[str, Any]:
        """The case's sizes, with evenly spread anchors."""
        layers, tile = config.num_layers, case.tile_size or TILE_SIZE
        count = min(case.anchors or max(2, layers // 4), layers)
        schedule = manual(tuple(i * layers // count for i in range(count)), num_layers=layers, kv_heads=config.kv_heads)
        sizes = {"min_keys": 0, "tile_size": tile, "query_tile": tile, "granularity": "tile"}
        kernel = {"kernel": case.kernel} if case.kernel else {}
        return {"top_k": float(case.top_k), "schedule": schedule, **sizes, **kernel}

    def model_options(
        self, options: Mapping[str, Any], flags: Mapping[str, Any], model: Checkpoint | Transformer
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """With the schedule, and the settings of the calibration where ``options`` have no other."""
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


KASCADE = _Kascade()
