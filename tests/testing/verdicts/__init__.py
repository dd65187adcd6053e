"""Facts about a kernel that need no reference: same bits twice, same bits in any batch, no leak, symmetries.

:data:`VERDICTS` is the one table of them. The words of a verdict, in `attnsuite judge`, on pages and in badges, come
from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from .batch_invariant import batch_invariant
from .deterministic import InSubprocess, deterministic, results
from .finding import Answer, Finding
from .isolates import isolates
from .subject import Arrays, Subject
from .symmetric import symmetric

__all__ = ["VERDICTS", "Answer", "Arrays", "Finding", "InSubprocess", "Subject", "Verdict", "ask", "results"]


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """``question`` is what ``yes`` answers; ``check`` finds the answer, ``no`` with the first difference."""

    question: str
    check: Callable[[Subject], Finding]


VERDICTS: Mapping[str, Verdict] = {
    "deterministic": Verdict(
        "Are output and gradients the same bits in every run, process and number of threads?", deterministic
    ),
    "batch_invariant": Verdict(
        "Has a sequence the same bits alone and in any batch, in chunks of its prefill, and step by step?",
        batch_invariant,
    ),
    "isolates": Verdict("Do huge numbers, infinity and NaN in what a row may not see change no bit of it?", isolates),
    "symmetric": Verdict("Does it keep what permuted, shifted and repeated inputs may not change?", symmetric),
}


def ask(name: str, subject: Subject, elsewhere: InSubprocess | None = None) -> Finding:
    """The finding of the named verdict. What the backend raises is raised."""
    if (spec := subject.spec()) is not None and (misshapen := subject.fault(spec)):
        return Finding("not applicable", misshapen)
    return deterministic(subject, elsewhere) if name == "deterministic" else VERDICTS[name].check(subject)
