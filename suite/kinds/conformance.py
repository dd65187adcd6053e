"""``attnsuite judge``: a case is one problem of the contract, and a cell one backend held to it.

All backends of a problem follow each other, because the oracle's results are computed once per problem. What a backend
raises is a result, and the process goes on with the next problem.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import ClassVar, Literal

from attnsuite.backends import Target, registry

from ..cell import Asked, Cell, Means, Outcome, Prepared
from ..measure.judge import as_error
from ..typed import Real, Seed, Whole
from .kind import Kind, backends_of, check_fields
from .kind import cell as cell_of

_LONGEST = 300  # characters of what a backend raised


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConformanceCase:
    """A named problem (:data:`attnsuite.testing.problems.CASES`), or the random problem ``number`` of ``seed``."""

    kind: Literal["conformance"] = "conformance"
    name: str = ""
    number: Whole | None = None
    seed: Seed | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or f"random {self.number} of seed {self.seed}")
        check_fields(self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Whether gradients were judged too, and how much of what the judge allows was used.

    ``share`` is the largest of all quantities; above 1 fails. It is None where a result was not finite or broke a rule.
    ``isolates``: infinity and NaN behind the lengths, in padding and in other documents changed nothing; None where the
    problem has none. ``drawn`` says what a random problem asks for.
    """

    gradients: bool
    share: Real | None
    isolates: bool | None = None
    drawn: str | None = None


class Conformance(Kind):
    """The kind of :class:`ConformanceCase`."""

    titles: ClassVar = {"conformance": "conformance"}
    case: ClassVar = ConformanceCase
    facts: ClassVar = Held
    shares_process: ClassVar = True
    cases_share_process: ClassVar = True
    needs_ceilings: ClassVar = False

    def cells(self, case: ConformanceCase, asked: Asked) -> Iterable[Cell]:
        """A cell per backend; whether it takes the problem is found when it is judged."""
        for row in backends_of(asked):
            yield cell_of(case, row, resolved=row, mode="native", exact=registry.get(row).exact)

    def prepare(self, cell: Cell, case: ConformanceCase, means: Means) -> Prepared:
        """Judge; nothing is timed."""
        return Prepared(judged(cell.row, case))


def judged(name: str, case: ConformanceCase) -> Outcome:
    """Hold a registered backend to the problem."""
    import jax  # noqa: PLC0415 (the command line starts without it)

    from attnsuite.testing import judging, problems, random_specs  # noqa: PLC0415 (no other kind needs it)

    backend, target = registry.get(name), Target.here()
    if not backend.exact:
        reason = f"{name} is approximate by design, and the contract's judge is for exact backends."
        return Outcome(status="unsupported", reasons=(reason,), error="refused before anything was traced.")
    try:
        if case.number is None or case.seed is None:
            found = judging.judge_case(backend, case.name, target)
        else:
            found = judging.judge_random(backend, case.number, case.seed, target)
    except Exception as error:  # noqa: BLE001 (whatever a backend raises is a result)
        return Outcome(status="crashed", error=f"{type(error).__name__}: {' '.join(str(error).split())}"[:_LONGEST])
    finally:
        if case.number is not None:  # no two random problems share a program
            problems.traced.cache_clear()
            jax.clear_caches()
    if found.status == "unsupported":
        return Outcome(status="unsupported", reasons=found.said, error="refused before anything was traced.")
    share = max(random_specs.share(verdict) for verdict in found.verdicts.values())
    return Outcome(
        status=found.status,
        error=" ".join(found.said) or None,
        accuracy={name: as_error(verdict) for name, verdict in found.verdicts.items()},
        facts=Held(
            gradients="dq" in found.verdicts,
            isolates=found.isolates,
            share=share if math.isfinite(share) else None,
            drawn=found.problem or None,
        ),
    )


CONFORMANCE = Conformance()
