"""Check whether Kvax can be used here. Never raises; each reason has versions and the line that fixes it.

Versions are checked before anything is imported, since wrong ones fail without a telling import error. Packages with
the right versions are then imported, and an error becomes a reason too: jax-triton refuses to import without JAX's CUDA
plugin, and Kvax raises AttributeError beside packages that it was not made for.
"""

from __future__ import annotations

import functools
import re
from importlib import metadata

from ..features import Mode

INSTALL = "pip install '.[kvax]'"
# Package -> lowest version, and the first that is too new. Kvax and jax-triton: private names are adapted, so exactly
# these. Triton: 3.5 lacks what jax-triton 0.3.1 calls, 3.8 does not compile Kvax's kernels, 3.9 has no block pointers.
VERSIONS = {
    "kvax": ((0, 1, 0), (0, 1, 1)),
    "triton": ((3, 6), (3, 8)),
    "chex": ((0, 1, 85), (0, 2)),
}
NATIVE_VERSIONS = VERSIONS | {"jax-triton": ((0, 3, 1), (0, 3, 2))}


@functools.cache
def missing(mode: Mode) -> tuple[str, ...]:
    """Every reason why Kvax cannot be used in this environment in ``mode``; none where it can.

    Compiling ahead of time (``compile_kernels``) needs what interpreting needs: neither jax-triton nor a GPU.
    """
    wanted = NATIVE_VERSIONS if mode == "native" else VERSIONS
    reasons = tuple(reason for package in wanted if (reason := _version_reason(package, *wanted[package])))
    if reasons:
        return reasons
    try:
        if mode == "native":
            from . import upstream  # noqa: PLC0415 (imports Kvax)

            upstream.native()
        else:
            from . import interpret  # noqa: PLC0415 (imports Kvax and Triton)

            interpret.interpreted()
    except Exception as error:  # noqa: BLE001 (whatever a broken environment raises is the reason)
        found = ", ".join(f"{package} {_version(package)}" for package in (*wanted, "jax", "jaxlib"))
        first = (str(error).strip().splitlines() or ["no message"])[0]
        cuda = " and 'jax[cuda12]' or 'jax[cuda13]'" if mode == "native" else ""
        return (f"kvax does not import here ({type(error).__name__}: {first}; found {found}); {INSTALL}{cuda}.",)
    return ()


def _version_reason(package: str, least: tuple[int, ...], below: tuple[int, ...]) -> str | None:
    version = _version(package)
    accepted = f"{_dotted(least)} or newer, older than {_dotted(below)}"
    if version is None:
        return f"kvax needs the package {package} ({accepted}), which is not installed; {INSTALL}."
    numbers = _numbers(version)
    if numbers is None or not least <= numbers < below:
        return f"kvax needs {package} {accepted}, and found {version}; {INSTALL}."
    return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except Exception:  # noqa: BLE001 (damaged metadata raises many things, and means the same)
        return None


def _numbers(version: str) -> tuple[int, ...] | None:
    """The release numbers that a version begins with.

    >>> _numbers("3.6.0+git1"), _numbers("nightly")
    ((3, 6, 0), None)
    """
    found = re.match(r"\d+(\.\d+)*(?=\.|\+|$)", version)
    return tuple(map(int, found[0].split("."))) if found else None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
