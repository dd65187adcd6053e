"""One device's page as data: a title, the short reading, and sections of prose and tables in a fixed order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from attnsuite.suite.kinds.kascade.methods import METHODS
from attnsuite.suite.record import Record
from attnsuite.suite.store import RunManifest

from . import checkpoint, environment, goals, growth, kascade, peers, plot, quality, reading, tables
from .cells import Group, group
from .formatting import code, command_line, escape, plural
from .load import Run
from .plot import Picture
from .tables import Table

_MOST_CASES = 20  # told one by one at the top of a page; more are a table's business

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


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """A heading with Markdown paragraphs, Markdown list items, tables, pictures, and command lines."""

    key: str
    title: str
    paragraphs: tuple[str, ...] = ()
    items: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    commands: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """Everything that is said about one device."""

    device: str
    title: str
    subtitle: str
    sections: tuple[Section, ...]
    groups: tuple[Group, ...]


def build(run: Run) -> tuple[Page, ...]:
    """The pages of a run, one per device, devices in the order of their names."""
    return tuple(_page(page.device, page.records, run) for page in environment.pages(run.records))


def _page(device: str, records: Sequence[Record], run: Run) -> Page:
    groups = group(records)
    ordered = [cell.record for member in groups for cell in member.cells]
    numbers = tables.reason_numbers(ordered)
    suites = ", ".join(sorted({record.suite for record in records}))
    versions = [f"{name} {version}" for name, version in environment.versions_of(records).items()]
    subtitle = f"Versions: {', '.join(versions) or 'not recorded'}"
    # Kascade's rows are methods of one backend: they have tables of their own, beside which the general ones say less.
    every, groups = groups, tuple(member for member in groups if not kascade.is_kascade(member))
    own = tuple(member for member in every if kascade.is_kascade(member))
    sections = (
        *_short(every, numbers, run.notes),
        Section(
            "requested_and_run",
            "Requested and run",
            ("R1, R2, \u2026 are the reasons listed above.",) if numbers else (),
            tables=(tables.requested_and_run((*groups, *_unlike(own)), numbers),),
        ),
        _checkpoint(every),
        *_kascade(own),
        _goals(groups),
        _speed(groups) if groups or not own else None,
        _peers(groups),
        _over_length(groups),
        _memory(every, records),
        _accuracy(groups),
        _quality(groups),
        _environment(records),
        Section("method", "How this was measured", items=METHOD),
        _reproduce(run.manifest if isinstance(run.manifest, RunManifest) else None, records, suites),
    )
    kept = tuple(section for section in sections if section is not None)
    title = f"Attention on {device}, {environment.date_of(records)}, suite {suites}"
    return Page(device, title, subtitle, kept, every)


def _short(groups: Sequence[Group], numbers: Mapping[str, str], notes: Sequence[str]) -> tuple[Section | None, ...]:
    cells = [cell for member in groups for cell in member.cells]
    records = [cell.record for cell in cells]
    changed = environment.differing(records)
    warned = [*notes]
    if changed:
        warned.append(f"Not the same in every cell of this page: {', '.join(changed)} (see Environment).")
    untimed = tables.untimed(groups)
    if untimed:
        names = ", ".join(cell.record.key for cell in untimed)
        warned.append(f"{plural(len(untimed), 'cell')} with samples that are no times show no speed: {names}.")
    impossible = [cell for cell in cells if cell.speed and (cell.speed.peak_share or 0.0) > 1]
    if impossible:
        warned.append(
            f"{plural(len(impossible), 'cell')} above 100% of the measured matmul peak: the peak is too low, or the "
            f"time is: {', '.join(cell.record.key for cell in impossible)}."
        )
    warned += tables.cell_notes(groups)
    opening = (reading.counts(cells), *(f"**Note.** {escape(note)}" for note in warned))
    own = [member for member in groups if kascade.is_kascade(member)]
    ordinary = [member for member in groups if not kascade.is_kascade(member)]
    each = reading.fastest(ordinary)
    if len(each) > _MOST_CASES:
        each = [f"Case by case: the tables under Speed ({len(each)} timed cases)."]
    sentences = (
        *reading.headline(ordinary),
        *each,
        *reading.model_quality(ordinary),
        *kascade.sentences(own),
    )
    return (
        Section("in_short", "In short", opening, sentences),
        _items("failed", "Failed", reading.failed(groups)),
        _items("refused", "Refused, and what ran instead", reading.refused(groups, numbers)),
    )


def _unlike(groups: Sequence[Group]) -> Iterator[Group]:
    """Of Kascade's cases the cells in which something else happened than what was asked for."""
    for member in groups:
        cells = tuple(cell for cell in member.cells if cell.record.status != "ok" or cell.record.reasons)
        if cells:
            yield dataclasses.replace(member, cells=cells)


