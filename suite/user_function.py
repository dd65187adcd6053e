"""A user's own kernel, named on the command line as ``PATH.py:NAME``: a function of arrays, loaded from that file.

The command line checks the name; the worker processes load the file. Nothing else loads one: a run of such a kernel is
not resumed, so no file is loaded because a run directory names it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from attnsuite.backends import FEATURES, Takes, from_function, registry
from attnsuite.backends.function import FunctionBackend

from .errors import InputError
from .flag_values import known_backend
from .plain_function import explained, found_out

_MODULE = "attnsuite_own_"  # before the name of a user's file, of which it makes a module
_FORM = "give PATH.py:NAME, a file and a function of (query, key, value) in it"


def is_reference(name: str) -> bool:
    """Whether a name on the command line means a file.

    >>> is_reference("kernels/my.py:fn"), is_reference("standard")
    (True, False)
    """
    path, _, _ = name.rpartition(":")
    return path.endswith(".py")


def check_reference(reference: str, form: str = _FORM) -> str:
    """The reference, if its file is there and its name can be one. Raises InputError, which ends with ``form``."""
    path, _, name = reference.rpartition(":")
    if not name.isidentifier():
        raise InputError(f"{reference!r} names no function; {form}.")
    if not Path(path).is_file():
        raise InputError(f"{path} does not exist; {form}.")
    return reference


def files_of(names: Iterable[str]) -> tuple[str, ...]:
    """The files that names of this kind mean."""
    return tuple(dict.fromkeys(name.rpartition(":")[0] for name in filter(is_reference, names)))


def known_row(name: str, peers: Collection[str] = ()) -> str:
    """The name, if it means a file that is there, a backend, or one of ``peers``. Raises InputError."""
    return check_reference(name) if is_reference(name) else known_backend(name, peers)


def register_functions(names: Iterable[str]) -> None:
    """Load what is named by a file and register it under the name as it was given. Raises InputError."""
    for reference in filter(is_reference, names):
        if reference not in registry.names():
            registry.register(load(reference)[0])


def digests(names: Iterable[str]) -> dict[str, str]:
    """The digest of the file that each name means, for those that mean one. Raises InputError."""
    found = {}
    for reference in filter(is_reference, names):
        path = Path(check_reference(reference).rpartition(":")[0])
        try:
            found[reference] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    return found


def load(reference: str) -> tuple[FunctionBackend, str]:
    """The backend of what is named, and what was found out of a plain function. Raises InputError.

    The latter is a sentence, empty for what ``backends.from_function`` made.
    """
    path, _, name = check_reference(reference).rpartition(":")
    try:
        with contextlib.chdir("."):  # other names are relative to this directory, and the file may change it
            found = getattr(load_module(Path(path)), name, None)
            folder = Path.cwd()
    except InputError as error:
        raise InputError(explained(str(error))) from error
    if isinstance(found, FunctionBackend):
        return from_function(
            _within(folder, found.function), takes=found.declared, name=reference, exact=found.exact
        ), ""
    if isinstance(found, type) or not callable(found) or hasattr(found, "plan"):
        raise InputError(
            f"{name} in {path} is no function of (query, key, value) and nothing that backends.from_function made; "
            "a backend of another class comes by an entry point (docs/how-to/my-kernel.md)."
        )
    found = _within(folder, found)
    plain = found_out(found)
    # What it raised is the reason for all that was not found out.
    because: dict[str, str] = dict.fromkeys(FEATURES, f"which raised {plain.error}") if plain.error else {}
    takes = Takes(features=plain.features, dtypes=plain.dtypes, modes=("native", "compile"), because=because)
    return from_function(found, takes=takes, name=reference), str(plain)


def _within(folder: Path, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called in the directory that its file changed to: it may read files when it is traced."""
    if folder == Path.cwd():
        return function

    @functools.wraps(function)
    def call(*arrays: Any, **keywords: Any) -> Any:
        with contextlib.chdir(folder):
            return function(*arrays, **keywords)

    return call


def is_raised_by_user(error: Exception) -> bool:
    """Whether the error passed through a function of a user's file."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(str(frame.f_globals.get("__name__")).startswith(_MODULE) for frame, _ in frames)


def load_module(path: Path) -> ModuleType:
    """The module of the file, whose own folder is searched last for what it imports. Raises InputError.

    Of two files in different folders each gets the modules of its own folder, also where they have the same names.
    """
    folder = path.resolve().parent
    files = [Path(str(module.__file__)).resolve() for name, module in sys.modules.items() if name.startswith(_MODULE)]
    others = {file.parent for file in files} - {folder}
    for name in [name for name in sys.modules if others and _is_in(name.partition(".")[0], others, folder)]:
        del sys.modules[name]
    if str(folder) not in sys.path or others:
        sys.path[:] = [*(entry for entry in sys.path if Path(entry) not in others), str(folder), *map(str, others)]
    spec = importlib.util.spec_from_file_location(f"{_MODULE}{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} cannot be imported; give a file of Python.")
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InputError(f"{path} does not load: {type(error).__name__}: {error}") from error
    return module


def _is_in(top: str, others: Collection[Path], folder: Path) -> bool:
    """Whether a module was imported from one of the ``others``, and ``folder`` has a file for its name too."""
    if top.startswith(_MODULE):
        return False
    file = Path(str(getattr(sys.modules.get(top), "__file__", None))).resolve()
    return any(file.is_relative_to(other) and (folder / file.relative_to(other)).is_file() for other in others)
