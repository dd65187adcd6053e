"""A page as data: a title, and sections of prose, tables and pictures in a fixed order."""

from __future__ import annotations

import dataclasses

from .cells import Group
from .plot import Picture
from .table import Table


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """A heading with Markdown paragraphs, Markdown list items, tables, pictures, and command lines.

    With ``folded`` the items and tables are out of sight until a reader opens them by that line.
    """

    key: str
    title: str
    paragraphs: tuple[str, ...] = ()
    items: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    commands: tuple[str, ...] = ()
    folded: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """The content of one device's page."""

    device: str
    title: str
    subtitle: str
    sections: tuple[Section, ...]
    groups: tuple[Group, ...]
