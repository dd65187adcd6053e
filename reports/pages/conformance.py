"""The page of ``attnsuite judge``: what each backend is, a line per verdict, its worst failure, and the rest.

Each section is written in two forms: Markdown for the page, plain text for a terminal. Badges (``attnsuite judge
--badge``) have the verdicts of one backend or function: as JSON what was judged (the digest of the code, versions,
device, date and every answer), as SVG name and verdicts in one line, and all of it as its title.
"""

from __future__ import annotations

import dataclasses
import html
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tabulate import tabulate

from attnsuite.suite import typed
from attnsuite.suite.errors import as_input
from attnsuite.suite.files import write_text
from attnsuite.suite.kinds.conformance_case import TAKES, ConformanceCase, ConformanceFacts, answer_of
from attnsuite.suite.record import Record
from attnsuite.testing.problems import CASES
from attnsuite.testing.shapes import PLATFORM_FAILS
from attnsuite.testing.verdicts import VERDICTS

from ..environment import date_of, device_of, versions_of
from ..formatting import code, escape

_SIZES = {"query_length": "T", "key_value_length": "S", "num_heads": "heads", "head_dim": "D"}
_NAMED = 4  # problems that are named beside a reason
_GREEN, _RED, _GREY = "#2e7d32", "#b3261e", "#6b7280"
_GLYPH, _HEIGHT = 6.6, 20  # pixels of a letter of 11 pixels, and of a line


@dataclasses.dataclass(frozen=True, slots=True)
class Form:
    """How a text is written: what stands before a title and a heading, a name, text of others, and tables."""

    title: str
    heading: str
    name: Callable[[str], str]
    text: Callable[[str], str]
    table: str


MARKDOWN = Form("# ", "## ", code, escape, "pipe")
PLAIN = Form("", "", str, str, "plain")


def title(records: Sequence[Record], form: Form) -> Iterator[str]:
    """What the page shows, and where it was computed."""
    first, versions = records[0], versions_of(records)
    command = "attnsuite judge" if first.suite == "judge" else f"attnsuite run --suite {first.suite}"
    packages = ", ".join(f"{name} {versions[name]}" for name in ("attnsuite", "jax") if versions.get(name))
    yield from (
        f"{form.title}Held to the contract",
        "",
        "Right: output and gradients are within what the judge allows of the float64 oracle",
        "(docs/explanation/design.md), and no number that no query may see changes a bit. Other verdicts compare a",
        "backend with itself (docs/explanation/verdicts.md).",
        "",
        f"{date_of(records)}, {first.target}, {packages}; {form.name(command)}.",
    )


def overview(records: Sequence[Record], form: Form) -> Iterator[str]:
    """One line per backend, where there are several."""
    backends = list(_by_backend(records))
    if len(backends) < 2:
        return
    judged = [verdict for verdict in VERDICTS if any(record.case == verdict for record in records)]
    counted = ("right", "wrong", "unsupported") if _problems(records) else ()
    rows = []
    for name, group in backends:
        answers = {record.case: answer_of(record) for record in group}
        counts = (_count(group, "ok"), len(_failed(_problems(group))), _count(group, "unsupported")) if counted else ()
        modes = sorted({record.mode for record in group if record.mode is not None})
        rows.append((form.name(name), ", ".join(modes), *counts, *(answers.get(verdict, "") for verdict in judged)))
    headers = ("backend", "mode", *counted, *judged)
    yield from ("", *tabulate(rows, headers, tablefmt=form.table).splitlines())


def answers(records: Sequence[Record], form: Form) -> Iterator[str]:
    """What each backend takes, a line per verdict, its worst failure with the lines that show it again."""
    for name, group in _by_backend(records):
        yield from ("", f"{form.heading}{form.name(name)}", "")
        yield from (
            f"{form.text(record.facts.message or '')}\n"
            for record in group
            if record.case == TAKES and record.facts is not None
        )
        rows = [_right(group)] if _problems(group) else []
        for record in (record for verdict in VERDICTS for record in group if record.case == verdict):
            message = record.facts.message if record.facts is not None else " ".join(record.reasons) or record.error
            rows.append((record.case, answer_of(record), form.text(message or "")))
        if isolates := _isolates(group):
            rows.append(("NaN stays out", *isolates))
        yield from tabulate(rows, ("verdict", "answer", "what was found"), tablefmt=form.table).splitlines()
        worst = _worst(group)
        if worst is not None:
            message = worst.error or (worst.facts.message if worst.facts is not None else "")
            yield from ("", f"The worst: {worst.case}: {form.text(message or '')} These lines show it again:", "")
            yield from _fenced(reproducer(worst), form)


