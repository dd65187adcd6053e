"""The page of ``attnsuite run``, one per device: a summary, then tables, then how the run was made.

:data:`SECTIONS` lists the sections. A section is a function of :class:`Shown`; it yields nothing if it has no content.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from attnsuite.suite.record import Record
from attnsuite.suite.store import Manifest

from .. import (
    answer,
    environment,
    figures,
    plot,
    program_table,
    quality,
    reading,
)
from ..cells import Cell, Group, cells_of, group
from ..formatting import code, escape, plural
from ..page import Page, Section, pages, reproduce_section, section
from ..read import Run

METHOD = (
    (
        "Each cell is one case, backend, target and mode. A table shows the median of its samples, with a 95% "
        "percentile-bootstrap interval where there are at least six of them. The interval says how well this run "
        "knows its median, not what another day or machine would give."
    ),
    (
        "Sample i of every cell of a case was taken in round i, and ratios are taken round by round over the rounds "
        "that both cells have, so that drift of the machine cancels."
    ),
    (
        "Compile time is apart from run time and is in no median. FLOP counts are by formula, of visible pairs only; "
        "the share of peak is against the matmul rate measured on this machine in the same dtype."
    ),
    (
        "Interpreted cells show accuracy only; cells compiled for a device that is not here show memory only; cells "
        "whose numbers fail the oracle show neither speed nor memory. A fallback goes under the name of what ran."
    ),
)
ON_DEVICE = (
    "On an accelerator the median is of the time that the device computed, by its profile, each call on inputs of its "
    "own that are in no cache. Calls in flight are the slope of two lengths of calls that wait for each other, so what "
    "the host adds is in it. Profiles have no rounds: a ratio is of medians."
)
_APART = 0.05  # the device's time and the slope of calls in flight, above which the page says so
PINNED = (
    "While a cell was timed, each thread of XLA's CPU pool stayed on a processor of its own (pinned threads, above). "
    "After a pause Linux may leave two of them on one."
)


def build(run: Run) -> tuple[Page, ...]:
    """The pages of a run, one per device, devices in the order of their names."""
    return tuple(_page(device, records, run) for device, records in environment.by_device(run.records).items())


@dataclasses.dataclass(frozen=True, slots=True)
class Content:
    """The content of a page's sections.

    The cases of extensions have tables of their own, so the general tables show only ``groups``. ``numbers`` are those
    of the reasons.
    """

    device: str
    records: tuple[Record, ...]
    every: tuple[Group, ...]
    numbers: Mapping[str, str]
    manifest: Manifest | None
    notes: tuple[str, ...]

    @property
    def groups(self) -> tuple[Group, ...]:
        """The cases that are no extension's."""
        return tuple(member for member in self.every if not any(page.has_group(member) for page in pages().values()))

    @property
    def added(self) -> tuple[tuple[Any, tuple[Group, ...]], ...]:
        """The page of each extension, and its cases."""
        return tuple((page, tuple(filter(page.has_group, self.every))) for page in pages().values())

    @property
    def suites(self) -> str:
        """The names of the suites."""
        return ", ".join(sorted({record.suite for record in self.records}))


def _page(device: str, records: tuple[Record, ...], run: Run) -> Page:
    every = group(records)
    numbers = figures.reason_numbers(cell.record for cell in cells_of(every))
    manifest = run.manifest if run.manifest is not None and run.manifest.verb == "run" else None
    content = Content(device, records, every, numbers, manifest, run.notes)
    versions = [f"{name} {version}" for name, version in environment.versions_of(records).items()]
    subtitle = f"Versions: {', '.join(versions) or 'not recorded'}"
    title = f"Attention on {device}, {environment.date_of(records)}, suite {content.suites}"
    return Page(device, title, subtitle, tuple(made for part in SECTIONS for made in part(content)), every)


def use_this(content: Content) -> Iterator[Section]:
    """The answer: which exact backend, for each case."""
    if made := answer.answer(content.groups):
        intro = (
            "The fastest exact backend of each case. A time relative to another is the median over rounds, with a 95% "
            "interval: below 1 is less time."
        )
        pictures = plot.against_standard(content.groups)
        lines = (*answer.unmeasured(content.records), *answer.installs(content.records))
        intro = (*(f"**{escape(line)}**" for line in lines), intro)
        yield Section(
            "answer", "Use this", intro, tuple(reading.headline(content.groups)), (made,), pictures, short=True
        )


def in_short(content: Content) -> Iterator[Section]:
    """The number of cells by status, warnings, and what approximate backends lose."""
    cells = cells_of(content.every)
    added = [sentence for page, groups in content.added for sentence in page.sentences(groups)]
    sentences = (*reading.model_quality(content.groups), *added)
    opening = (reading.counts(cells), *(f"**Note.** {escape(note)}" for note in _warnings(content, cells)))
    yield Section("in_short", "In short", opening, sentences, short=True)