def _checkpoint(groups: Sequence[Group]) -> Section | None:
    made = checkpoint.of_checkpoint(groups)
    if made is None:
        return None
    told = (
        "One row per backend that ran in this model. Losses are paired, sequence by sequence, against the standard "
        "backend on the same tokens, text in windows of the case's length; a unigram model that knows the text's own "
        "frequencies is what the dense model has to beat, else every row is INVALID. Times are medians of the tables "
        "under Speed, where their intervals are. Kascade's losses are those of its own case, beside its controls."
    )
    return Section("checkpoint", f"Backends in {escape(checkpoint.title(groups))}", (told,), tables=(made,))


def _kascade(groups: Sequence[Group]) -> Iterator[Section]:
    """The gate, quality over kept fraction, and speed."""
    if made := kascade.gate(groups):
        told = (
            "A hand-built model with a known circuit: an anchor layer can fetch one half of an answer, a reuse layer "
            "the other, so that an answer is right only where both attend to the needle. Chance is 1 in 16 where both "
            "look elsewhere, 1 in 4 where one does. Kascade's row stands only where dense finds everything and "
            "every control is there and fails beyond its interval."
        )
        yield Section("kascade_gate", "The retrieval gate", (told,), tables=made)
    if made := kascade.quality(groups):
        told = (
            "All rows of one share keep the same number of units (layer 0 dense in all of them); “pairs "
            "kept” is measured: query-key pairs that were computed, of all causal ones, in the other layers. "
            "Shares of units are rounded up, and every query tile has its own region besides, so the measured share "
            "is the larger. “FLOPs” are of the whole model's attention, dense layers and the anchors' selection "
            "included. “Attention kept” is the part of dense attention, of the row's own queries and keys, that "
            "lies on computed pairs. A row is withheld where random tiles do not fail."
        )
        drawn = kascade.picture(groups)
        no_plot = "The plot is not drawn: matplotlib is not installed; pip install 'attnsuite[plot]'."
        paragraphs = (told,) if drawn is None or plot.is_available() else (told, no_plot)
        pictures = (drawn,) if drawn is not None and plot.is_available() else ()
        yield Section("kascade_quality", "Quality at the same kept fraction", paragraphs,
                      tuple(f"{code(m.name)}: {escape(m.told)}." for m in METHODS.values()
                            if "kascade_text" in m.kinds), tables=made, pictures=pictures)  # fmt: skip
    if made := kascade.speed(groups):
        told = (
            "Attention only, of all layers, what the anchors cost included, relative to the fastest dense row of the "
            "case: dense is timed on one device and on one per core. “Time relative to its share of pairs” is 1 "
            "where a reuse layer is as much faster as it computes less. Before it is timed, a row has to equal dense "
            "with everything selected. DENSE: the row decided by itself not to run sparse."
        )
        goal = kascade.goals(groups)
        if goal is not None:
            yield Section("kascade_goals", "Goals", ("Judged on the medians of this run.",), tables=(goal,))
        yield Section("kascade_speed", "Speed of whole stacks", (told,), tables=made)


def _items(key: str, title: str, items: Sequence[str]) -> Section | None:
    return Section(key, title, items=tuple(items)) if items else None


def _speed(groups: Sequence[Group]) -> Section | None:
    made = tables.speed(groups)
    if not made:
        return Section("speed", "Speed", ("No cell of this page has a speed.",))
    told = (
        "Only cells that ran the real kernel on this device with numbers that pass the oracle. \u201cRelative to "
        "standard\u201d is the median over rounds of time divided by standard's time in the same round: "
        "below 1 is less time than standard. An interval that includes 1 shows no measurable difference."
    )
    return Section("speed", "Speed", (told,), tables=(*tables.overview(groups), *made))


