"""Helpers that several verbs share: a flag's help, output directories, a cell's limits, exit codes."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import importlib
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from attnsuite.models import TextFile

from ..errors import InputError
from ..typed import printable
from . import EXTENSIONS

if TYPE_CHECKING:
    from ..grid.fleet import FleetRequest
    from ..grid.progress import ProgressDisplay
    from ..grid.running import Limits

NO_RESULT = 1
BAD_INPUT = 2
CHECK_FAILED = 3  # a check that the command line asked for did not pass
DType = Literal["float32", "bfloat16", "float16"]
_YEAR = 365 * 24 * 3600  # seconds
_MEMORY_SHARE = 0.7  # of the machine, for one cell; the other cells of its case wait beside it
_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def flag(metavar: str, otherwise: str | None = None, name: str | None = None, choices: Any = None) -> Any:
    """The metadata of a flag for the help; ``otherwise`` describes the default where the value does not.

    ``name`` is the flag's, where Python keeps the word for itself. ``choices`` is the type of a flag that may be left
    out, without its None: an error would name None as one of the choices.
    """
    if otherwise is None:
        return tyro.conf.arg(metavar=metavar)
    hint = f"(default: {otherwise})"
    return tyro.conf.arg(name=name, metavar=metavar, help_behavior_hint=hint, constructor=choices)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OnFleet:
    """The flags of a verb whose cells the nodes of a Ray cluster can compute."""

    executor: Annotated[Literal["ray"] | None, flag("ray", "this machine", choices=Literal["ray"])] = None
    """ray: compute the cases on the nodes of a Ray cluster (docs/how-to/fleet.md)."""
    address: Annotated[str | None, flag("ADDRESS", "the cluster of this machine")] = None
    """With --executor ray: the cluster's address."""
    nodes_with: Annotated[str | None, flag("NAMES", "all nodes")] = None
    """With --executor ray: resources that a node announces, separated by commas, such as GPU or TPU."""
    any_versions: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """With --executor ray: take nodes whose versions are not this machine's; all must have the same."""
    packages: Annotated[str | None, flag("NAME==VERSION,...", "the nodes' own")] = None
    """With --executor ray: versions that Ray installs on the nodes for this run, as jax==0.10.1,jaxlib==0.10.1."""


def fleet_of(command: OnFleet) -> FleetRequest | None:
    """The nodes that the flags ask for; None for this machine. Raises InputError."""
    values = {"--address": command.address, "--nodes-with": command.nodes_with, "--any-versions": command.any_versions}
    values |= {"--packages": command.packages}
    given = [name for name, value in values.items() if value]
    if command.executor is None:
        if given:
            raise InputError(f"{', '.join(given)} is about a Ray cluster; add --executor ray.")
        return None
    from ..flag_values import names_of
    from ..grid.fleet import FleetRequest, parse_packages

    needed = () if command.nodes_with is None else tuple(names_of(command.nodes_with, "--nodes-with"))
    packages = {} if command.packages is None else parse_packages(command.packages)
    return FleetRequest(
        address=command.address or "auto", needed=needed, any_versions=command.any_versions, packages=packages
    )


def text_of(command: Any) -> TextFile | None:
    """The text that ``--text`` and ``--text-field`` name. Raises InputError for the latter alone."""
    if command.text is None:
        if command.text_field is not None:
            raise InputError(f"--text-field {command.text_field} is about a file of JSON lines; add --text FILE.")
        return None
    return TextFile(str(command.text), command.text_field)


def extended(kind: type, verb: str, arguments: Collection[str] = ()) -> type:
    """The verb's class with the flags of extensions; if the arguments ask for help, of those alone that they name."""
    is_help = not {"-h", "--help"}.isdisjoint(arguments)
    found = [
        flags
        for name in EXTENSIONS
        if (flags := importlib.import_module(f".{name}", __package__).FLAGS.get(verb))
        and (not is_help or any(name in argument for argument in arguments))
    ]
    if not found:
        return kind
    namespace, bases = {"__doc__": kind.__doc__}, (*found, kind)
    return dataclasses.make_dataclass(kind.__name__, (), bases=bases, namespace=namespace, frozen=True, kw_only=True)


