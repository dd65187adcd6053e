"""The page of ``attnsuite judge``: what each backend gets right, wrong and refuses.

Each section is written in two forms: Markdown for the page, plain text for a terminal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tabulate import tabulate

from attnsuite.suite.kinds.conformance import Held
from attnsuite.suite.record import Record

from ..environment import date_of, versions_of

_NAMED = 4  # problems that are named beside a reason


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """How a text is written: what stands before a title and a heading, what encloses a name, tabulate's format."""

    title: str
    heading: str
    quote: str
    table: str

    def name(self, text: str) -> str:
        """A name of a backend or of a command."""
        return f"{self.quote}{text}{self.quote}"


MARKDOWN = Form("# ", "## ", "`", "pipe")
PLAIN = Form("", "", "", "plain")


def title(records: Sequence[Record], form: Form) -> Iterator[str]:
    """What the page shows, and where it was computed."""
    first, versions = records[0], versions_of(records)
    packages = ", ".join(f"{name} {versions[name]}" for name in ("attnsuite", "jax") if versions.get(name))
    yield from (
        f"{form.title}Held to the contract",
        "",
        "Each backend on each problem, compiled for the device that is here: output and gradients within what the",
        "judge allows of the float64 oracle (docs/design.md), and no bit changed by numbers that no query may see.",
        "",
        f"{date_of(records)}, {first.target}, {packages}; {form.name(f'attnsuite {first.suite}')}.",
    )


def table(records: Sequence[Record], form: Form) -> Iterator[str]:
    """One line per backend."""
    rows = []
    for name, own in _by_backend(records):
        wrong = sum(record.status not in ("ok", "unsupported") for record in own)
        counts = (sum(record.status == "ok" for record in own), wrong, sum(r.status == "unsupported" for r in own))
        rows.append((form.name(name), *counts, _nearest(own), _isolates(own)))
    headers = ("backend", "right", "wrong", "refused", "nearest to the bound", "NaN stays out")
    yield from ("", *tabulate(rows, headers, tablefmt=form.table).splitlines())


def faults(records: Sequence[Record], form: Form) -> Iterator[str]:
    """What is wrong, how far, and in which problem."""
    for name, own in _by_backend(records):
        wrong = [record for record in own if record.status not in ("ok", "unsupported")]
        if wrong:
            yield from ("", f"{form.heading}{form.name(name)}: wrong", "")
        for record in wrong:
            drawn = record.facts.drawn if isinstance(record.facts, Held) else None
            yield f"- {record.case}: {record.status}: {record.error}{f' Drawn: {drawn}' if drawn else ''}"


def refusals(records: Sequence[Record], form: Form) -> Iterator[str]:
    """Each feature that a backend refuses once, by the first reason, with the problems that it refuses."""
    for name, own in _by_backend(records):
        against: dict[str, tuple[str, list[str]]] = {}
        for record in own:
            for reason in record.reasons:
                _, _, accepted = reason.partition(" is not supported by ")
                against.setdefault(accepted or reason, (reason, []))[1].append(record.case)
        if against:
            yield from ("", f"{form.heading}{form.name(name)}: refused", "")
        for reason, cases in sorted(against.values(), key=lambda refusal: -len(refusal[1])):
            yield f"- {reason} ({_some(list(dict.fromkeys(cases)))})"
        forward = [r.case for r in own if r.status == "ok" and isinstance(r.facts, Held) and not r.facts.gradients]
        if forward:
            yield from ("", f"Judged by the output alone, without gradients: {_some(forward)}.")


SECTIONS = (title, table, faults, refusals)


def files(records: Sequence[Record], _: Path) -> dict[str, str]:
    """The page."""
    return {"report.md": _written(records, MARKDOWN)}


def conformance_overview(records: Sequence[Record]) -> str:
    """The content of the page as plain text, for a terminal."""
    return _written(records, PLAIN)


def _written(records: Sequence[Record], form: Form) -> str:
    return "\n".join(line for section in SECTIONS for line in section(records, form)) + "\n"


def _by_backend(records: Iterable[Record]) -> Iterator[tuple[str, list[Record]]]:
    records = tuple(records)
    for name in dict.fromkeys(record.requested for record in records):
        yield name, [record for record in records if record.requested == name]


def _nearest(own: Sequence[Record]) -> str:
    """The right problem that used most of what the judge allows."""
    shares = [(r.facts.share, r.case) for r in own if r.status == "ok" and isinstance(r.facts, Held)]
    found = max(((share, case) for share, case in shares if share is not None), default=None)
    return "" if found is None else f"{found[0]:.0%} of what is allowed ({found[1]})"


def _isolates(own: Sequence[Record]) -> str:
    """Whether NaN and infinity behind the lengths, in padding and in other documents changed nothing."""
    found = {r.case: r.facts.isolates for r in own if isinstance(r.facts, Held) and r.facts.isolates is not None}
    let_in = [case for case, isolates in found.items() if not isolates]
    return f"no: {_some(let_in)}" if let_in else "yes" if found else ""


def _some(cases: Sequence[str]) -> str:
    more = len(cases) - _NAMED
    return ", ".join(cases[:_NAMED]) + (f" and {more} more" if more > 0 else "")
