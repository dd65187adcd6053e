"""The program that a cell times or compiles: a function of arrays, and the arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A function of arrays, and the arrays. JAX compiles it, unless ``arrays`` is given.

    With ``arrays`` the function belongs to another framework. It is called as it stands and returns when it is done;
    ``arrays`` then converts its outputs to those of a compiled program. ``renewed`` are the positions of the arguments
    that are new in every timed call (``fresh.py``).
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    arrays: Callable[[Any], Any] | None = None
    renewed: tuple[int, ...] = ()
