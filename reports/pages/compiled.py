"""The page of ``attnsuite compile``: what compiles for each device, and whether it fits there.

Everything is computed from the records. The longest sequence that fits is the longest record that fits; the shortest
that does not stands beside it. The largest batch is told in the same way. The only times are those of the compilers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from attnsuite.backends.tunable import KernelBuild
from attnsuite.suite import kinds
from attnsuite.suite.compile.occupancy import WARPS, occupancy
from attnsuite.suite.record import Record, Schedule
from attnsuite.suite.reportable import scheduled_bundles

from .. import cases, environment, markdown, program_table
from ..cells import group
from ..formatting import DASH, Value, code, escape, plural
from ..page import Page, Section, reproduce_section, section
from ..read import Run, load
from ..table import MIB, Column, Table, scaled, table

METHOD = (
    (
        "Each cell is lowered and compiled in a process of its target, by the compiler that would compile it there, "
        "from shapes alone: no weights, no inputs, no accelerator, nothing run. So there are sizes here, and no speed."
    ),
    (
        "\u201cPeak\u201d is the compiler's own figure for the device's memory: arguments, outputs and temporaries at "
        "their worst moment. A cell fits where the compiler takes it and the peak is at most the device's memory; "
        "whatever else a process holds on the device is not in it. Kernels that another compiler made (Triton) are "
        "calls in that program: what they read and write is in the peak, and they allocate nothing themselves."
    ),
    (
        "Prefill and decode donate their cache, a train step (AdamW) its parameters and state; there is no "
        "rematerialisation. Parameters are kept in the preset's dtype. One device: nothing is sharded."
    ),
    (
        "The compilers of TPUs refuse what does not fit the device; the one of GPUs compiles it, and the peak says so. "
        "It gives no size of the code."
    ),
    "Compile seconds are those of this machine with other compilers at work beside them.",
)


_CASE = Column("case", "case", cases.title, merge=True)
_BACKEND = Column("backend", "backend", lambda record: record.requested)
_DEVICE = Column("target", "device", lambda record: record.target)


def is_compiled(run: Run) -> bool:
    """Whether a run is one of ``attnsuite compile``."""
    return run.manifest is not None and run.manifest.verb == "compile"


@dataclasses.dataclass(frozen=True, slots=True)
class Content:
    """The records of the sections, and the ``numbers`` of their reasons.

    ``calls`` (of attention) and ``models`` are of the backends that take one of the page's cases.
    """

    records: tuple[Record, ...]
    targets: tuple[str, ...]
    numbers: Mapping[str, str]
    command: tuple[str, ...]
    calls: tuple[Record, ...]
    models: tuple[Record, ...]


def build(run: Run) -> Page:
    """The page of such a run."""
    records = tuple(sorted(run.records, key=cases.order))
    manifest = run.manifest
    targets = (manifest.targets if manifest else ()) or tuple(sorted({r.target for r in records}))
    taking = {record.requested for record in records if record.status != "unsupported"}
    rows = [record for record in records if record.requested in taking]
    calls, models = (
        tuple(row for row in rows if kinds.kind_of(row.kind).is_call == is_call) for is_call in (True, False)
    )
    content = Content(records, targets, _numbers(records), manifest.command if manifest else (), calls, models)
    versions = [f"{name} {version}" for name, version in environment.versions_of(records).items()]
    unsupported = "that is not here" if len(targets) == 1 else "that are not here"
    title = f"Compiled for {plural(len(targets), 'device')} {unsupported}, {environment.date_of(records)}"
    sections = tuple(made for part in SECTIONS for made in part(content))
    return Page("compiled", title, f"Versions: {', '.join(versions)}", sections, group(records))


def in_short(content: Content) -> Iterator[Section]:
    """The number of cells by status, and the longest sequence and the largest batch of each model that fit."""
    tried = (("sequence", "lengths"), ("batch", "batches"))
    bounds = [sentence for field, sizes in tried for sentence in _sentences(_tried(content.models, field), sizes)]
    yield Section("in_short", "In short", (_counts(content.records),), (*bounds, *_unsupported(content)))


def _unsupported(content: Content) -> Iterator[str]:
    """A sentence that names the backends that take none of the cases; they have no row in the matrices."""
    taking = {record.requested for record in (*content.calls, *content.models)}
    first: dict[str, str] = {}
    for record in content.records:
        if record.requested not in taking:
            number = f" ({content.numbers[record.reasons[0]]})" if record.reasons else ""
            first.setdefault(record.requested, f"{code(record.requested)}{number}")
    if first:
        yield f"Unsupported in every case, and in no table but the last: {', '.join(first.values())}."


def bounds(content: Content) -> Iterator[Section]:
    """The longest sequence and the largest batch that fit, each beside the least that does not."""
    slices = " On a slice the batch is that of all chips."
    for key, field, title, phrase, more in (
        ("longest", "sequence", "Up to which length", "longest sequence of this page that fits / the shortest", ""),
        ("largest", "batch", "Up to which batch", "largest batch of this page that fits / the smallest", slices),
    ):
        rows: dict[tuple[str, str], dict[str, Value]] = {}
        for (what, backend, target), (fit, not_fit) in _tried(content.models, field).items():
            row = rows.setdefault((what, backend), {"case": what, "backend": backend})
            row[target] = f"{fit or DASH} / {not_fit or DASH}"
        if not rows:
            continue
        sentences = (
            f"The {phrase} that does not; \u201c\u2013\u201d where none was found. Between the two nothing was tried."
            f"{more}"
        )
        columns = [Column("case", "model", merge=True), Column("backend", "backend"), *map(_device, content.targets)]
        yield Section(key, title, (sentences,), tables=(table(key, "", columns, rows.values()),))


def compiled_overview(run_dir: Path) -> str:
    """The tables of a compiled run for a terminal, as Markdown.

    Raises ReportError as :func:`attnsuite.reports.read` does.
    """
    page = build(load(run_dir))
    sections = [
        part
        for part in page.sections
        if part.key in ("in_short", "ops", "models", "longest", "largest", "schedules", "reasons")
    ]
    return markdown.render([Page(page.device, page.title, page.subtitle, tuple(sections), ())])


def verdict(record: Record) -> str:
    """One of: fits, compiles (kernels alone, whose program has no size), no fit, rejected, unsupported, timeout."""
    if record.status == "ok":
        return "compiles" if record.memory.get("compiled_peak") is None else "fits"
    return {"oom": "no fit", "unsupported": "unsupported", "timeout": "timeout"}.get(record.status, "rejected")


def _numbers(records: Iterable[Record]) -> dict[str, str]:
    """Every distinct reason, numbered: R for refusals by the backend, E for the compiler's, N for a size not known."""
    refusals = dict.fromkeys(reason for record in records for reason in record.reasons)
    errors = dict.fromkeys(r.error for r in records if r.error and r.status not in ("ok", "unsupported"))
    notes = dict.fromkeys(note for record in records for note in record.notes)
    lettered = {"R": refusals, "E": errors, "N": notes}
    return {text: f"{letter}{n}" for letter, texts in lettered.items() for n, text in enumerate(texts, 1)}


