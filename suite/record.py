"""The record of one cell. Tables, plots and comparisons are made from records only.

A run is a grid of cells (case x backend x target x mode). Each finished cell is one JSON line. Its raw samples are
kept, neither rounded nor summarised; readers compute the median. Times are seconds, sizes are bytes, rates are per
second.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypedDict, get_args

from attnsuite.backends.tunable import KernelBuild

from . import typed
from .typed import Count, Real, Scalar, Size

SCHEMA_VERSION = 1

Status = Literal["ok", "unsupported", "oom", "timeout", "crashed", "wrong"]
Mode = Literal["native", "interpret", "compile", "fallback"]


class Machine(TypedDict, total=False):
    """Measured rates of a machine: FLOP/s of a matmul by dtype, bytes/s copied (read plus written), bytes/s read."""

    matmul_flops: dict[str, Real]
    copy_bytes_per_second: Real
    read_bytes_per_second: Real


class Environment(TypedDict, total=False):
    """Where a cell was measured. Sizes are bytes. ``session`` is equal for cells that shared rounds.

    ``source`` is the digest of this package's source, ``source_files`` that of each file that a row was loaded from.
    ``node`` names the machine in a run of several. ``accelerator`` is the state of a GPU (``measure/accelerator.py``):
    clocks in MHz, power limits in watts, ECC, MIG, driver, who else computes on it; where it was timed, after that.
    ``sampling`` is how samples were taken, where calls were not waited for one by one.
    """

    versions: dict[str, str]
    source: str
    source_files: dict[str, str]
    git_revision: str | None
    target: str
    device_kind: str
    device_count: Count
    device_memory: Size | None
    target_memory: Size | None
    platform: str
    cpu: str
    cores: Count
    machine_memory: Size
    flags: dict[str, str]
    clock: dict[str, Scalar]
    accelerator: dict[str, Scalar]
    machine: Machine
    session: str
    node: str
    process_high_water_method: str
    calls_per_sample: Count
    pinned_threads: Count
    sampling: str


# Facts by which two machines are of one kind. A kernel's patch level (platform) may differ: the page names it.
MACHINE_KIND = ("cpu", "cores", "device_kind", "device_count")


class RecordError(ValueError):
    """A line that is not a record of this schema."""


class ContradictionError(RecordError):
    """A record whose fields contradict each other: it was edited, since no run writes such a line."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorError:
    """Distance of one tensor (``out``, ``dq``, ``dk``, ``dv``) from the float64 oracle.

    ``max_error`` and ``rms_error`` are relative to the oracle's largest and root-mean-square value. ``standard_error``
    is the max_error of the standard backend on the same problem in the same dtype; ``allowed`` is the bound that
    follows from it (see ``backends/oracle.py``). An error is None where the tensor held NaN or infinity; it then never
    passes. ``rms_error`` and ``standard_error`` are also None where they were not kept.
    """

    max_error: Real | None
    rms_error: Real | None
    standard_error: Real | None
    allowed: Real
    passed: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What a TPU's compiler scheduled for one Pallas kernel (``compile/schedules.py``): counts, never a time.

    ``bundles`` are those of the whole kernel, ``step_bundles`` those of one step of its grid. The other figures are of
    ``step_bundles``: how many use a matrix unit; how often a vector register is read back (``fills``) or written out
    (``spills``) for want of registers; the bytes between vector memory and registers, these included. ``grid_steps`` is
    None where the dump does not say it.
    """

    kernel: str
    bundles: Size
    step_bundles: Size
    grid_steps: Size | None = None
    mxu_bundles: Size
    fills: Size
    spills: Size
    vector_bytes: Size


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """Counts of a compiled program: fusions, conditionals, and copies or transposes that are no part of a fusion.

    ``bytes_accessed`` is the compiler's own count, in which the body of a loop counts once; None where it gives none.
    """

    fusions: Size
    conditionals: Size
    copies: Size
    bytes_accessed: Real | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProgramText:
    """What the text of a compiled program shows (``measure/lint.py``); None where the text cannot tell.

    ``products`` maps the dtypes of a product, ``f32 x f32 -> f32``, to how often the program has it; the last dtype is
    what the product accumulates into. ``score_arrays`` are arrays with an element for each query and key, ``copies``
    those made from keys or values in another layout or dtype. ``operations`` counts those of the program, ``by_hand``
    those of the library's own call for the same arrays (``compile/by_hand.py``).
    """

    products: dict[str, Count]
    score_arrays: Size | None = None
    copies: Size | None = None
    operations: Operations | None = None
    by_hand: Operations | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The figures of a cell: what its process answers with (``cell.Outcome``), and what its record keeps."""

    error: str | None = None  # one line, for every status but ok
    notes: tuple[str, ...] = ()  # what a reader must know beside the figures, e.g. accuracy judged at a shorter length
    lower_seconds: Real | None = None
    compile_seconds: Real | None = None
    flops: Real | None = None  # by formula, of the visible pairs only
    bytes_moved: Real | None = None  # by formula: every input read once and every output written once
    tokens: Size | None = None  # tokens that one sample processes, padding left out, for tokens per second
    steps: Size | None = None  # passes of a model in a sample, one after the other: 1 to the first token, 1 for each
    figures: dict[str, Size | Real] = dataclasses.field(default_factory=dict)  # others, by name
    memory: dict[str, Size | None] = dataclasses.field(default_factory=dict)
    # method -> bytes: compiled_argument, compiled_output, compiled_temp, process_high_water, device_peak;
    # in mode compile also compiled_alias, compiled_peak, compiled_generated_code
    kernels: tuple[KernelBuild, ...] = ()  # mode compile
    schedules: tuple[Schedule, ...] = ()  # mode compile, for a TPU, where they were asked for
    program: ProgramText | None = None  # of one attention call
    repeats: bool | None = None  # whether a second run gave the same bits; None where a call takes over a second
    device_seconds: tuple[Real, ...] = ()  # that an accelerator computed, per call, by its profile; no rounds
    cached_seconds: tuple[Real, ...] = ()  # the same of calls whose inputs were in a GPU's L2 cache
    accuracy: dict[str, TensorError] = dataclasses.field(default_factory=dict)
    quality: dict[str, Real] = dataclasses.field(default_factory=dict)
    # model level: perplexity, bits_per_byte, nll_per_sequence count, kl_mean, top1_agreement, recall, ...
    series: dict[str, tuple[Real, ...]] = dataclasses.field(default_factory=dict)
    # raw values behind a quality figure, e.g. nll per sequence, so that paired intervals can be computed
    facts: Any = None  # what only records of its kind have, see suite/kinds; None where the cell did not run


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Record(Measured):
    """One cell of a run. Raises RecordError for a field of the wrong type, so that every record can be read again."""

    schema: Literal[1] = SCHEMA_VERSION
    key: str  # case/backend/target/mode, backend@n on n devices: unique within a run
    suite: str
    case: str
    kind: str  # of a case, as the table in suite/kinds names them
    problem: dict[str, Scalar]  # the case's own fields: shapes, dtype, mask, preset, ...
    requested: str
    resolved: str | None  # the backend that ran, or would have run; None where none could
    mode: Mode | None  # None where nothing ran
    devices: Count = 1  # JAX devices among which heads or sequences were divided
    exact: bool | None
    target: str
    reasons: tuple[str, ...] = ()  # why the requested backend, or a better one, did not run
    status: Status
    samples: tuple[Real, ...] = ()  # seconds; sample i of every cell of a case was taken in the same round
    environment: Environment = dataclasses.field(default_factory=Environment)
    started: str  # ISO 8601, UTC
    wall_seconds: Real | None = None  # of the whole cell, process start included

    def __post_init__(self) -> None:
        try:
            typed.check_fields(self)
        except ValueError as error:
            raise RecordError(str(error)) from error

    def to_json(self) -> str:
        """One line of JSON: first what was asked for and what ran, then the figures."""
        data = dataclasses.asdict(self)
        return typed.to_json({name: data[name] for name in Record.__annotations__} | data)

    @staticmethod
    def from_json(line: bytes) -> Record:
        """The record on one line. Raises RecordError saying what is wrong with it, without a full stop."""
        try:
            data = typed.parse_json(line)
            if isinstance(data, dict) and data.get("schema") != SCHEMA_VERSION:
                found = typed.quoted(data.get("schema"))
                raise RecordError(f"schema = {found}; this version reads schema {SCHEMA_VERSION}")
            return typed.convert(_as_now(data), Record)
        except ValueError as error:
            raise RecordError(str(error)) from error

    def check_agreement(self) -> None:
        """Raise ContradictionError where a field is not what the others say."""
        for name, case in (("kind", self.kind), ("name", self.case)):
            if self.problem.get(name, case) != case:
                raise ContradictionError(
                    f"problem.{name} = {typed.quoted(self.problem[name])} is not the record's, {typed.quoted(case)}"
                )
        row = self.requested if self.devices == 1 else f"{self.requested}@{self.devices}"
        modes = get_args(Mode) if self.mode is None else (self.mode,)
        keys = [f"{self.case}/{row}/{self.target}/{mode}" for mode in modes]
        if self.key not in keys:
            raise ContradictionError(
                f"key = {typed.quoted(self.key)} is not {keys[0]}, as its case, backend, target and mode say"
            )
        for name, error in self.accuracy.items():
            within = error.max_error is not None and (self.exact is False or error.max_error <= error.allowed)
            if error.passed and not within:  # an approximation has another bound (``kinds/attention_call.py``)
                size = "that is not finite" if error.max_error is None else f"of {error.max_error:g}"
                raise ContradictionError(f"{name} passed with an error {size}, and {error.allowed:g} is allowed")
            if self.status == "ok" and self.exact and not error.passed:
                raise ContradictionError(f"status = 'ok' with {name} outside its bound; such a cell is 'wrong'")


# Names that earlier versions wrote: the table in the record, the old name, the name now, and the kind of record.
_RENAMED = (
    ("environment", "own", "source_files", None),
    ("facts", "said", "message", "conformance"),
)


def _as_now(data: Any) -> Any:
    """The fields of a record, also as earlier versions wrote it.

    The bytes of a cache had a field, and some fields had other names.
    """
    if not isinstance(data, dict):
        return data
    if (size := data.pop("kv_bytes_per_token", None)) is not None:
        data["figures"] = {"kv_bytes_per_token": size}
    for name, old, new, kind in _RENAMED:
        table = data.get(name)
        if kind in (None, data.get("kind")) and isinstance(table, dict) and old in table and new not in table:
            table[new] = table.pop(old)
    return data
