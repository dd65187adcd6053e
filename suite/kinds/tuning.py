"""What ``attnsuite tune`` tried: the facts of its records."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from attnsuite.backends.tunable import KernelWork

from ..record import Kernel, Schedule
from ..typed import Real, Scalar
from .kind import Kind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Options that were tried: seconds of the samples, facts about the kernels of an absent device, or the failure.

    The facts are the compiler's (``kernels``, ``schedules``) or counted by the backend (``work``).
    """

    options: dict[str, Scalar]
    samples: tuple[Real, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    work: KernelWork | None = None
    schedules: tuple[Schedule, ...] = ()
    error: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """Every candidate, the defaults first."""

    tried: tuple[Trial, ...]


class Tuning(Kind):
    """The kind of records of ``attnsuite tune``. A suite has no such case."""

    titles: ClassVar = {"tuning": "tuning"}
    page: ClassVar = "tuning"
    facts: ClassVar = Trials


TUNING = Tuning()
