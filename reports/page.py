"""A page as data: a title, and sections of prose, tables and pictures in a fixed order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

from .cells import Group
from .plot import Picture
from .table import Table


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """A heading with Markdown paragraphs, Markdown list items, tables, pictures, and command lines.

    With ``folded`` the items and tables are out of sight until a reader opens them by that line. Sections that are not
    ``short`` are in ``details.md`` and, folded, in the HTML page; ``report.md`` has the short ones.
    """

    key: str
    title: str
    paragraphs: tuple[str, ...] = ()
    items: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    commands: tuple[str, ...] = ()
    folded: str = ""
    short: bool = False


def section(
    key: str,
    title: str,
    content: Literal["tables", "items", "pictures"],
    made: Callable[[Any], Any],
    intro: str = "",
    *,
    short: bool = False,
) -> Callable[[Any], Iterator[Section]]:
    """A function of what a page shows: a section of what ``made`` finds there, or none where that is nothing.

    ``made`` gives one table, or several things.
    """

    def of(subject: Any) -> Iterator[Section]:
        found = made(subject)
        several: Any = (found,) if isinstance(found, Table) else tuple(found or ())
        if several:
            yield Section(key, title, (intro,) if intro else (), **{content: several}, short=short)

    return of


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """The content of one device's page."""

    device: str
    title: str
    subtitle: str
    sections: tuple[Section, ...]
    groups: tuple[Group, ...]

    @property
    def has_short(self) -> bool:
        """Whether some sections are short; a page without any is short as a whole."""
        return any(section.short for section in self.sections)
