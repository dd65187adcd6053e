"""Hold attention backends to the contract: the conformance suite as it is installed.

``Conformance`` is a class of tests to inherit (it needs pytest: the extra ``testing``). ``cases.py`` has the named
problems, ``random_specs.py`` random ones, and ``judging.py`` judges a backend on one of them; these do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .conformance import Conformance as Conformance


def __getattr__(name: str) -> Any:
    """Import the class when it is asked for: what judges needs no pytest."""
    if name != "Conformance":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from .conformance import Conformance  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name != "pytest":
            raise
        raise ImportError("Conformance needs pytest, which is not installed; pip install '.[testing]'.") from error
    return Conformance
