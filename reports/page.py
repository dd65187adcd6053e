"""A page as data: a title, and sections of prose, tables and pictures in a fixed order."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from attnsuite.suite.kinds import extensions
from attnsuite.suite.store import MANIFEST
from attnsuite.suite.user_function import is_reference

from .cells import Group
from .formatting import code, command_line
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


def reproduce_section(at: str, words: Sequence[str], *, short: bool = False) -> Section:
    """The command that was run, and which files it names that a reader of the page may not have."""
    given = list(itertools.pairwise(words))
    suites = [word for flag, word in given if flag == "--suite" and word.endswith(".toml")]
    functions = [x for flag, word in given if flag == "--backends" for x in word.split(",") if is_reference(x)]
    absent = ", ".join(map(code, (*suites, *functions)))
    instead = f"; `cases` in `{MANIFEST}` has the keys of every case" if suites else ""
    paragraphs = (f"The run does not hold {absent}{instead}.", at) if absent else (at,)
    return Section("reproduce", "Reproduce", paragraphs, commands=(command_line(words),), short=short)


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


@functools.cache
def pages() -> Mapping[str, Any]:
    """The module of each extension's page, whose cases the general tables leave out, by the name of its backend.

    ``has_group`` finds its cases. Of ``PARTS`` are their sections behind "Failed"; of ``OPENING``, from the cases of
    every kind, those before "In short", in which ``sentences`` are. ``loss`` gives of the cases of one model those that
    measure the backend's loss on text, and why that is not shown; None where there are none. ``LOSS_NOTE`` says so
    above the table.
    """
    return {backend: importlib.import_module(f".{backend}.page", __package__) for backend in extensions()}