def added(command: Any, kind: type) -> dict[str, Any]:
    """The flags of extensions that were given, as data; ``kind`` is the verb's own class."""
    base_fields = {field.name for field in dataclasses.fields(kind)}
    values = {field.name: getattr(command, field.name) for field in dataclasses.fields(command)}
    given = {name: value for name, value in values.items() if name not in base_fields and value is not None}
    return {name: str(value.resolve()) if isinstance(value, Path) else value for name, value in given.items()}


def arguments_of(command: Any) -> tuple[str, ...]:
    """The command line that gives ``command``, without flags at their defaults. Flags only, no positionals."""
    arguments = ["attnsuite", type(command).__name__.lower()]
    for field in dataclasses.fields(command):
        value = getattr(command, field.name)
        if value != field.default:
            arguments += [f"--{field.name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return tuple(arguments)


def check_once(runs: Sequence[Path]) -> None:
    """Raise InputError for a directory that is given twice: a run agrees with itself."""
    if len({path.resolve() for path in runs}) < len(runs):
        raise InputError(f"{' '.join(map(str, runs))} names a run twice; give each once.")


def directory(out: Path | None, name: str) -> Path:
    """``out``, or a directory under ``runs`` named after the present second."""
    return out or Path("runs") / f"{dt.datetime.now(dt.UTC).strftime('%Y%m%dT%H%M%SZ')}-{name}"


@contextlib.contextmanager
def progress(go_on: Callable[[], str]) -> Iterator[ProgressDisplay]:
    """The progress display of a grid. After an interruption it prints ``go_on()``, a sentence without its full stop."""
    from rich.console import Console

    from ..grid.progress import ProgressDisplay

    try:
        with ProgressDisplay(Console(stderr=True)) as display:
            yield display
    except KeyboardInterrupt:
        tell(f"interrupted: {go_on()}")
        raise


def resuming(command: OnFleet, out: Path, flags: Iterable[str], backends: Iterable[str] = ()) -> str:
    """How the run of ``command`` in ``out`` is continued, with those of its ``flags`` that it was given.

    A run with functions is not, since their file may have changed.
    """
    from ..store import CONFORMANCE, MANIFEST, RECORDS
    from ..user_function import is_reference

    folders = (out, out / CONFORMANCE)  # a run on a device holds its backends to the contract first
    if not any((folder / MANIFEST).is_file() for folder in folders):
        return "nothing was computed yet; start again."
    if any(map(is_reference, backends)):
        return f"what was computed stays in {out}; start again"
    progress_note = "what is done is kept; " if any((folder / RECORDS).is_file() for folder in folders) else ""
    chosen = {name: getattr(command, name) for name in (*flags, *(field.name for field in dataclasses.fields(OnFleet)))}
    again = shlex.join((*arguments_of(type(command)(**chosen)), "--resume", "--out", str(out)))
    return f"{progress_note}go on with: {again}"


def directory_of(command: Any, name: str) -> Path:
    """The output directory of a command with ``--resume``. Raises InputError for ``--resume`` without ``--out``."""
    if command.resume and command.out is None:
        raise InputError("--resume needs --out with the directory of the run to go on with.")
    return directory(command.out, name)


def tell(sentence: str) -> None:
    """Print one line on stderr, if there is a stderr."""
    with contextlib.suppress(OSError):
        print(printable(" ".join(sentence.split())), file=sys.stderr)


def limits_of(cell_timeout: float, cell_memory: str | None = None) -> Limits:
    """The limits of a cell, from its two flags. Raises InputError."""
    from ..grid.running import Limits
    from ..measure.memory import machine_bytes

    if not 0 < cell_timeout <= _YEAR:
        raise InputError(f"--cell-timeout {cell_timeout:g} must be above 0 seconds and at most {_YEAR}, a year.")
    memory = int(_MEMORY_SHARE * machine_bytes()) if cell_memory is None else parse_size(cell_memory)
    return Limits(cell_timeout, memory)


def parse_size(text: str) -> int:
    """Bytes of a size such as ``4GiB``, ``500 MB`` or ``1e9``. Raises InputError.

    >>> parse_size("1.5GiB")
    1610612736
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    try:
        size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size <= 0:
        raise InputError(f"--cell-memory {text!r} is not a size; give one such as 4GiB or 500MB.")
    return size