def _warnings(content: Content, cells: Sequence[Cell]) -> Iterator[str]:
    yield from content.notes
    if changed := environment.differing([cell.record for cell in cells]):
        yield f"Not the same in every cell of this page: {', '.join(changed)} (see Environment)."
    if untimed := figures.untimed(content.every):
        names = ", ".join(cell.record.key for cell in untimed)
        yield f"{plural(len(untimed), 'cell')} with samples that are no times show no speed: {names}."
    apart = {cell.record.key: cell.speed.beside_device for cell in cells if cell.speed}
    if apart := {key: share for key, share in apart.items() if abs(share) > _APART}:
        yield (
            f"In {plural(len(apart), 'cell')} the time of calls in flight differs by more than {_APART:.0%} from the "
            "device's own time, which the tables show: the host starts calls slower than the device computes them, or "
            f"kernels have gaps. {', '.join(f'{key} ({share:+.0%})' for key, share in apart.items())}."
        )
    if impossible := [cell for cell in cells if cell.speed and (cell.speed.peak_share or 0.0) > 1]:
        yield (
            f"{plural(len(impossible), 'cell')} above 100% of the measured matmul peak: the peak is too low, or the "
            f"time is: {', '.join(cell.record.key for cell in impossible)}."
        )


def refused(content: Content) -> Iterator[Section]:
    """Every reason, and what ran instead."""
    if items := reading.refused(content.every, content.numbers):
        folded = f"All {plural(len(items), 'reason')}, and what ran instead"
        yield Section("refused", "Refused", (), tuple(items), folded=folded)


def requested_and_run(content: Content) -> Iterator[Section]:
    """The backend asked for, the one that ran, and why."""
    made = figures.requested_and_run((*content.groups, *_unlike(content)), content.numbers)
    intro = ("R1, R2, \u2026 are the reasons listed above.",) if content.numbers else ()
    yield Section(
        "requested_and_run", "Requested and run", intro, tables=(made,), folded=plural(len(made.rows), "cell")
    )


def _unlike(content: Content) -> Iterator[Group]:
    """The cases of extensions, with the cells in which something other than the requested row ran."""
    for member in (member for _, groups in content.added for member in groups):
        cells = tuple(cell for cell in member.cells if cell.record.status != "ok" or cell.record.reasons)
        if cells:
            yield dataclasses.replace(member, cells=cells)


def one_model(content: Content) -> Iterator[Section]:
    """The loss and the cost of each backend in one model."""
    made = quality.model_table(content.every)
    if made is None:
        return
    intro = (
        "One row per backend that ran in this model. Losses are paired, sequence by sequence, against the standard "
        "backend on the same tokens, text in windows of the case's length; a unigram model that knows the text's own "
        "frequencies is what the dense model has to beat, else every row is INVALID. Times are medians of the tables "
        f"under Speed, where their intervals are. {' '.join(page.LOSS_NOTE for page in pages().values())}"
    )
    yield Section(
        "checkpoint", f"Backends in {escape(quality.model_name(content.every))}", (intro,), tables=(made,), short=True
    )


def elsewhere(content: Content) -> Iterator[Section]:
    """Where the rest is."""
    intro = (
        "details.md and report.html have every table (rates, memory by method, each tensor's error, programs, model "
        "quality, every cell with its reasons), the environment and the method; records.csv and report.json have the "
        "same as data."
    )
    yield Section("elsewhere", "More", (intro,), short=True)


def speed(content: Content) -> Iterator[Section]:
    """Times, rates and ratios, one table for each kind of case."""
    if not content.groups:
        return
    made = figures.speed(content.groups)
    if not made:
        yield Section("speed", "Speed", ("No cell of this page has a speed.",))
        return
    intro = (
        "Only cells that ran the real kernel on this device with numbers that pass the oracle. \u201cRelative to "
        "standard\u201d is the median over rounds of time divided by standard's time in the same round: "
        "below 1 is less time than standard. An interval that includes 1 shows no measurable difference. "
        "The peak is the matmul rate, the read rate that of memory, both measured on this machine."
    )
    yield Section("speed", "Speed", (intro,), tables=(*figures.overview(content.groups), *made))


def memory(content: Content) -> Iterator[Section]:
    """Sizes, each with its method."""
    made = figures.memory(content.every)
    if not made:
        return
    methods = {record.environment.get("process_high_water_method") for record in content.records}
    named = sorted(method for method in methods if method)
    how = f" ({escape(', '.join(named))})" if named else ""
    intro = (
        "\u201cCompiled\u201d sizes are the compiler's own for the whole program. The high-water mark is how far one "
        "run raises the process above what it held with the program compiled and the inputs made"
        f"{how}. The device peak is the device allocator's statistic."
    )
    grown = figures.growth(content.every)
    yield Section("memory", "Memory", (intro,), tables=(*((grown,) if grown else ()), *made))


