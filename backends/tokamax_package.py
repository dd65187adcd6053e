"""Whether tokamax is here as its backends need it: versions that are known, because they call its private modules."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from importlib import metadata
from types import MappingProxyType

from . import triton_cache

VERSION = "0.0.17"
INSTALL = "pip install '.[tokamax]'"


def missing(backend: str, module: str, also: Mapping[str, str] = MappingProxyType({})) -> tuple[str, ...]:
    """Why ``backend``, whose kernel is in ``module``, cannot be used in this environment; nothing where it can.

    ``also``: other versions that the backend takes, with the module of each. The version is read before any import.
    """
    try:
        found = metadata.version("tokamax")
    except Exception:  # noqa: BLE001 (damaged metadata raises many things, and means the same)
        return (f"{backend} needs the package tokamax {VERSION}, which is not installed; {INSTALL}.",)
    if (known := {VERSION: module, **also}.get(found)) is None:
        wanted = " or ".join((VERSION, *also))
        return (f"{backend} needs tokamax {wanted}, whose private kernel it is, and found {found}; {INSTALL}.",)
    return _import_error(known)


@functools.cache
def _import_error(module: str) -> tuple[str, ...]:
    try:
        with triton_cache.preserved():
            importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 (whatever a broken environment raises is the reason)
        first = (str(error).strip().splitlines() or ["no message"])[0]
        found = metadata.version("tokamax")
        return (f"tokamax {found} does not import here ({type(error).__name__}: {first}); {INSTALL}.",)
    return ()
