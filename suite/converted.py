"""Results that earlier versions wrote in formats of their own -> records. Needed once, for what is published."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from .record import Record
from .sharded import Row, record_of

_NAMES = {"output": "out"}


def sharded_records(facts: Mapping[str, Any]) -> Iterator[Record]:
    """The records of ``sharded.json``. RMS errors and those of ``standard`` were not kept; ``started`` is a day."""
    environment = {name: facts[name] for name in ("versions", "git_revision", "cpu")}
    for part, (processes, devices) in zip(facts["parts"], ((1, 8), (2, 4)), strict=True):
        for found in part["rows"]:
            row = Row(**{name: found[name] for name in ("backend", "shape", "problem", "exchange", "mode")})
            accuracy = {
                _NAMES.get(name, name): {
                    "max_error": error,
                    "rms_error": None,
                    "standard_error": None,
                    "allowed": found["allowed"][name],
                    "passed": error is not None and error <= found["allowed"][name],
                }
                for name, error in found.get("errors", {}).items()
            }
            alone = {_NAMES.get(name, name): x for name, x in found.get("errors_of_one_device", {}).items()}
            answer = {
                "status": "unsupported" if found["status"] == "refused" else found["status"],
                "reasons": found.get("reasons", ()),
                "accuracy": accuracy,
                "facts": {"shape": tuple(found.get("share", ())), "one_device": alone},
            }
            if found["status"] == "refused":
                answer["error"] = "refused before anything was traced."
            record = record_of(row, processes, devices, f"cpu:{facts['cpu']}", answer, facts["date"])
            yield dataclasses.replace(record, environment=environment)