def method(content: Content) -> Iterator[Section]:
    """How the figures are to be read."""
    pinned = [PINNED] if any(record.environment.get("pinned_threads") for record in content.records) else []
    on_device = [ON_DEVICE] if any(record.device_seconds for record in content.records) else []
    yield Section("method", "How this was measured", items=(*METHOD, *pinned, *on_device))


def reproduce(content: Content) -> Iterator[Section]:
    """The command that was run."""
    revision = content.records[0].environment.get("git_revision")
    at = f"At git revision {code(revision)}:" if revision else "The git revision is not recorded. The command:"
    words = ["attnsuite", "run", *_arguments(content.manifest, content.suites)]
    yield reproduce_section(at, words, short=True)


def _arguments(manifest: Manifest | None, suites: str) -> list[str]:
    if manifest is None:
        return ["--suite", suites]
    arguments = ["--suite", manifest.file or manifest.suite]
    if paragraphs := manifest.checkpoint:
        flags = {"--model": "model", "--seq-len": "sequence", "--batch": "batch", "--dtype": "dtype"}
        settings = {flag: paragraphs.get(name) for flag, name in flags.items()}
        arguments = arguments if paragraphs.get("suite") else []
        arguments += [
            argument for flag, value in settings.items() if value is not None for argument in (flag, str(value))
        ]
    names = [str(case["name"]) for case in manifest.cases if "name" in case]
    for option, values in (("--backends", manifest.backends), ("--cases", names)):
        arguments += [option, ",".join(values)] if values else []
    if manifest.text is not None:
        arguments += [
            "--text",
            manifest.text.path,
            *(["--text-field", manifest.text.field] if manifest.text.field else []),
        ]
    arguments += [] if manifest.sample_seconds is None else ["--sample-seconds", f"{manifest.sample_seconds:g}"]
    for name, value in manifest.options.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    return arguments


_Sections = Callable[[Content], Iterable[Section]]


def _opening(content: Content) -> Iterator[Section]:
    for page in pages().values():
        for part in page.OPENING:
            yield from part(content.every)


def _added(content: Content) -> Iterator[Section]:
    for page, groups in content.added:
        for part in page.PARTS:
            yield from part(groups)


SECTIONS: tuple[_Sections, ...] = (
    use_this,
    section(
        "over_length",
        "Speed over length",
        "pictures",
        lambda content: plot.pictures(content.groups),
        "FLOP/s by formula, of visible pairs only, so that causal attention done in full stays low. The dashed line is "
        "the matmul rate measured on this machine in the same dtype.",
        short=True,
    ),
    section(
        "winners",
        "Map of winners",
        "pictures",
        lambda content: plot.winners(content.groups),
        "The first column of \u201cUse this\u201d as a map. A hatched square names two backends: the rounds of this "
        "run do not tell which of them is faster. A square without a color was not timed.",
        short=True,
    ),
    one_model,
    _opening,
    in_short,
    section("failed", "Failed", "items", lambda content: reading.failed(content.every), short=True),
    _added,
    section(
        "in_one",
        "Speed, memory and accuracy",
        "tables",
        lambda content: figures.in_one(content.groups),
        "Only cells with right numbers show a time. A ratio below 1 is less time than that of the baseline in the "
        "same rounds; an interval that includes 1 shows no measurable difference. Memory is what the compiled "
        "program allocates beside arguments and results. The error is the largest one against float64, relative to "
        "the largest value, beside what is allowed.",
        short=True,
    ),
    section("without", "Did not run", "items", lambda content: reading.ran_nowhere(content.every), short=True),
    speed,
    section(
        "peers",
        "Against peers",
        "tables",
        lambda content: figures.against_peers(content.groups),
        "The same, relative to implementations outside this project, measured in the same rounds on the same arrays "
        "and judged by the same oracle. Unthrottled: with the vendor check of PyTorch's math library lifted, which "
        "slows it on processors that are not Intel's.",
        short=True,
    ),
    memory,
    section(
        "accuracy",
        "Accuracy",
        "tables",
        lambda content: figures.accuracy(content.groups),
        "Largest absolute difference from the float64 oracle, divided by the oracle's largest absolute value. "
        "Exact backends must stay within what is allowed, which follows from standard's own error on the same "
        "problem in the same dtype (the standard row). Approximate backends are not judged by closeness.",
    ),
    lambda content: program_table.programs(content.groups),
    section(
        "model_quality",
        "Model quality",
        "tables",
        lambda content: (*quality.figures(content.groups), *quality.series(content.groups)),
        "Differences are taken sequence by sequence against the standard backend on the same tokens. INVALID means "
        "that the dense model predicts no better than unigram frequencies, so that no loss could show.",
    ),
    section("figures", "Further figures", "tables", lambda content: figures.further_figures(content.every)),
    section("notes", "Notes on cells", "items", lambda content: figures.cell_notes(content.every)),
    refused,
    requested_and_run,
    section("environment", "Environment", "tables", lambda content: environment.environment_table(content.records)),
    method,
    reproduce,
    elsewhere,
)
