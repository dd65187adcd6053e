"""The answer of a verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

Answer = Literal["yes", "no", "not applicable"]


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """``answer``, and one sentence: what was tried, or which change broke it first and how far."""

    answer: Answer
    message: str


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """One change that should change nothing: ``change``, with ``detail`` where it was made in several ways.

    ``broken`` says which numbers it changed, and is empty where every bit is the same.
    """

    change: str
    detail: str
    dtype: str
    broken: str


def concluded(trials: Iterable[Trial], otherwise: str) -> Finding:
    """The finding of all trials, in which the first that is broken comes first. ``otherwise``: why there was none."""
    trials = tuple(trials)
    broken = [trial for trial in trials if trial.broken]
    if not broken:
        tried = "; ".join(dict.fromkeys(trial.change for trial in trials))
        dtypes = ", ".join(dict.fromkeys(trial.dtype for trial in trials))
        return Finding("yes", f"{tried} ({dtypes}).") if trials else Finding("not applicable", otherwise)
    first, *others = broken
    changes = dict.fromkeys(trial.change for trial in others if trial.change != first.change)
    also = f" Also: {'; '.join(changes)}." if changes else ""
    how = ", ".join(filter(None, (first.detail, first.dtype)))
    return Finding("no", f"{first.change} ({how}): {first.broken}.{also}")
