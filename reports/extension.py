"""What the extension of a backend shows on the page of a run: its own cases, which the general tables leave out."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable, Sequence

from attnsuite.suite.kinds import extensions

from .cells import Group
from .page import Section

_Part = Callable[[Sequence[Group]], Iterable[Section]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExtensionPage:
    """The sections of the cases that ``has_group`` finds.

    ``parts`` stand behind "Failed"; ``opening``, of the cases of every kind, before "In short", in which
    ``sentences`` are. ``loss`` gives of the cases of one model those that measure the loss of
    ``backend`` on text, and why that is not shown; None where there are none. ``loss_note`` says so above the table.
    """

    backend: str
    has_group: Callable[[Group], bool]
    opening: tuple[_Part, ...]
    parts: tuple[_Part, ...]
    sentences: Callable[[Sequence[Group]], Iterable[str]]
    loss: Callable[[Sequence[Group]], tuple[Sequence[Group], str | None] | None]
    loss_note: str


@functools.cache
def pages() -> tuple[ExtensionPage, ...]:
    """Of each extension that shows something."""
    return tuple(importlib.import_module(found.page).PAGE for found in extensions().values() if found.page)
