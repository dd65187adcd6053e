"""Pages as Markdown: headings, lists and pipe tables (tabulate), with all foreign text escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tabulate import tabulate

from .page import Page, Section
from .table import Table
from .words import Interval, Value, escape, show

_LEFT = (str, bool)
_LOUD = ("wrong", "oom", "timeout", "crashed", "OUTSIDE", "INVALID")


def render(pages: Sequence[Page]) -> str:
    """The Markdown of all pages, one after the other."""
    return "\n\n".join(block for page in pages for block in _page(page)) + "\n"


def render_table(table: Table) -> str:
    """One table as Markdown. Cells that repeat the row above in a merged column stay empty."""
    body: list[list[str]] = []
    previous: tuple[Value, ...] = ()
    for row in table.rows:
        values = tuple(row.get(column.key) for column in table.columns)
        body.append([_cell(values, previous, place, table) for place in range(len(values))])
        previous = values
    headers = [escape(column.header) for column in table.columns]
    aligned = ["left" if _is_text(table, column.key) else "right" for column in table.columns]
    return tabulate(body, headers, tablefmt="pipe", disable_numparse=True, colalign=aligned if body else None)


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
    shown = show(values[place])
    return f"**{shown}**" if shown.split(":")[0] in _LOUD else shown


def _is_text(table: Table, key: str) -> bool:
    present = [row.get(key) for row in table.rows if row.get(key) is not None]
    return all(isinstance(value, _LEFT) and not isinstance(value, Interval) for value in present)
