"""The record of one cell: the only thing that tables, plots and comparisons are made from.

A run is a grid of cells (case x backend x target x mode). Each finished cell is one JSON line; nothing in
it is pickled, rounded or summarised away: raw samples stay, and whoever reads them computes the median.
Times are seconds, sizes are bytes, rates are per second.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal, get_args

SCHEMA_VERSION = 1

Status = Literal["ok", "unsupported", "oom", "timeout", "crashed", "wrong"]
CaseKind = Literal[
    "op_forward",
    "op_forward_backward",
    "op_decode",
    "model_prefill",
    "model_decode",
    "model_train",
    "perplexity",
    "retrieval",
    "kascade_text",
    "kascade_retrieval",
    "kascade_gate",
    "kascade_prefill",
    "kascade_decode",
]


class RecordError(ValueError):
    """A line that is not a record of this schema."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorError:
    """Distance of one tensor (``out``, ``dq``, ``dk``, ``dv``) from the float64 oracle.

    ``max_error`` and ``rms_error`` are relative to the oracle's largest and root-mean-square value;
    ``standard_error`` is the max_error of the standard backend on the same problem in the same dtype, and
    ``allowed`` the bound that follows from it (see ``backends/oracle.py``). An error that is not finite
    (the tensor held NaN or infinity) is None, and never passes.
    """

    max_error: float | None
    rms_error: float | None
    standard_error: float | None
    allowed: float
    passed: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One cell of a run."""

    schema: int = SCHEMA_VERSION
    key: str  # case/backend/target/mode, backend@n on n devices: unique within a run
    suite: str
    case: str
    kind: CaseKind
    problem: dict[str, Any]  # the case's own fields: shapes, dtype, mask, preset, ... (JSON scalars only)
    requested: str
    resolved: str | None  # the backend that ran, or would have run; None where none could
    mode: str | None  # native | interpret | compile | fallback; None where nothing ran
    devices: int = 1  # JAX devices among which heads or sequences were divided
    exact: bool | None
    target: str
    reasons: tuple[str, ...] = ()  # why the requested backend, or a better one, did not run
    status: Status
    error: str | None = None  # one line, for every status but ok
    notes: tuple[str, ...] = ()  # what a reader must know beside the figures, e.g. accuracy judged at a shorter length
    samples: tuple[float, ...] = ()  # seconds; sample i of every cell of a case was taken in the same round
    lower_seconds: float | None = None
    compile_seconds: float | None = None
    flops: float | None = None  # by formula, of the visible pairs only
    bytes_moved: float | None = None  # by formula: every input read once and every output written once
    tokens: int | None = None  # tokens that one sample processes, padding left out, for tokens per second
    steps: int | None = None  # passes of a model one after the other in a sample: 1 to the first token, 1 for each more
    kv_bytes_per_token: int | None = None  # what a model's cache keeps of one token, all layers together
    memory: dict[str, int | None] = dataclasses.field(default_factory=dict)
    # method -> bytes: compiled_argument, compiled_output, compiled_temp, process_high_water, device_peak;
    # in mode compile also compiled_alias, compiled_peak, compiled_generated_code
    kernels: tuple[dict[str, Any], ...] = ()  # mode compile: what backends.contract.KernelBuild says of each
    accuracy: dict[str, TensorError] = dataclasses.field(default_factory=dict)
    quality: dict[str, float] = dataclasses.field(default_factory=dict)
    # model level: perplexity, bits_per_byte, nll_per_sequence count, kl_mean, top1_agreement, recall, ...
    series: dict[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    # raw values behind a quality figure, e.g. nll per sequence, so that paired intervals can be computed
    environment: dict[str, Any] = dataclasses.field(default_factory=dict)
    started: str  # ISO 8601, UTC
    wall_seconds: float | None = None  # of the whole cell, process start included

    def to_json(self) -> str:
        """One line of JSON, keys in the order of the fields."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"), allow_nan=False)

    @staticmethod
    def from_json(line: str) -> Record:
        """The record on one line. Raises RecordError saying what is wrong with it."""
        try:
            data = json.loads(line)
        except json.JSONDecodeError as error:
            raise RecordError(f"not JSON: {error}") from error
        if not isinstance(data, dict) or data.get("schema") != SCHEMA_VERSION:
            found = data.get("schema") if isinstance(data, dict) else type(data).__name__
            raise RecordError(f"schema {found!r}; this version reads schema {SCHEMA_VERSION}.")
        fields = {field.name for field in dataclasses.fields(Record)}
        unknown = sorted(set(data) - fields)
        if unknown:
            raise RecordError(f"unknown field(s) {', '.join(unknown)}.")
        try:
            data["accuracy"] = {name: TensorError(**value) for name, value in data.get("accuracy", {}).items()}
            data["series"] = {name: tuple(value) for name, value in data.get("series", {}).items()}
            for name in ("samples", "reasons", "notes", "kernels"):
                data[name] = tuple(data.get(name, ()))
            record = Record(**data)
        except (TypeError, AttributeError) as error:
            raise RecordError(str(error)) from error
        if record.status not in get_args(Status) or record.kind not in get_args(CaseKind):
            raise RecordError(f"status {record.status!r} or kind {record.kind!r} is not one of this schema.")
        return record
