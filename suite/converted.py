"""Results that earlier versions wrote in formats of their own -> records. Needed once, for what is published."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .loss_curves import TrainingCase
from .record import LossCurve, Record


def curve_records(training: Mapping[str, Any], curves: Sequence[Mapping[str, Any]]) -> Iterator[Record]:
    """The records of ``curves.json`` and the lines of ``curves.jsonl``; ``started`` is a day."""
    shared = {name: training[name] for name in ("preset", "seed", "learning_rate", "optimizer")}
    cases = {
        setting["name"]: TrainingCase(**shared, setting=setting["name"], **_without(setting, "name"))
        for setting in training["settings"]
    }
    target = training["environment"]["target"]
    for curve in curves:
        case, refused = cases[curve["setting"]], curve["role"] == "refused"
        ran = "standard" if curve["role"] in ("standard", "noise", "batches") else curve["name"]
        ran = "wrong-gradients" if curve["role"] == "control" else ran
        yield Record(
            key=f"{case.name}/{curve['name']}/{target}/{'native' if refused else curve['mode']}",
            suite="curves",
            case=case.name,
            kind=case.kind,
            problem=dataclasses.asdict(case),
            requested=curve["name"],
            resolved=None if refused else ran,
            mode=None if refused else curve["mode"],
            exact=None if refused else True,
            target=target,
            reasons=tuple(curve.get("reasons", ())),
            status="unsupported" if refused else "ok",
            error="refused before anything was trained." if refused else None,
            facts=None if refused else LossCurve(role=curve["role"], losses=tuple(curve["losses"])),
            environment=training["environment"],
            started=training["date"],
        )


def _without(table: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key != name}
