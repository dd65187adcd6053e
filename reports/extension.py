"""What the extension of a backend shows on the page of a run: its own cases, which the general tables leave out."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

from attnsuite.suite.kinds import extensions


@functools.cache
def pages() -> Mapping[str, Any]:
    """The module with the page of each extension (``reports/kascade/page.py``), by the name of its backend.

    ``has_group`` finds its cases. Of ``PARTS`` are their sections behind "Failed"; of ``OPENING``, from the cases of
    every kind, those before "In short", in which ``sentences`` are. ``loss`` gives of the cases of one model those that
    measure the backend's loss on text, and why that is not shown; None where there are none. ``LOSS_NOTE`` says so
    above the table.
    """
    return {backend: importlib.import_module(f".{backend}.page", __package__) for backend in extensions()}