def reproducer(record: Record) -> list[str]:
    """Lines for a shell that judge the same problem, or ask for the same verdict, again."""
    case, mode = _case(record), record.mode or "native"
    number, seed = case.number, case.seed
    drawn = "" if seed is None else f", seed={seed}"
    in_dtype = "" if case.dtype is None else f", dtype={case.dtype!r}"
    call = f"judging.judge_case(backend, {case.problem!r}, Target.here(), {mode!r}{drawn}{in_dtype})"
    if number is not None:
        call = f"judging.judge_random(backend, {number}, {seed}, Target.here(), {mode!r})"
    elif record.case in VERDICTS:
        call = f"verdicts.ask({record.case!r}, verdicts.Subject(backend, Target.here(), {mode!r}{drawn}))"
    return [
        "python - <<'END'",
        "from attnsuite.backends import Target, registry",
        "from attnsuite.suite.user_function import register_functions",
        "from attnsuite.testing import judging, verdicts",
        "",
        f"register_functions([{record.requested!r}])",
        f"backend = registry.get({record.requested!r})",
        f"print({call})",
        "END",
    ]


def faults(records: Sequence[Record], form: Form) -> Iterator[str]:
    """What is wrong, how far, and in which problem."""
    for name, group in _by_backend(records):
        wrong = _failed(group)
        if wrong:
            yield from ("", f"{form.heading}{form.name(name)}: wrong", "")
        for record in wrong:
            drawn = record.facts.drawn if isinstance(record.facts, ConformanceFacts) else None
            error = f"{record.error}{f' Drawn: {drawn}' if drawn else ''}"
            yield f"- {record.case}: {record.status}: {form.text(error)}"


def unsupported(records: Sequence[Record], form: Form) -> Iterator[str]:
    """What each backend would need for more problems: each feature once, by the first reason, with its problems."""
    for name, group in _by_backend(records):
        against: dict[str, tuple[str, list[str]]] = {}
        for record in _problems(group):
            for reason in () if _is_of_the_platform(record) else record.reasons:
                _, _, accepted = reason.partition(" is not supported by ")
                against.setdefault(accepted or reason, (reason, []))[1].append(record.case)
        if against:
            yield from ("", f"{form.heading}{form.name(name)}: what more problems would need", "")
        for reason, cases in sorted(against.values(), key=lambda refusal: -len(refusal[1])):
            asks, _, accepted = reason.partition(f" is not supported by {name} ")
            phrase = f"{asks} {accepted.partition('; use ')[0].rstrip('.')}" if accepted else reason.rstrip(".")
            yield f"- {form.text(phrase)}: {_some(list(dict.fromkeys(cases)))}"
        failing = [record for record in _problems(group) if _is_of_the_platform(record)]
        if failing:
            yield from ("", f"Not judged: {_some([r.case for r in failing])}. {failing[0].reasons[0]}")
        forward = [r.case for r in _problems(group) if _is_right(r) and not r.facts.gradients]
        if forward:
            yield from ("", f"Judged by the output alone, without gradients: {_some(forward)}.")


SECTIONS = (title, overview, answers, faults, unsupported)


def files(records: Sequence[Record], _: Path) -> dict[str, str]:
    """The page."""
    return {"report.md": _written(records, MARKDOWN)}


def conformance_overview(records: Sequence[Record]) -> str:
    """The content of the page as plain text, for a terminal."""
    return _written(records, PLAIN)


def _written(records: Sequence[Record], form: Form) -> str:
    return "\n".join(line for section in SECTIONS for line in section(records, form)) + "\n"


def _case(record: Record) -> ConformanceCase:
    """The case that was judged. Raises InputError for what is none."""
    with as_input(f"{record.key} has a problem that attnsuite judge does not write: ", "."):
        return typed.convert(record.problem, ConformanceCase)


def _by_backend(records: Iterable[Record]) -> Iterator[tuple[str, list[Record]]]:
    records = tuple(records)
    for name in dict.fromkeys(record.requested for record in records):
        yield name, [record for record in records if record.requested == name]


def _problems(group: Iterable[Record]) -> list[Record]:
    """The records of problems: without verdicts."""
    return [record for record in group if record.case not in (TAKES, *VERDICTS)]


def _is_of_the_platform(record: Record) -> bool:
    return any(reason.startswith(PLATFORM_FAILS) for reason in record.reasons)


def _is_right(record: Record) -> bool:
    return record.status == "ok" and isinstance(record.facts, ConformanceFacts)


def _failed(group: Iterable[Record]) -> list[Record]:
    """Wrong problems, and whatever crashed."""
    return [record for record in group if record.status not in ("ok", "unsupported")]


def _count(group: Iterable[Record], status: str) -> int:
    return sum(record.status == status for record in _problems(group))


def _right(group: Sequence[Record]) -> tuple[str, str, str]:
    """Whether every problem that is taken is right; the one that used most of what the judge allows."""
    wrong, taken = len(_failed(_problems(group))), len(_problems(group)) - _count(group, "unsupported")
    failing = sum(map(_is_of_the_platform, _problems(group)))
    asking = _count(group, "unsupported") - failing
    more = (f"; {asking} ask for more" if asking else "") + (f"; {failing} fail in JAX itself" if failing else "")
    if not taken:
        return "right", "not judged", f"it takes none of the problems{more}"
    if wrong:
        return "right", "no", f"{wrong} of the {taken} problems that it takes are wrong{more}"
    shares = [(r.facts.share, r.case) for r in _problems(group) if _is_right(r) and r.facts.share is not None]
    near = "; nearest to the bound: {1} with {0:.0%} of what is allowed".format(*max(shares)) if shares else ""
    return "right", "yes", f"for what it takes: all of {taken} problems{_largest(group)}{more}{near}"


