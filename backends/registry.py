"""Backends by name: those that ship here, those of other packages, and those registered at run time.

Another package adds backends through the entry-point group ``attnsuite.backends``. Each entry names a
:class:`~attnsuite.backends.contract.Backend`, a class of one, or a callable without arguments that returns one. Entry
points are read once, when a name is first looked up. An entry that fails to load stays in the registry and refuses
everything with its error as the reason, so that a broken package does not affect the others.
"""

from __future__ import annotations

import dataclasses
import importlib
import threading
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from attnsuite.sentences import nearest

from .contract import Backend, Plan
from .devices import Target
from .features import DTYPES, FEATURES, Mode, Takes

ENTRY_POINT_GROUP = "attnsuite.backends"

BUILT_IN = {
    "standard": "attnsuite.backends.standard:STANDARD",
    "chunked": "attnsuite.backends.chunked:CHUNKED",
    "flash_cpu": "attnsuite.backends.flash_cpu:FLASH_CPU",
    "cudnn": "attnsuite.backends.cudnn:CUDNN",
    "kvax": "attnsuite.backends.kvax:KVAX",
    "splash": "attnsuite.backends.splash:SPLASH",
    "pallas_flash": "attnsuite.backends.pallas_flash:PALLAS_FLASH",
    "tokamax_splash": "attnsuite.backends.tokamax_splash:TOKAMAX_SPLASH",
    "tokamax_triton": "attnsuite.backends.tokamax_triton:TOKAMAX_TRITON",
    "paged_attention": "attnsuite.backends.paged_attention:PAGED_ATTENTION",
    "ragged_paged_attention": "attnsuite.backends.ragged_paged_attention:RAGGED_PAGED_ATTENTION",
    "tpu_flash_attention": "attnsuite.backends.tpu_flash_attention:TPU_FLASH_ATTENTION",
    "kascade": "attnsuite.backends.kascade:KASCADE",
}


class UnknownBackendError(ValueError):
    """A backend name that nobody registered."""


@dataclasses.dataclass(frozen=True, slots=True)
class BrokenBackend:
    """Stands in for a backend whose package failed to load; refuses everything with the error as the reason."""

    name: str
    error: str
    exact: bool = True

    def takes(self, target: Target, mode: Mode) -> Takes:
        """All; :meth:`refuses` gives the one reason."""
        return Takes(features=frozenset(FEATURES), dtypes=DTYPES)

    def refuses(self, *_: Any) -> tuple[str, ...]:
        """Refuse, with the error."""
        return (self.error,)

    def plan(self, *_: Any, **__: Any) -> Plan:
        """Raise ImportError with the error."""
        raise ImportError(self.error)


class Registry:
    """A set of backends by name. Names are unique; registering one twice is an error."""

    def __init__(self, built_in: Mapping[str, str] = BUILT_IN) -> None:
        self._built_in = dict(built_in)
        self._loaded: dict[str, Backend] = {}
        self._found: dict[str, metadata.EntryPoint] | None = None
        self._lock = threading.Lock()

    def register(self, backend: Backend) -> None:
        """Add a backend for this process. Raises TypeError if it is not one, ValueError if the name is taken."""
        if lack := _lacks(backend):
            raise TypeError(f"{backend!r} is not a backend; it needs {lack}.")
        with self._lock:
            if backend.name in self.names():
                raise ValueError(f"a backend named {backend.name!r} is already registered; choose another name.")
            self._loaded[backend.name] = backend

    def names(self) -> tuple[str, ...]:
        """Every registered name: built-in ones first, then the rest in alphabetical order."""
        others = set(self._loaded) | set(self._entry_points())
        return (*self._built_in, *sorted(others - set(self._built_in)))

    def get(self, name: str) -> Backend:
        """The backend of that name. Raises UnknownBackendError, which lists the registered names.

        Raises TypeError for something else than a name.
        """
        if not isinstance(name, str):
            raise TypeError(f"backend={name!r} is no name; register a backend, and give the name that it has.")
        if name in self._loaded:
            return self._loaded[name]
        if name in self._built_in:
            backend = _load_built_in(name, self._built_in[name])
        elif name in self._entry_points():
            backend = _load_entry_point(self._entry_points()[name])
        else:
            known = self.names()
            raise UnknownBackendError(
                f"backend {name!r} is not registered; registered are: {', '.join(known)}.{nearest(name, known)}"
            )
        with self._lock:
            return self._loaded.setdefault(name, backend)

    def _entry_points(self) -> dict[str, metadata.EntryPoint]:
        if self._found is None:  # reading them takes milliseconds, and every resolution asks
            self._found = {entry.name: entry for entry in metadata.entry_points(group=ENTRY_POINT_GROUP)}
        return self._found


def _load_built_in(name: str, reference: str) -> Backend:
    """Load a backend that ships here. One that uses experimental modules of JAX may fail to load with a later JAX."""
    module, _, attribute = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # noqa: BLE001 (as for a foreign package: the others go on)
        return BrokenBackend(name, f"{name} does not load here ({type(error).__name__}: {error}).")


def _load_entry_point(entry: metadata.EntryPoint) -> Backend:
    origin = f"entry point {entry.value} of {entry.dist.name if entry.dist else 'an unnamed package'}"
    try:
        found: Any = entry.load()
        if isinstance(found, type) or (_lacks(found) and callable(found)):
            found = found()
        lack = _lacks(found)
        if lack:
            return BrokenBackend(entry.name, f"{origin} is not a backend named {entry.name!r}; it needs {lack}.")
        if found.name != entry.name:
            return BrokenBackend(
                entry.name, f"{origin} is not a backend named {entry.name!r}; its name is {found.name!r}."
            )
    except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever a foreign package raises becomes the reason)
        return BrokenBackend(entry.name, f"{origin} failed to load: {type(error).__name__}: {error}")
    return found


def _lacks(backend: Any) -> str:
    """Why an object is no backend; empty if it is one. A class is not a backend, its instance may be."""
    if isinstance(backend, type):
        return f"to be an instance: {backend.__name__}(...)"
    lacking = [name for name in ("name", "exact") if not hasattr(backend, name)]
    lacking += [f"{name}(...)" for name in ("plan", "takes") if not callable(getattr(backend, name, None))]
    if not lacking and type(backend).__hash__ is None:
        lacking.append("to be hashable, since models pass it as a static argument of jax.jit")
    return ", ".join(lacking)


# The one registry of the process: register() asks for a place that outlives the call. See docs/explanation/design.md.
DEFAULT = Registry()


def register(backend: Backend) -> None:
    """Add a backend to the registry of this process; see :meth:`Registry.register`."""
    DEFAULT.register(backend)


def names() -> tuple[str, ...]:
    """Names of all registered backends.

    >>> "standard" in names()
    True
    """
    return DEFAULT.names()


def get(name: str) -> Backend:
    """The backend of that name; raises UnknownBackendError listing the registered ones."""
    return DEFAULT.get(name)
