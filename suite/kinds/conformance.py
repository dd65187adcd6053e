"""What ``attnsuite judge`` found: the facts of their records."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from ..typed import Real
from .kind import Kind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Whether gradients were judged too, and how much of what the judge allows was used.

    ``share`` is the largest of all quantities; above 1 fails. It is None where a result was not finite or broke a rule.
    ``isolates``: infinity and NaN behind the lengths, in padding and in other documents changed nothing; None where the
    problem has none.
    """

    gradients: bool
    share: Real | None
    isolates: bool | None = None


class Conformance(Kind):
    """The kind of records of a backend held to the contract. A suite has no such case."""

    titles: ClassVar = {"conformance": "conformance"}
    facts: ClassVar = Held


CONFORMANCE = Conformance()
