"""The interface of a kind of case, and checks that the cases of all kinds share."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePath
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from attnsuite.backends import AttentionSpec, BackendUnavailableError, Resolution, Target, registry
from attnsuite.models import TextFile

from .. import peers, typed
from ..cell import Case, Cell, Means, Prepared, Request
from ..errors import InputError, as_input
from ..measure.program import Draw
from ..measure.tensor_errors import judge_outputs
from ..record import Record, TensorError

Dtype = Literal["float32", "bfloat16", "float16"]
Share = Annotated[float, Meta(gt=0, le=1)]
Least = Annotated[int, Meta(ge=2, le=2**31 - 1)]
Long = Annotated[int, Meta(ge=64, le=2**31 - 1)]
Layers = Annotated[int, Meta(ge=1, le=2**16)]
Keys = Annotated[int, Meta(ge=0, le=2**31 - 1)]

Kernel = Literal["", "xla", "pallas", "flash_cpu"]  # what computes a sparse backend's row; empty: the device's default

LOSS = {"bits_per_byte": "{:.4f} bits/byte", "kl_mean": "KL {:.1e}"}  # as :attr:`Kind.results`
SHORT_DTYPE = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class Kind:
    """One kind of case: everything that the grid and the reports must know about it.

    The methods defined here suit a kind whose rows are backends and whose cells bring their own comparison.
    """

    titles: ClassVar[Mapping[str, str]]  # each ``kind`` of its records, and the title of their tables
    # The kinds of its records that a page shows in a column, table or picture of their own, and what they are about: of
    # a call "forward", "forward and backward" or "token", of a model "prefill", "decode" or "text".
    phases: ClassVar[Mapping[str, str]] = {}
    # The headers of ``Record.figures``, each with its unit: a table of the page has a column for each figure that is in
    # no other table. A figure without a header goes by its name.
    figures: ClassVar[Mapping[str, str]] = {}
    # The figures of ``Record.quality`` that a terminal shows of a cell, the most telling first, each in its words.
    results: ClassVar[Mapping[str, str]] = {}
    page: ClassVar[str] = ""  # the module of ``attnsuite.reports.pages`` whose page shows its records alone
    # The frozen dataclass of its cases. It checks itself and raises InputError. None: no suite asks for such records.
    case: ClassVar[type[Any] | None] = None
    facts: ClassVar[type[Any] | None] = None  # the frozen dataclass of ``Record.facts``, where status is ok or wrong
    shares_process: ClassVar[bool] = False  # cells of a case run in one process: nothing is timed or weighed
    cases_share_process: ClassVar[bool] = False  # and so do consecutive cases
    is_call: ClassVar[bool] = False  # a case is one attention call (:class:`.op_case.OpCase`)
    needs_ceilings: ClassVar[bool] = True  # whether a run of it measures the machine's peak
    # Cells do not see what they are judged by: they return outputs (``cell.Prepared``), and another process judges. Not
    # for a kind that ``shares_process``.
    judges_in_subprocess: ClassVar[bool] = False
    # A user's function is called in another process (``subprocess_function.py``), and judged where the cell is.
    calls_in_subprocess: ClassVar[bool] = False
    rechecks_all: ClassVar[bool] = False  # :meth:`recheck` is for every row, not only for functions of the user
    # A kind of its records, and the backend whose loss on text they give beside controls: its perplexity alone is not
    # shown then.
    controlled: ClassVar[Mapping[str, str]] = {}
    peers: ClassVar[tuple[str, ...]] = ()  # those of ``suite/peers/`` that take its cases
    baseline: ClassVar[str] = "standard"  # the row that times and memory of a case are relative to

    def cells(self, case: Any, request: Request) -> Iterable[Cell]:
        """The cells of a case on this machine, with what runs in each (initialises JAX). Raises InputError."""
        raise NotImplementedError

    def prepare(self, cell: Cell, case: Any, means: Means) -> Prepared:
        """Make a cell ready to be sampled. Raises CellFailure where it needs more memory than its limit."""
        raise NotImplementedError

    def processes(self, case: Any) -> tuple[int, int] | None:
        """The number of processes that are joined to compute a cell, and the CPU devices of each; None for one process.

        Only for a kind that ``shares_process``.
        """
        return None

    def patience(self, case: Any) -> int:
        """How many times ``--cell-timeout`` a cell may take until it is ready."""
        return 1

    def result(self, record: Record) -> list[str]:
        """What a terminal shows of a cell without a time."""
        return [text.format(record.quality[name]) for name, text in self.results.items() if name in record.quality]

    def read(self, fields: Mapping[str, Any]) -> Case:
        """The case with these fields, ``kind`` among them. Raises ValueError with a sentence, less its full stop."""
        if self.case is None:
            raise ValueError(f"kind = {typed.quoted(fields['kind'])} is of records alone; no suite has such a case")
        return typed.convert(fields, self.case)

    def of_checkpoint(self, text: Mapping[str, Any], timed: Mapping[str, Any]) -> Iterable[Case]:
        """Its cases in the suite of a checkpoint, from the fields of cases on text and of those that are timed.

        Only a kind that ships here is asked.
        """
        return ()

    def as_now(self, problem: dict[str, Any]) -> dict[str, Any]:
        """The problem of a record, also of one that an earlier version wrote."""
        return problem

    def rows(self, case: Any) -> tuple[str, ...]:
        """The rows that only this kind knows, in the order of their table; () if its rows are backends and peers."""
        return ()

    def spec(self, case: Any) -> AttentionSpec | None:
        """The attention that a case computes; None where it computes none, or several types."""
        return None

    def judged_by(self, case: Any, mode: str | None) -> tuple[Case, ...]:
        """The cases whose reference can judge a cell of ``case`` in ``mode``. If none is computed yet, the first is.

        () where a cell brings its own comparison: its kind has no :meth:`write_reference`.
        """
        return () if type(self).write_reference is Kind.write_reference else (case,)

    def write_reference(self, case: Any, path: Path, text: TextFile | None, draw: Draw | None) -> None:
        """Write to ``path`` (.npz) what the outputs for the inputs of ``draw`` are judged by.

        Only of a case that :meth:`judged_by` names.
        """

    def judge(
        self, case: Any, outputs: Mapping[str, Any], reference: Path, draw: Draw | None, *, exact: bool
    ) -> dict[str, TensorError]:
        """Judge the outputs of a cell by ``reference``, in a process that has loaded no code of the user.

        Here every row is judged as an ``exact`` one, by the reference of ``tensor_errors.save_reference``. Raises
        CellFailure for outputs of another name, shape or dtype. Only of a kind that ``judges_in_subprocess``.
        """
        return judge_outputs(outputs, reference, case.dtype)

    def recheck(self, case: Any, outputs: Mapping[str, Any], draw: Draw, choice: int) -> dict[str, TensorError] | None:
        """Judge a part of the outputs of a timed call, chosen by ``choice``; None where a part cannot be judged.

        Called for functions of the user. With ``rechecks_all``, of a kind where it costs little, it is for every row.
        """
        return None


def cell(case: Case, row: str, target: Target | str | None = None, **outcome: Any) -> Cell:
    """A cell of ``case`` on ``target``, or on this machine's device (initialises JAX)."""
    return Cell(case=case, row=row, target=str(target or Target.here()), **outcome)