def _why(record: Record, numbers: Mapping[str, str]) -> str:
    texts = record.reasons if record.status == "unsupported" else (record.error, *record.notes)
    return ", ".join(numbers[text] for text in texts if text)


_MOST_DEVICES = 6  # columns beside which a case and a backend fit GitHub's page
_PLATFORMS = {"tpu": "TPUs", "cuda": "NVIDIA GPUs"}
_COUNTED = {
    "fits": "compile and fit",
    "compiles": "compile as kernels alone, whose program has no size here",
    "no fit": "do not fit the device",
    "rejected": "are rejected by the compiler",
    "unsupported": "are unsupported by the backend",
    "timeout": "took too long",
}


def _counts(records: Sequence[Record]) -> str:
    found = [verdict(record) for record in records]
    parts = [f"{found.count(name)} {phrase}" for name, phrase in _COUNTED.items() if name in found]
    return f"{plural(len(records), 'cell')}: {', '.join(parts)}."


def _matrix(key: str, title: str, records: Sequence[Record], content: Content) -> Iterator[Section]:
    if not records:
        return
    legend = (
        "Peak memory where it compiles and fits; **no fit** where it is more than the device has; **rejected** where "
        "the compiler does not take it; unsupported where the backend says so first. Reasons by number below."
    )
    rows: dict[tuple[str, str], dict[str, Value]] = {}
    for record in records:
        row = rows.setdefault((cases.title(record), record.requested), {})
        row |= {
            "case": cases.title(record),
            "backend": record.requested,
            record.target: _short(record, content.numbers),
        }
    lead = (Column("case", "case", merge=True), Column("backend", "backend"))
    tables = tuple(
        table(name, heading, (*lead, *map(_device, targets)), found)
        for name, heading, targets in _parts(key, content.targets)
        if (found := [row for row in rows.values() if any(row.get(target) for target in targets)])
    )
    yield Section(key, title, (legend,), tables=tables)


def _parts(key: str, targets: Sequence[str]) -> Iterator[tuple[str, str, list[str]]]:
    """The tables of a matrix: key, title and devices. More devices than a page is wide are parted by platform."""
    if len(targets) <= _MOST_DEVICES:
        yield key, "", list(targets)
        return
    for platform in dict.fromkeys(target.partition(":")[0] for target in targets):
        selected = [target for target in targets if target.partition(":")[0] == platform]
        yield f"{key}_{platform}", _PLATFORMS.get(platform, platform), selected


