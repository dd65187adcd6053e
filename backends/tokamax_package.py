"""Whether tokamax is here as its backends need it: exactly one version, because they call its private modules."""

from __future__ import annotations

import functools
import importlib
from importlib import metadata

from . import triton_cache

VERSION = "0.0.17"
INSTALL = "pip install '.[tokamax]'"


def missing(backend: str, module: str) -> tuple[str, ...]:
    """Why ``backend``, whose kernel is in ``module``, cannot be used in this environment; nothing where it can.

    The version is read before any import.
    """
    try:
        found = metadata.version("tokamax")
    except Exception:  # noqa: BLE001 (damaged metadata raises many things, and means the same)
        return (f"{backend} needs the package tokamax {VERSION}, which is not installed; {INSTALL}.",)
    if found != VERSION:
        return (f"{backend} needs tokamax {VERSION}, whose private kernel it is, and found {found}; {INSTALL}.",)
    return _import_error(module)


@functools.cache
def _import_error(module: str) -> tuple[str, ...]:
    try:
        with triton_cache.kept():
            importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 (whatever a broken environment raises is the reason)
        first = (str(error).strip().splitlines() or ["no message"])[0]
        return (f"tokamax {VERSION} does not import here ({type(error).__name__}: {first}); {INSTALL}.",)
    return ()
