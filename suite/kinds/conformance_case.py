"""``attnsuite judge``: a case is one problem of the contract, or one verdict, and a cell one backend held to it.

All backends of a problem follow each other, because the oracle's results are computed once per problem. What a backend
raises is a result, and the process goes on with the next problem.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from attnsuite.backends import Target, from_function, registry
from attnsuite.backends.features import Mode
from attnsuite.backends.support import takes_of

from .. import typed
from ..cell import Cell, Means, Outcome, Prepared, Request, Start
from ..errors import CellFailure
from ..measure import arrays
from ..measure.tensor_errors import as_error
from ..record import Record
from ..subprocess_function import SubprocessFunctionError, subprocess_function_of
from ..typed import Real, Seed, Size
from ..user_function import register_functions
from .kind import Dtype, Kind, backends_of, check_fields
from .kind import cell as cell_of

if TYPE_CHECKING:
    from attnsuite.testing.verdicts import Arrays, InSubprocess, Subject

TAKES = "takes"  # the name of the case that says what a backend or function takes
_NOT_TAKEN = "asks for more than it takes."
_NEAREST = 8  # names that a refusal has
_LONGEST = 300  # characters of what a backend raised


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConformanceCase:
    """:data:`TAKES`, a named verdict or problem of ``attnsuite.testing``, or the random problem ``number`` of ``seed``.

    The arrays of a named problem follow from ``seed`` too. With ``dtype`` it is asked in that one instead of its own,
    and its name says so. With ``interpret`` kernels that have an interpreter run in it.
    """

    kind: Literal["conformance"] = "conformance"
    name: str = ""
    number: Size | None = None
    seed: Seed | None = None
    interpret: bool = False
    dtype: Dtype | None = None

    def __post_init__(self) -> None:
        if not self.name and self.number is None:
            raise ValueError("name is needed: that of a problem or a verdict of attnsuite.testing")
        name = self.name or f"random {self.number} of seed {self.seed or 0}"
        object.__setattr__(self, "name", name.removesuffix(self._in_dtype) + self._in_dtype)
        check_fields(self)

    @property
    def problem(self) -> str:
        """Its name in ``attnsuite.testing``."""
        return self.name.removesuffix(self._in_dtype)

    @property
    def _in_dtype(self) -> str:
        return "" if self.dtype is None else f" in {self.dtype}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConformanceFacts:
    """Whether gradients were judged too, and how much of what the judge allows was used.

    ``share`` is the largest of all quantities; above 1 fails. It is None where a result was not finite or broke a rule.
    ``isolates``: infinity and NaN behind the lengths, in padding and in other documents changed nothing; None where the
    problem has none. ``drawn`` says what a random problem asks for. A verdict has an ``answer`` and a ``message``, and
    :data:`TAKES` a message alone.
    """

    gradients: bool
    share: Real | None
    isolates: bool | None = None
    drawn: str | None = None
    answer: Literal["yes", "no"] | None = None
    message: str | None = None


class Conformance(Kind):
    """The kind of :class:`ConformanceCase`."""

    titles: ClassVar = {"conformance": "conformance"}
    page: ClassVar = "conformance"
    case: ClassVar = ConformanceCase
    facts: ClassVar = ConformanceFacts
    shares_process: ClassVar = True
    cases_share_process: ClassVar = True
    needs_ceilings: ClassVar = False
    calls_in_subprocess: ClassVar = True

    def read(self, fields: Mapping[str, Any]) -> ConformanceCase:
        """The case with these fields. Raises ValueError for a name that is none of a problem or verdict."""
        from attnsuite.testing import problems, verdicts  # noqa: PLC0415 (as below)

        case = typed.convert(fields, ConformanceCase)
        known = (TAKES, *verdicts.VERDICTS, *problems.CASES)
        if case.number is None and case.problem not in known:
            near = ", ".join(difflib.get_close_matches(case.problem, known, n=_NEAREST, cutoff=0))
            raise ValueError(
                f"name = {typed.quoted(case.problem)} is no problem and no verdict of attnsuite.testing; of these "
                f"{len(known)} the nearest are {near}"
            )
        return case

    def cells(self, case: ConformanceCase, request: Request) -> Iterable[Cell]:
        """A cell per backend; whether it takes the problem is found when it is judged."""
        for row in backends_of(request):
            interprets = "interpret" in takes_of(registry.get(row), Target.here(), "interpret").modes
            mode = "interpret" if case.interpret and interprets else "native"
            yield cell_of(case, row, resolved=row, mode=mode, exact=registry.get(row).exact)

    def prepare(self, cell: Cell, case: ConformanceCase, means: Means) -> Prepared:
        """Judge; nothing is timed."""
        return Prepared(judged(cell.row, case, "interpret" if cell.mode == "interpret" else "native", means.start))


def answer_of(record: Record) -> str:
    """The answer of a verdict's record: yes, no, not applicable, or the status of one that gave none."""
    if record.status == "unsupported":
        return "not applicable"
    return record.facts.answer or record.status if isinstance(record.facts, ConformanceFacts) else record.status