def _device(target: str) -> Column:
    return Column(target, target.partition(":")[2] or target)


def _short(record: Record, numbers: Mapping[str, str]) -> str:
    peak = record.memory.get("compiled_peak")
    if record.status == "ok" and peak is not None:
        return _size(peak)
    why = _why(record, numbers)
    return f"{verdict(record)} ({why})" if why else verdict(record)


def _size(size: int) -> str:
    return f"{size / MIB:.1f} MiB" if size < 1024 * MIB else f"{size / 1024 / MIB:.2f} GiB"


Found = dict[tuple[str, str, str], tuple[int | None, int | None]]


def _tried(records: Iterable[Record], field: str) -> Found:
    """The largest value of ``field`` that fits, and the smallest that does not, where several were tried.

    By the model and what it does (without the field), the backend and the target.
    """
    sizes: dict[tuple[str, str, str], tuple[list[int], list[int]]] = {}
    for record in records:
        size = record.problem.get(field)
        if verdict(record) in ("fits", "no fit") and isinstance(size, int):
            problem = {name: value for name, value in record.problem.items() if name != field}
            what = f"{kinds.title_of(record.kind)}, {cases.describe(record.kind, problem)}"
            tried = sizes.setdefault((what, record.requested, record.target), ([], []))
            tried[verdict(record) == "no fit"].append(size)
    several = {key: tried for key, tried in sizes.items() if sum(map(len, tried)) > 1}
    return {key: (max(fit, default=None), min(not_fit, default=None)) for key, (fit, not_fit) in several.items()}


def _sentences(found: Found, sizes: str) -> Iterator[str]:
    """The main result of the page: how much of a model fits a device, and with which backend."""
    sentences: dict[tuple[str, str], list[str]] = {}
    for (what, backend, target), (fit, not_fit) in found.items():
        if fit is not None and not_fit is not None:
            sentences.setdefault((what, target), []).append(f"{fit} with {code(backend)}")
    for (what, target), parts in sentences.items():
        yield f"{escape(what)} on {escape(target)}: fits up to {', '.join(parts)} (of the {sizes} tried)."


HELD = (
    "Occupancy is the share of a core's warps that the resident blocks fill; a wave is one filling of the whole device "
    "with blocks. Both follow from the assembler's sizes and the grid. They are no time: a kernel with fewer warps at "
    "once may be faster, and blocks do not take equally long under a causal mask. They do not rank kernels."
)
_KERNEL = (*(column.of_first() for column in (_CASE, _DEVICE)), Column("kernel", "kernel", lambda x: _name(x[1].name)))
_CONFIGURED = (
    _BACKEND.of_first(),
    Column("configuration", "configuration", lambda x: _configuration(x[1])),
    Column("error", "the compiler's reason", lambda x: x[1].error),
)
_ASSEMBLED = (
    Column("registers", "registers per thread", lambda x: x[1].registers),
    Column("spilled", "spilled (bytes per thread)", lambda x: x[1].spilled_bytes),
    Column("shared", "shared memory (bytes)", lambda x: x[1].shared_bytes),
    Column("limit", "of (bytes)", lambda x: x[1].shared_limit_bytes),
    Column("vector", "vector loads", lambda x: x[1].vector_loads),
    Column("scalar", "scalar loads", lambda x: x[1].scalar_loads),
)
_WAVES = (
    Column("blocks", "blocks", lambda x: x[1].blocks),
    Column("held", "blocks per core (SM)", lambda x: x[2].blocks_per_core),
    Column("limits", "limited by", lambda x: ", ".join(x[2].limits)),
    Column("occupancy", "occupancy (%)", lambda x: 100 * x[2].warps / WARPS),
    Column("waves", "waves", lambda x: x[2].waves),
    Column("last", "% of the device in the last", lambda x: 100 * x[2].last_wave),
)


def kernels(content: Content) -> Iterator[Section]:
    """Kernels of GPUs, with their assembler's figures, and how many of their blocks the device holds at once."""
    rows = [(record, each, occupancy(each, record.target)) for record in content.records for each in record.kernels]
    if not rows:
        return
    assembled = [row for row in rows if any(column.value(row) is not None for column in _ASSEMBLED)]
    held = [row for row in rows if row[2] is not None]
    found = [table("kernels", "", (*_KERNEL, *_CONFIGURED), rows)]
    if assembled:
        title = "What the assembler says of them"
        found.append(table("kernel_figures", title, (*_KERNEL, *_ASSEMBLED), assembled))
    if held:
        found.append(table("kernel_waves", "How many blocks the device holds at once", (*_KERNEL, *_WAVES), held))
    yield Section("kernels", "Kernels", (HELD,) if held else (), tables=tuple(found))