def _goals(groups: Sequence[Group]) -> Section | None:
    made = goals.goals(groups)
    if made is None:
        return None
    told = (
        "What this suite is there to show, judged on the medians of this run. \u201cAll cores\u201d is one JAX device "
        "per core with the heads divided among them, \u201cbest\u201d the better of the two. The times relative to "
        "torch are to PyTorch at its best: `torch_unthrottled` where its math library brakes on this processor and "
        "the row is there, else `torch` as installed."
    )
    return Section("goals", "Goals", (told,), tables=(made,))


def _peers(groups: Sequence[Group]) -> Section | None:
    made = peers.against(groups)
    if not made:
        return None
    told = (
        "The same, relative to implementations outside this project, measured in the same rounds on the same arrays "
        "and judged by the same oracle. Unthrottled: with the vendor check of PyTorch's math library lifted, which "
        "slows it on processors that are not Intel's."
    )
    return Section("peers", "Against peers", (told,), tables=made)


def _over_length(groups: Sequence[Group]) -> Section | None:
    found = plot.pictures(groups)
    if not found:
        return None
    if not plot.is_available():
        told = "Not drawn: matplotlib is not installed; pip install 'attnsuite[plot]', then attnsuite report."
        return Section("over_length", "Speed over length", (told,))
    told = (
        "FLOP/s by formula, of visible pairs only, so that causal attention done in full stays low. The dashed line is "
        "the matmul rate measured on this machine in the same dtype."
    )
    return Section("over_length", "Speed over length", (told,), pictures=found)


def _memory(groups: Sequence[Group], records: Sequence[Record]) -> Section | None:
    made = tables.memory(groups)
    if not made:
        return None
    methods = {record.environment.get("process_high_water_method") for record in records}
    named = sorted(method for method in methods if method)
    how = f" ({escape(', '.join(named))})" if named else ""
    told = (
        "\u201cCompiled\u201d sizes are the compiler's own for the whole program. The high-water mark is how far one "
        "run raises the process above what it held with the program compiled and the inputs made"
        f"{how}. The device peak is the device allocator's statistic."
    )
    grown = growth.growth(groups)
    return Section("memory", "Memory", (told,), tables=(*((grown,) if grown else ()), *made))


def _accuracy(groups: Sequence[Group]) -> Section | None:
    made = tables.accuracy(groups)
    if not made:
        return None
    told = (
        "Largest absolute difference from the float64 oracle, divided by the oracle's largest absolute value. "
        "Exact backends must stay within what is allowed, which follows from standard's own error on the same "
        "problem in the same dtype (the standard row). Approximate backends are not judged by closeness."
    )
    return Section("accuracy", "Accuracy", (told,), tables=made)


def _quality(groups: Sequence[Group]) -> Section | None:
    made = (*quality.figures(groups), *quality.series(groups))
    if not made:
        return None
    told = (
        "Differences are taken sequence by sequence against the standard backend on the same tokens. INVALID means "
        "that the dense model predicts no better than unigram frequencies, so that no loss could show."
    )
    return Section("model_quality", "Model quality", (told,), tables=made)


def _environment(records: Sequence[Record]) -> Section:
    return Section("environment", "Environment", tables=(environment.environment_table(records),))


def _reproduce(manifest: RunManifest | None, records: Sequence[Record], suites: str) -> Section:
    revision = records[0].environment.get("git_revision")
    at = f"At git revision {code(revision)}:" if revision else "The git revision is not recorded. The command:"
    words = ["--suite", suites if manifest is None else manifest.file or manifest.suite]
    if manifest is None:
        return Section("reproduce", "Reproduce", (at,), commands=(command_line(["attnsuite", "run", *words]),))
    if said := manifest.checkpoint:
        flags = {"--model": "model", "--seq-len": "sequence", "--batch": "batch", "--dtype": "dtype"}
        given = {flag: said.get(name) for flag, name in flags.items()}
        words = [word for flag, value in given.items() if value is not None for word in (flag, str(value))]
    names = [str(case["name"]) for case in manifest.cases if "name" in case]
    for option, values in (("--backends", manifest.backends), ("--cases", names)):
        words += [option, ",".join(values)] if values else []
    for name, value in manifest.kascade.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return Section("reproduce", "Reproduce", (at,), commands=(command_line(["attnsuite", "run", *words]),))