def _largest(group: Sequence[Record]) -> str:
    """How large the problems are that are right: at other sizes nothing was asked."""
    found = []
    for record in filter(_is_right, _problems(group)):
        case = CASES.get(_case(record).problem)
        named = () if case is None else zip(_SIZES, (case.sizes[place] for place in (1, 2, 3, 5)), strict=True)
        drawn = re.findall(rf"'({'|'.join(_SIZES)})': ([0-9]+)", record.facts.drawn or "")
        found.append({name: int(size) for name, size in (*named, *drawn)})
    largest = {name: max((sizes[name] for sizes in found if name in sizes), default=0) for name in _SIZES}
    phrases = [f"{words} {largest[name]}" for name, words in _SIZES.items() if largest[name]]
    return f" (up to {', '.join(phrases)})" if phrases else ""


def _isolates(group: Sequence[Record]) -> tuple[str, str] | None:
    """Whether NaN and infinity behind the lengths, in padding and in other documents changed nothing."""
    found = {
        r.case: r.facts.isolates
        for r in group
        if isinstance(r.facts, ConformanceFacts) and r.facts.isolates is not None
    }
    let_in = [case for case, isolates in found.items() if not isolates]
    return None if not found else ("no", _some(let_in)) if let_in else ("yes", f"in {len(found)} problems")


def _worst(group: Sequence[Record]) -> Record | None:
    """The problem that is farthest from its bound; where all are right, the first verdict that is no."""
    failed = sorted(_failed(group), key=lambda r: -(r.facts.share or math.inf if r.facts is not None else math.inf))
    denied = [r for r in group if isinstance(r.facts, ConformanceFacts) and r.facts.answer == "no"]
    return next(iter([*failed, *denied]), None)


def _fenced(lines: list[str], form: Form) -> Iterator[str]:
    yield from ("```sh", *lines, "```") if form is MARKDOWN else (f"  {line}".rstrip() for line in lines)


def _some(cases: Sequence[str]) -> str:
    more = len(cases) - _NAMED
    return ", ".join(cases[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def write_badges(records: Sequence[Record], folder: Path) -> list[Path]:
    """Write ``badge-<name>.json`` and ``.svg`` of each backend into ``folder``."""
    written = []
    for name in dict.fromkeys(record.requested for record in records):
        backend_records = [record for record in records if record.requested == name]
        facts = badge(backend_records)
        stem = folder / f"badge-{re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-')}"
        for suffix, text in ((".json", json.dumps(facts, indent=1) + "\n"), (".svg", picture(facts, backend_records))):
            write_text(path := stem.with_suffix(suffix), text)
            written.append(path)
    return written


def badge(records: Sequence[Record]) -> dict[str, object]:
    """The facts of one backend's badge."""
    first = records[0]
    problems = [
        record for record in records if record.case not in (TAKES, *VERDICTS) and record.status != "unsupported"
    ]
    right = sum(record.status == "ok" for record in problems)
    versions = versions_of(records)
    return {
        "name": first.requested,
        "code": first.environment.get("source_files", {}).get(first.requested) or first.environment.get("source", ""),
        "versions": {name: versions[name] for name in ("attnsuite", "jax", "python") if name in versions},
        "device": device_of(first),
        "mode": next((record.mode for record in records if record.mode), None),
        "date": date_of(records),
        "right": right,
        "judged": len(problems),
        "verdicts": {record.case: answer_of(record) for record in records if record.case in VERDICTS},
    }


def picture(facts: Mapping[str, object], records: Sequence[Record]) -> str:
    """One line of SVG: the name, right or wrong, and the verdicts that are yes."""
    answers = [(record.case, answer_of(record)) for record in records]
    right = "not judged" if not facts["judged"] else "right" if facts["right"] == facts["judged"] else "wrong"
    count = f" {facts['right']}/{facts['judged']}" if facts["judged"] else ""
    parts = [(str(facts["name"]), "#374151"), (right + count, {"right": _GREEN, "wrong": _RED}.get(right, _GREY))]
    parts += [(name.replace("_", " "), _GREEN) for name in VERDICTS if (name, "yes") in answers]
    x, drawn = 0.0, []
    for text, colour in parts:
        width = _GLYPH * len(text) + 12
        drawn.append(f'<rect x="{x:.0f}" width="{width + 1:.0f}" height="{_HEIGHT}" fill="{colour}"/>')
        drawn.append(f'<text x="{x + width / 2:.0f}" y="14" text-anchor="middle">{html.escape(text)}</text>')
        x += width
    title = "; ".join(f"{key}: {facts[key]}" for key in ("name", "code", "device", "date", "versions", "verdicts"))
    style = 'font-family="monospace" font-size="11" fill="#fff"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" width="{x:.0f}" height="{_HEIGHT}" role="img">'
    return f"{opening}<title>{html.escape(title)}</title><g {style}>{''.join(drawn)}</g></svg>\n"