def _configuration(kernel: KernelBuild) -> str:
    return ", ".join(f"{_name(name)} {value}" for name, value in kernel.configuration.items())


def _name(name: str) -> str:
    """Spaces in place of underscores: a table cell breaks only at spaces."""
    return name.replace("_", " ")


SCHEDULED = (
    "What the TPU's compiler scheduled for each Pallas kernel. A bundle is what a core starts at once. The counts are "
    "no time: a bundle may stall, every branch counts as taken, and a loop inside a step counts once. They compare one "
    "kernel with itself, with other block sizes or after a change, and do not rank kernels. All figures but the "
    "product are of one step of the grid. Spills and fills are vector registers; the bytes are those between vector "
    "memory and registers."
)
_SCHEDULE = (
    *(column.of_first() for column in (_CASE, _DEVICE, _BACKEND)),
    Column("kernel", "kernel", lambda x: _name(x[1].kernel)),
    Column("bundles", "bundles", lambda x: x[1].step_bundles),
    Column("steps", "grid steps", lambda x: x[1].grid_steps),
    Column("product", "bundles x grid steps", lambda x: scheduled_bundles([x[1]])),
    Column("mxu", "% with the MXU", lambda x: _per_bundle(100 * x[1].mxu_bundles, x[1])),
    Column("spills", "spills", lambda x: x[1].spills),
    Column("fills", "fills", lambda x: x[1].fills),
    Column("bytes", "bytes per bundle", lambda x: _per_bundle(x[1].vector_bytes, x[1])),
)


def _scheduled(records: Sequence[Record]) -> Table | None:
    rows = [(record, each) for record in records for each in record.schedules]
    return table("schedules", "", _SCHEDULE, rows) if rows else None


def _per_bundle(count: int, schedule: Schedule) -> float | None:
    return count / schedule.step_bundles if schedule.step_bundles else None


def _compiled(name: str, header: str) -> Column:
    return Column(name, header, lambda record: scaled(record.memory.get(f"compiled_{name}"), 1 / MIB))


def _share(record: Record) -> float | None:
    peak, limit = record.memory.get("compiled_peak"), record.environment.get("target_memory")
    return 100 * peak / limit if peak is not None and limit else None


def every_cell(content: Content) -> Iterator[Section]:
    """Verdicts with seconds, and the sizes of the cells that have some; folded.

    One table of both is wider than a page.
    """
    key = (_CASE, _BACKEND, _DEVICE)
    verdicts = (
        Column("verdict", "verdict", verdict),
        Column("why", "why", lambda record: _why(record, content.numbers) or None),
        Column("lower", "lower (s)", lambda record: record.lower_seconds),
        Column("compile", "compile (s)", lambda record: record.compile_seconds),
    )
    sizes = (
        _compiled("argument", "args (MiB)"),
        _compiled("output", "outputs (MiB)"),
        _compiled("temp", "temp. (MiB)"),
        _compiled("peak", "peak (MiB)"),
        Column("share", "% of memory", _share),
        _compiled("generated_code", "code (MiB)"),
    )
    made = [table("cells", "", (*key, *verdicts), content.records)]
    sized = [record for record in content.records if any(column.value(record) is not None for column in sizes)]
    if sized:
        made.append(table("cell_sizes", "Sizes", (*key, *sizes), sized))
    yield Section("cells", "Every cell", tables=tuple(made), folded=plural(len(content.records), "cell"))


def reproduce(content: Content) -> Iterator[Section]:
    """The command that was run."""
    need = "With the compilers (pip install '.[tpu,compile-cuda,kvax]'), on any Linux machine:"
    yield reproduce_section(need, content.command or ("attnsuite", "compile"))


SECTIONS: tuple[Callable[[Content], Iterable[Section]], ...] = (
    in_short,
    lambda content: _matrix("ops", "Attention calls", content.calls, content),
    lambda content: _matrix("models", "Whole models", content.models, content),
    bounds,
    kernels,
    section("schedules", "Schedules", "tables", lambda content: _scheduled(content.records), SCHEDULED),
    lambda content: program_table.programs(group(content.calls), targets=True),
    section(
        "reasons", "Reasons", "items", lambda x: [f"**{number}** {escape(text)}" for text, number in x.numbers.items()]
    ),
    every_cell,
    section("environment", "Environment", "tables", lambda content: environment.environment_table(content.records)),
    section("method", "How this was made", "items", lambda _: METHOD),
    reproduce,
)