def refused(case: Case, row: str, reasons: Iterable[str]) -> Cell:
    """A cell in which nothing runs."""
    return cell(case, row, resolved=None, mode=None, exact=None, reasons=tuple(reasons))


def of_backends(case: Case, request: Request, ask: Callable[[str], Iterable[tuple[str, Resolution]]]) -> list[Cell]:
    """The cells of all backends that are asked for, see :func:`of_backend`."""
    return [of_backend(case, row, ask) for row in backends_of(request)]


def of_backend(case: Case, row: str, ask: Callable[[str], Iterable[tuple[str, Resolution]]]) -> Cell:
    """The cell of a backend. ``ask(row)`` gives each type of attention that runs for that row with its resolution."""
    try:
        found = [resolution for _, resolution in ask(row)]
    except BackendUnavailableError as error:
        return refused(case, row, (str(error),))
    names = tuple(dict.fromkeys(resolution.backend.name for resolution in found))
    fallback = any(resolution.mode == "fallback" for resolution in found)
    reasons = tuple(dict.fromkeys(reason for resolution in found for reason in resolution.reasons))
    exact = all(resolution.backend.exact for resolution in found)
    mode = "fallback" if fallback else found[0].mode
    return cell(case, row, resolved="+".join(names), mode=mode, exact=exact, reasons=reasons)


def of_peers(case: Case, request: Request, names: Iterable[str]) -> Iterable[Cell]:
    """A cell for each of the peers ``names`` that is asked for."""
    for row in request.rows:
        if row in names:
            reasons = peers.refusals(row, case)
            yield refused(case, row, reasons) if reasons else cell(case, row, resolved=row, mode="native", exact=True)


def backends_of(request: Request) -> tuple[str, ...]:
    """The rows that are asked for and are backends."""
    return tuple(row for row in request.rows if row in registry.names())


def problem_of(case: Case) -> dict[str, Any]:
    """The case as JSON scalars, from which :func:`attnsuite.suite.kinds.make_case` makes it again."""
    return dataclasses.asdict(case)  # pyright: ignore[reportArgumentType]  (every case is a dataclass)


def label_of(fields: Mapping[str, Any]) -> str:
    """A case in a sentence: its name, if it has one that can be shown."""
    name = fields.get("name")
    return f"case {name}" if isinstance(name, str) and _NAME.fullmatch(name) else f"a case of kind {fields['kind']}"


def check_fields(case: Any) -> None:
    """Raise InputError where a field has not the type that it is declared with."""
    with as_input(f"{label_of({'name': case.name, 'kind': case.kind})}: ", "."):
        typed.check_fields(case)


def name_case(case: Any, name: str) -> None:
    """Give a case without a name the one made from its fields. Raises InputError for an invalid name."""
    if not case.name:
        object.__setattr__(case, "name", name)
    if not _NAME.fullmatch(case.name):
        accepted = "letters, digits, dots, dashes and underscores, at most 200"
        raise InputError(f"name = {typed.quoted(case.name)} cannot name a case; use {accepted}.")


def model_word(model: str) -> str:
    """A preset's name, or the last part of a directory, in the letters that a case's name may have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", PurePath(model).name)[:100]
