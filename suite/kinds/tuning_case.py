"""What ``attnsuite tune`` tried: the problem and the facts of its records."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from attnsuite.backends.tunable import KernelBuild, KernelWork

from ..errors import InputError
from ..record import Schedule
from ..typed import Real, Scalar
from . import make_case
from .kind import Kind, problem_of
from .op_case import OpCase, OpKind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Options that were tried: seconds of the samples, facts about the kernels of an absent device, or the failure.

    The facts are the compiler's (``kernels``, ``schedules``) or counted by the backend (``work``).
    """

    options: dict[str, Scalar]
    samples: tuple[Real, ...] = ()
    kernels: tuple[KernelBuild, ...] = ()
    work: KernelWork | None = None
    schedules: tuple[Schedule, ...] = ()
    error: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """Every candidate, the defaults first. Raises ValueError where there is none."""

    tried: tuple[Trial, ...]

    def __post_init__(self) -> None:
        if not self.tried:
            raise ValueError("facts.tried = [] holds no candidate; the defaults are always one")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TuningCase(OpCase):
    """An attention call whose options are tried. ``op`` is its kind."""

    kind: Literal["tuning"]  # pyright: ignore[reportIncompatibleVariableOverride]
    op: OpKind

    @property
    def operation(self) -> str:
        """What the call does, as the kind of an attention call says it."""
        return self.op


class Tuning(Kind):
    """The kind of records of ``attnsuite tune``. A suite has no such case."""

    titles: ClassVar = {"tuning": "tuning"}
    page: ClassVar = "tuning"
    facts: ClassVar = Trials

    def of(self, case: OpCase) -> TuningCase:
        """The case of a record about an attention call."""
        fields: dict[str, Any] = problem_of(case) | {"kind": "tuning", "op": case.kind}
        return TuningCase(**fields)

    def call(self, problem: Mapping[str, Any]) -> OpCase:
        """The attention call of such a problem. Raises InputError."""
        case = make_case({name: value for name, value in problem.items() if name != "op"} | {"kind": problem.get("op")})
        if not isinstance(case, OpCase):
            raise InputError(f"{case.name} is no attention call; only those are tuned.")
        return case


TUNING = Tuning()
