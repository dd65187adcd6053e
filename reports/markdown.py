"""Pages as Markdown: headings, lists and pipe tables, with all foreign text escaped."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from .formatting import Interval, Value, escape, plural, show
from .page import Page, Section
from .table import Table

_LEFT = (str, bool)
_LOUD = ("wrong", "oom", "timeout", "crashed", "OUTSIDE", "INVALID")


def render(pages: Sequence[Page]) -> str:
    """The Markdown of all pages, one after the other."""
    return "\n\n".join(block for page in pages for block in _page(page)) + "\n"


def short(page: Page) -> Page:
    """The page with its short sections alone; a page that has none is short as a whole."""
    sections = tuple(section for section in page.sections if section.short)
    return dataclasses.replace(page, sections=sections or page.sections)


def folded(page: Page) -> Page:
    """The page with what is not short out of sight until it is opened."""
    return dataclasses.replace(page, sections=tuple(map(_folded, page.sections))) if page.has_short else page


def _folded(section: Section) -> Section:
    if section.short or section.folded or not (section.items or section.tables):
        return section
    parts = (len(section.tables), "table") if section.tables else (len(section.items), "line")
    return dataclasses.replace(section, folded=plural(*parts))


def render_table(table: Table) -> str:
    """One table as Markdown. Cells that repeat the row above in a merged column stay empty."""
    body: list[list[str]] = []
    previous: tuple[Value, ...] = ()
    for row in table.rows:
        values = tuple(row.get(column.key) for column in table.columns)
        body.append([_cell(values, previous, place, table) for place in range(len(values))])
        previous = values
    headers = [escape(column.header) for column in table.columns]
    aligned = [":--" if _is_text(table, column.key) else "--:" for column in table.columns]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headers, aligned, *body))


def _page(page: Page) -> Iterable[str]:
    yield f"# {escape(page.title)}"
    if page.subtitle:
        yield escape(page.subtitle)
    for section in page.sections:
        yield from _section(section)


def _section(section: Section) -> Iterable[str]:
    yield f"## {escape(section.title)}"
    yield from section.paragraphs
    if section.folded:
        yield f"<details><summary>{escape(section.folded)}</summary>"
    if section.items:
        yield "\n".join(f"- {item}" for item in section.items)
    for table in section.tables:
        if table.title:
            yield f"### {escape(table.title)}"
        yield render_table(table)
    if section.folded:
        yield "</details>"
    for picture in section.pictures:
        yield f"![{escape(picture.title)}]({picture.file})"
    for command in section.commands:
        yield f"    {command}"


def _cell(values: tuple[Value, ...], previous: tuple[Value, ...], place: int, table: Table) -> str:
    leading = place + 1
    merged = all(column.merge for column in table.columns[:leading])
    if merged and previous and values[:leading] == previous[:leading]:
        return ""
    text = show(values[place])
    return f"**{text}**" if text.split(":")[0] in _LOUD else text


def _is_text(table: Table, key: str) -> bool:
    present = [row.get(key) for row in table.rows if row.get(key) is not None]
    return all(isinstance(value, _LEFT) and not isinstance(value, Interval) for value in present)