def judged(name: str, case: ConformanceCase, mode: Mode = "native", start: Start | None = None) -> Outcome:
    """Hold a registered backend to the problem, or ask for the verdict; ``start`` makes another process for it."""
    import jax  # noqa: PLC0415 (the command line starts without it)

    from attnsuite.testing import judging, problems, random_specs, verdicts  # noqa: PLC0415 (no other kind needs it)

    backend, target = registry.get(name), Target.here()
    if case.name == TAKES:
        return Outcome(facts=ConformanceFacts(gradients=False, share=None, message=_description(name, target, mode)))
    if case.number is None and case.name in verdicts.VERDICTS:
        return _verdict(name, case.name, verdicts.Subject(backend, target, mode, case.seed or 0), start)
    if not backend.exact:
        reason = f"{name} is approximate by design, and the contract's judge is for exact backends."
        return Outcome(status="unsupported", reasons=(reason,), error=_NOT_TAKEN)
    try:
        if case.number is None:
            found = judging.judge_case(backend, case.problem, target, mode, case.seed or 0, case.dtype)
        else:
            found = judging.judge_random(backend, case.number, case.seed or 0, target, mode)
    except Exception as error:  # noqa: BLE001 (whatever a backend raises is a result)
        return _crashed(error)
    finally:
        if case.number is not None:  # no two random problems share a program
            problems.traced.cache_clear()
            jax.clear_caches()
    if found.status == "unsupported":
        asks = any(" is not supported by " in reason for reason in found.reasons)
        reasons = tuple(sentence.replace("SubprocessFunctionError: ", "") for sentence in found.reasons)
        return Outcome(status="unsupported", reasons=reasons, error=_NOT_TAKEN if asks else reasons[0])
    share = max((random_specs.share(verdict) for verdict in found.verdicts.values()), default=math.inf)
    return Outcome(
        status=found.status,
        error=" ".join(found.reasons) or None,
        accuracy={name: as_error(verdict) for name, verdict in found.verdicts.items()},
        facts=ConformanceFacts(
            gradients="dq" in found.verdicts,
            isolates=found.isolates,
            share=share if math.isfinite(share) else None,
            drawn=found.problem or None,
        ),
    )


def _verdict(name: str, verdict: str, subject: Subject, start: Start | None) -> Outcome:
    """The outcome of a verdict; one that does not apply is unsupported, with the reason."""
    from attnsuite.testing import verdicts  # noqa: PLC0415 (as above)

    try:
        found = verdicts.ask(verdict, subject, start and in_subprocess(name, subject, start))
    except Exception as error:  # noqa: BLE001 (whatever a backend raises is a result)
        return _crashed(error)
    if found.answer == "not applicable":
        return Outcome(status="unsupported", reasons=(found.message,), error=f"not applicable: {found.message}")
    return Outcome(facts=ConformanceFacts(gradients=False, share=None, answer=found.answer, message=found.message))


def in_subprocess(name: str, subject: Subject, start: Start) -> InSubprocess | None:
    """How to compute in a process that ``start`` makes; None on a device that one process holds alone."""
    from attnsuite.testing.verdicts import results  # noqa: PLC0415 (as above)

    function = subprocess_function_of(subject.backend)

    def computed(threads: int | None) -> Mapping[str, Arrays]:
        with contextlib.closing(start(threads)) as process:
            if function is not None:
                takes = takes_of(subject.backend, subject.target, subject.mode)
                backend = from_function(dataclasses.replace(function, process=process), takes=takes, name=name)
                return results(dataclasses.replace(subject, backend=backend))
            path = process.folder() / "results"
            try:
                labels = process.ask(write_results, name, subject.mode, subject.seed, path)
            except CellFailure as failure:
                raise RuntimeError(f"it ran here, and failed in another process: {failure.message}") from failure
            found = arrays.load(path)
        return {label: {x: found[f"{label}|{x}"] for x in names} for label, names in labels.items()}

    return computed if subject.target.platform == "cpu" else None


def write_results(row: str, mode: Mode, seed: int, path: Path) -> dict[str, list[str]]:
    """In the other process: write what the verdict ``deterministic`` compares; the names of the arrays by label."""
    from attnsuite.testing import verdicts  # noqa: PLC0415 (as above)

    register_functions([row])
    found = verdicts.results(verdicts.Subject(registry.get(row), Target.here(), mode, seed))
    arrays.save(path, {f"{label}|{x}": array for label, of_one in found.items() for x, array in of_one.items()})
    return {label: list(of_one) for label, of_one in found.items()}


def _crashed(error: Exception) -> Outcome:
    name, message = type(error).__name__, " ".join(str(error).split())
    # JAX puts the traceback of a callback before its error.
    _, found, raised = str(error).rpartition("SubprocessFunctionError: ")
    if isinstance(error, SubprocessFunctionError) or found:
        return Outcome(status="crashed", error=(raised.partition("\n")[0] if found else message)[:_LONGEST])
    return Outcome(status="crashed", error=f"{name}: {message}"[:_LONGEST])


def _description(name: str, target: Target, mode: Mode) -> str:
    """What a backend takes, or what was found out of a plain function."""
    if (function := subprocess_function_of(registry.get(name))) and function.description:
        return function.description
    takes = takes_of(registry.get(name), target, mode)
    return f"It takes {', '.join(sorted(takes.features))}; in {', '.join(takes.dtypes)}."


CONFORMANCE = Conformance()
